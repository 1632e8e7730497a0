"""Models larger than memory: weights that are read when a part of the model runs, and dropped after it."""
