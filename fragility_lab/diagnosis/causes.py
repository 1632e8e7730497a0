"""Causes of the error: shares of sites, modules and blocks, and errors that act together."""

import pandas as pd
from scipy import stats

from fragility_adjoint.explain.coherence import GROUPS, MATTERS, Coherence
from fragility_adjoint.mixed_precision import Contributions
from fragility_lab.diagnosis.means import estimate
from fragility_lab.reporting.tables import number, percent

SITE_NAMES = {
    "residual": "residual additions", "norm": "norms", "scores": "attention scores", "softmax": "softmax",
    "context": "attention context", "projection": "attention projections", "attention": "attention, other",
    "mlp": "MLP", "embedding": "embedding", "router": "router", "head": "head",
}  # fmt: skip
PAIRS = 5  # pairs that a page names
NEGLIGIBLE = 0.01  # remainder of secant slopes up to which contributions are said to add up


def shares(contributions: Contributions, columns: str | list[str]) -> pd.Series:
    """Share of the squared error by ``columns`` of the places, largest first; 0 where nothing is rounded."""
    summed = contributions.structure.places.assign(c2=contributions.relative).groupby(columns).c2.sum()
    return (summed / (summed.sum() or 1.0)).sort_values(ascending=False)


def largest(contributions: Contributions, count: int = 8) -> list[tuple[str, str, str]]:
    """Module, kind of site and share of the ``count`` largest contributions."""
    by_module = shares(contributions, ["module", "site"]).head(count)
    named = [(module or "the model itself", SITE_NAMES[site]) for module, site in by_module.index]
    return [(*names, percent(share)) for names, share in zip(named, by_module)]


def block_shares(contributions: Contributions) -> pd.Series:
    """Share of the squared error by block, in the model's order; "embedding" is before the blocks, "after" behind."""
    places = contributions.structure.places
    names = places.layer.astype("string").fillna(places.site.map({"embedding": "embedding"}).fillna("after"))
    summed = pd.Series(contributions.relative).groupby(names.to_numpy()).sum()
    order = sorted(summed.index, key=lambda name: {"embedding": -1, "after": len(places)}.get(name) or int(name))
    return summed[order] / (summed.sum() or 1.0)


def interval(found: tuple[float, float], windows: int) -> str:
    """A ratio of squares with its 95 % interval, Student's, from its standard error over ``windows``."""
    ratio, half = found[0], found[1] * stats.t.isf(0.025, windows - 1)
    return estimate({"mean": ratio, "low": max(ratio - half, 0.0), "high": ratio + half}, lambda x: number(x, ".2f"))


def coherence_summary(coherence: Coherence) -> dict[str, object]:
    """Values for the page on errors that act together: ratios, the ``pairs`` that matter, and how many there are."""
    pairs, windows = coherence.pairs(), len(coherence.grams)
    names = [named(*group) for group in coherence.groups[GROUPS].itertuples(index=False)]
    shown = pairs[pairs.matters].head(PAIRS)
    return {
        "between": interval(coherence.between(), windows),
        "inside": interval(coherence.inside(), windows),
        "count": len(pairs),
        "windows": windows,
        "remainder": percent(coherence.remainder) if coherence.remainder < NEGLIGIBLE else "",
        "measured": not pd.isna(coherence.remainder),
        "visible": percent(visible) if (visible := max(pairs.limit.max(), MATTERS)) < 1 else "",
        "matter": int(pairs.matters.sum()),
        "pairs": [
            (names[pair.first], names[pair.second], "reinforce" if pair.share > 0 else "cancel", percent(pair.share))
            for pair in shown.itertuples()
        ],
    }


def named(layer: object, last: object, site: str, kind: str) -> str:
    """A group of sites in words: of one block, of the blocks from ``layer`` to ``last``, or outside of blocks."""
    blocks = f", block {layer}" if not pd.isna(layer) and layer == last else f", blocks {layer} to {last}"
    return f"{SITE_NAMES[site]}, {kind}s" + ("" if pd.isna(layer) else blocks)
