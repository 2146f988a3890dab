"""Layer 3: what travels between ranks."""
