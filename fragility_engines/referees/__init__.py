"""Engines that other people wrote, run over the same tokens as our predictions and emulations for them."""
