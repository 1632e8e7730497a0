"""What the notebooks and the make targets are made of; everything that computes is in ``fragility_core``."""
