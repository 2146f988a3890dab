"""Layer 11: the command line."""
