"""Experiments, pages and programs behind the notebooks and the make targets; the methods are in ``fragility_core``."""
