"""Layer 2: what travels between ranks."""
