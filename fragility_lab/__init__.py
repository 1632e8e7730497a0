"""The notebooks and the make targets are made of this package; what computes is in ``fragility_core``."""
