"""The paper's experiments, each a pure function of its specification to tidy tables."""
