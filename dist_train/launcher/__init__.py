"""Layer 10: from a config to running ranks."""
