"""Engines that other people wrote, held against predictions: is a gap between log-probabilities rounding, or a bug?

``logs`` reads the log-probabilities that an engine gives. ``gap`` predicts what rounding alone must give for the same
tokens, and judges. ``suspects`` are changes of a model that people reported as bugs: each is run in fp32, and tested
against the gap. ``python -m fragility_engines`` (``make compare``) does all three.
"""
