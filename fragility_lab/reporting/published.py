"""Numbers that others published, to set beside ours (protocol sections 4 and 7)."""

# E1, measured on the authors' release in double precision.
E1_RELEASE = {
    "attention_pearson": 0.9999987469948455,
    "attention_spearman": 1.0,
    "layernorm_pearson": 0.9378063378674619,
    "layernorm_spearman": 1.0,
    "residual_max_gap": 4.91093565467291,
}

# E5 of the paper: policy -> quantity -> (mean over seeds, standard deviation or None).
E5_PAPER = {
    "random_same_budget": {
        "onsets": (11.67, None), "final_mismatch": (1.284e-3, None), "max_mismatch": (8.49e-3, None),
        "protected_layer_steps": (2742, None),
    },
    "risk_only_same_budget": {
        "onsets": (10.67, None), "final_mismatch": (1.221e-3, None), "max_mismatch": (5.71e-3, None),
        "protected_layer_steps": (2742, None),
    },
    "bgss": {
        "onsets": (10.67, 1.15), "final_mismatch": (1.243e-3, 2.87e-5), "max_mismatch": (3.14e-3, 1.01e-3),
        "protected_layer_steps": (2742, None),
    },
    "static_global": {"protected_layer_steps": (3072, None)},
}  # fmt: skip

HARDWARE_PAPER = "NVIDIA H100"
