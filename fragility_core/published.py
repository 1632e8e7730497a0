"""Numbers that others published, to set beside ours (protocol sections 4 and 7)."""

# E1, measured on the authors' release in double precision.
E1_RELEASE = {
    "attention_pearson": 0.9999987469948455,
    "attention_spearman": 1.0,
    "layernorm_pearson": 0.9378063378674619,
    "layernorm_spearman": 1.0,
    "residual_max_gap": 4.91093565467291,
}

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
