"""The structure of Transformers: blocks, norms and projections, found by what modules compute, not by their names."""
