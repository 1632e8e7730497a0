"""Published values that are not claims; the claims are in ``claims`` (protocol sections 4 and 7)."""

# E1, measured on the authors' release in double precision.
E1_RELEASE = {
    "attention_pearson": 0.9999987469948455,
    "attention_spearman": 1.0,
    "layernorm_pearson": 0.9378063378674619,
    "layernorm_spearman": 1.0,
    "residual_max_gap": 4.91093565467291,
}

HARDWARE_PAPER = "NVIDIA H100"
