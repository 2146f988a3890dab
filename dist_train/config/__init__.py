"""Layer 0: what a run is asked to do."""
