"""Layer 3: what a parameter is to the whole system, whoever holds which part of it."""
