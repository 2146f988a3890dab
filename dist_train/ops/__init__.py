"""Layer 2: the arithmetic of a transformer, one file per operation, each with its reference in plain torch."""
