"""Quantization: numbers under shared scales, recipes of them, and models that store weights and caches so."""
