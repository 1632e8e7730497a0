"""Models larger than memory: weights are read from files, part by part, while the model runs."""
