"""Layer 1: which rank is where."""
