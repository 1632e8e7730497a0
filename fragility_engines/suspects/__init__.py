"""Suspects: what may be wrong in an engine, as changes of the fp32 model."""
