"""Numbers that others published, to set beside ours (protocol sections 4 and 7)."""

# E1, measured on the authors' release in double precision.
E1_RELEASE = {
    "attention_pearson": 0.9999987469948455,
    "attention_spearman": 1.0,
    "layernorm_pearson": 0.9378063378674619,
    "layernorm_spearman": 1.0,
    "residual_max_gap": 4.91093565467291,
}

# E1 of the paper: quantity -> (value, None).
E1_PAPER = {"attention_pearson": (0.999999, None), "attention_spearman": (1.0, None)}

# E2 of the paper: quantity -> (mean, standard deviation over runs or None).
E2_PAPER = {
    "combined_pearson": (0.370, 0.119),
    "combined_spearman": (0.351, 0.060),
    "no_transport_pearson": (0.206, None),
    "no_transport_spearman": (0.212, None),
    "delta_pearson": (0.163, None),
    "delta_spearman": (0.139, None),
}

# E2 counts of the paper: claim -> (runs in which it holds, all runs).
E2_PAPER_COUNTS = {
    "combined correlates positively (Pearson)": (18, 18),
    "transport improves Pearson": (17, 18),
    "transport improves retrieval": (12, 18),
}

# E3 of the paper: quantity -> (mean, standard deviation over runs or None).
E3_PAPER = {
    "spearman": (0.362, 0.156),
    "pairwise_accuracy": (0.643, 0.061),
    "top1_hit": (0.264, None),
    "top3_overlap": (0.505, 0.108),
    "top5_overlap": (0.622, 0.084),
    "recompute_gap": (9.24e-7, 3.47e-7),
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

# E5 counts of the paper: claim -> (seeds in which it holds, all seeds).
E5_PAPER_COUNTS = {"bgss has a smaller maximum mismatch than risk-only": (3, 3)}

HARDWARE_PAPER = "NVIDIA H100"
