"""The paper's claims as data: each number of protocol section 7, where a run has it, and what is claimed of it."""

from dataclasses import dataclass, replace

from fragility_lab.reporting.published import E5_PAPER


@dataclass(frozen=True)
class Quantity:
    """One number of the paper, how a run's tables give it, and the claim that rests on it, if any.

    ``values`` is a pandas expression over ``table``, one value per run; a table with a column ``policy`` has
    one row per seed there (``verdicts.by_seed``). ``paper`` is (mean, standard deviation or None), where
    runs are ``counted`` (runs, all runs). ``test`` is one of ``verdicts.TESTS``, ``bound`` the number or
    expression that it compares the mean with. Where nothing is ``sampled`` (E1: the same sweeps
    everywhere, in double precision), a number stands for itself.
    """

    experiment: str
    name: str
    table: str
    values: str
    paper: tuple[float, float | None] | None = None
    claim: str = ""
    test: str = ""
    bound: str = "0"
    digits: str = ".3f"
    counted: bool = False
    sampled: bool = True


SECOND_SETTING = "E5, second setting"

POSITIVE = {"test": "above", "bound": "0"}


def _e1(*arguments, **options) -> Quantity:
    return Quantity("E1", *arguments, sampled=False, **options)


_PERFECT = {"test": "above", "bound": "0.99", "digits": ".6f"}

E1 = (
    _e1("Attention: Pearson of proxy and measured change", "e1_attention", "measured.corr(proxy)",
        (0.999999, None), "the attention proxy tracks the measured change almost perfectly", **_PERFECT),
    _e1("Attention: Spearman of proxy and measured change", "e1_attention", "measured.corr(proxy, method='spearman')",
        (1.0, None), "the attention proxy ranks the measured changes almost perfectly", **_PERFECT),
    _e1("LayerNorm: steps of ε at which the measured change falls", "e1_layernorm", "measured.diff().dropna() < 0",
        (9, 9), "LayerNorm's measured change falls as ε grows", "every", counted=True),
    _e1("LayerNorm: steps of ε at which the proxy falls", "e1_layernorm", "theory.diff().dropna() < 0",
        (9, 9), "LayerNorm's proxy falls as ε grows", "every", counted=True),
    _e1("Residual: gains ρ with an amplification within the bound", "e1_residual", "measured <= bound",
        (8, 8), "the amplification stays below the transport bound", "every", counted=True),
)  # fmt: skip


def _e2(name: str, values: str, paper: tuple, claim: str = "", **options) -> Quantity:
    return Quantity("E2", name, "e2_runs", values, paper, claim, **options)


E2 = (
    _e2("Pearson of combined and mismatch", "combined_pearson", (0.370, 0.119),
        "the score correlates positively with the mismatch", **POSITIVE),
    _e2("Spearman of combined and mismatch", "combined_spearman", (0.351, 0.060),
        "the score ranks the windows by mismatch better than chance", **POSITIVE),
    _e2("Runs with a positive Pearson of combined", "combined_pearson > 0", (18, 18),
        "the correlation is positive in every run", test="every", counted=True),
    _e2("Pearson of no_transport and mismatch", "no_transport_pearson", (0.206, None)),
    _e2("Spearman of no_transport and mismatch", "no_transport_spearman", (0.212, None)),
    _e2("ΔPearson, combined − no_transport", "delta_pearson", (0.163, None),
        "transport improves Pearson on average", **POSITIVE),
    _e2("ΔSpearman, combined − no_transport", "delta_spearman", (0.139, None),
        "transport improves Spearman on average", **POSITIVE),
    _e2("Runs in which transport improves Pearson", "delta_pearson > 0", (17, 18),
        "transport improves Pearson in most runs", test="most", counted=True),
    _e2("Runs in which transport improves top-k retrieval", "delta_retrieval > 0", (12, 18),
        "transport improves retrieval in most runs", test="most", counted=True),
)  # fmt: skip


def _e3(values: str, name: str, paper: tuple, claim: str, bound: str, **options) -> Quantity:
    return Quantity("E3", name, "e3_runs", values, paper, claim, options.pop("test", "above"), bound, **options)


# The bounds of the rankings are what a random order of the blocks would reach.
E3 = (
    _e3("spearman", "Spearman of score and exact effect over blocks", (0.362, 0.156),
        "the score ranks blocks better than chance", "0"),
    _e3("pairwise_accuracy", "Pairwise ordering accuracy", (0.643, 0.061),
        "pairs of blocks are ordered better than by chance", "0.5"),
    _e3("top1_hit", "Top-1 hit", (0.264, None),
        "the most important block is found more often than by chance", "1 / layers"),
    _e3("top3_overlap", "Top-3 overlap", (0.505, 0.108),
        "the three most important blocks are found better than by chance", "3 / layers"),
    _e3("top5_overlap", "Top-5 overlap", (0.622, 0.084),
        "the five most important blocks are found better than by chance", "5 / layers"),
    _e3("recompute_gap", "Recompute gap of the mismatch", (9.24e-7, 3.47e-7),
        "E3's forward pass is that of E2 (gap below 1 % of the mismatch)", "0.01 * base_mismatch",
        test="below", digits=".2e"),
    Quantity(
        "E3", "Noise floor: Spearman of another rounding's effects and the exact ones (ours)", "e3_runs", "noise_floor"
    ),
)  # fmt: skip

# --- E5: levels as the paper gives them, and BGSS against its rivals, paired by seed ---------------

_POLICIES = {
    "random": "random_same_budget", "risk_only": "risk_only_same_budget", "bgss": "bgss", "static": "static_global",
}  # fmt: skip
_NAMES = {"random": "random", "risk_only": "risk-only", "bgss": "BGSS", "static": "static"}
_COLUMNS = {  # column of the table: in words, the paper's name, digits
    "onsets_release_ratio": ("Onsets at ratio 1.22", "onsets", ".2f"),
    "onsets": ("Onsets at the chosen ratio", "onsets", ".2f"),
    "final_mismatch": ("Final mismatch", "final_mismatch", ".3e"),
    "max_mismatch": ("Largest mismatch", "max_mismatch", ".2e"),
    "protected_layer_steps": ("Protected layer-steps", "protected_layer_steps", ".0f"),
}


def _paper(column: str, policy: str) -> tuple[float, float | None] | None:
    return E5_PAPER[_POLICIES[policy]].get(_COLUMNS[column][1])


def _level(column: str, policy: str) -> Quantity:
    words, _, digits = _COLUMNS[column]
    name = f"{words}, {_NAMES[policy]}"
    return Quantity("E5", name, "e5_runs", f"{column}_{policy}", _paper(column, policy), digits=digits)


def _contest(column: str, rival: str, claim: str, test: str, second: bool = False) -> Quantity:
    """BGSS minus ``rival`` in ``column``, in the ``second`` setting or the paper's."""
    words, _, digits = _COLUMNS[column]
    known = [_paper(column, policy) for policy in ("bgss", rival)]
    return Quantity(
        SECOND_SETTING if second else "E5",
        f"{words}, BGSS − {_NAMES[rival]}",
        "e5_spiking_runs" if second else "e5_runs",
        f"{column}_bgss - {column}_{rival}",
        (known[0][0] - known[1][0], None) if all(known) else None,
        claim,
        test,
        digits=digits,
    )


def _wins(second: bool = False) -> Quantity:
    """In how many seeds BGSS has the smaller worst case."""
    contest = _contest("max_mismatch", "risk_only", "BGSS wins the worst case in every seed", "every", second)
    values = "max_mismatch_bgss < max_mismatch_risk_only"
    return replace(
        contest,
        name="Seeds in which BGSS's largest mismatch is below risk-only's",
        values=values,
        paper=(3, 3),
        counted=True,
    )


_AT_PAPER_RATIO = (
    ("onsets_release_ratio", "random", "BGSS has fewer onsets than random", "below"),
    ("onsets_release_ratio", "risk_only", "BGSS has no more onsets than risk-only", "at most"),
)
_AT_CHOSEN_RATIO = (
    ("onsets", "random", "BGSS has fewer onsets than random, at the chosen ratio", "below"),
    ("onsets", "risk_only", "BGSS has no more onsets than risk-only, at the chosen ratio", "at most"),
)
_MISMATCH = (
    ("final_mismatch", "random", "BGSS ends with a smaller mismatch than random", "below"),
    ("final_mismatch", "risk_only", "BGSS ends with a slightly larger mismatch than risk-only", "above"),
    ("max_mismatch", "random", "BGSS's largest mismatch is below random's", "below"),
    ("max_mismatch", "risk_only", "BGSS's largest mismatch is below risk-only's", "below"),
)
_BUDGET = (
    ("protected_layer_steps", "random", "BGSS protects as many layer-steps as random", "equal"),
    ("protected_layer_steps", "risk_only", "BGSS protects as many layer-steps as risk-only", "equal"),
    ("protected_layer_steps", "static", "static protects more layer-steps than BGSS", "below"),
    ("final_mismatch", "static", "static still ends with a larger mismatch than BGSS", "below"),
    ("max_mismatch", "static", "static's largest mismatch is still above BGSS's", "below"),
)

E5 = (
    *(_level(column, policy) for column in ("onsets_release_ratio", "final_mismatch", "max_mismatch")
      for policy in ("random", "risk_only", "bgss")),
    *(_level("protected_layer_steps", policy) for policy in _POLICIES),
    *(_contest(*contest) for contest in (*_AT_PAPER_RATIO, *_AT_CHOSEN_RATIO, *_MISMATCH)),
    _wins(),
    *(_contest(*contest) for contest in _BUDGET),
)  # fmt: skip

E5_SECOND = (
    *(_contest(*contest, second=True) for contest in (*_AT_PAPER_RATIO, *_MISMATCH)),
    _wins(second=True),
)

QUANTITIES = (*E1, *E2, *E3, *E5, *E5_SECOND)
