"""Layer 9: one run, from a config and a mesh to trained weights."""
