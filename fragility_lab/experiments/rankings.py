"""Agreement of two scores on the ranks of a window's blocks (protocol section 5, E3).

Scores are arrays (..., L), one row per window. A larger score means a more important block. Every function compares
along the last axis and broadcasts over the other axes.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

TOPS = (3, 5)


def ranks(scores: ArrayLike) -> np.ndarray:
    """Ranks from 1 (the largest score) to L. Ties share their average rank. A NaN makes its row NaN."""
    return stats.rankdata(-np.asarray(scores), axis=-1)


def spearman(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Spearman's correlation (...): Pearson's correlation of the ranks. NaN if a row is constant."""
    a, b = (r - r.mean(-1, keepdims=True) for r in (ranks(first), ranks(second)))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def pairwise_accuracy(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Share (...) of the pairs of blocks that both scores put in the same order. Pairs with a tie do not count."""
    pairs = np.triu_indices(np.shape(first)[-1], 1)
    a, b = (np.sign(r[..., pairs[0]] - r[..., pairs[1]]) for r in (ranks(first), ranks(second)))
    with np.errstate(invalid="ignore"):
        return (a * b > 0).sum(-1) / (a * b != 0).sum(-1)


def top_overlap(first: ArrayLike, second: ArrayLike, count: int) -> np.ndarray:
    """Share (...) of the ``count`` largest values (..., L) that both scores have in common; ties go by position."""
    count = min(count, np.shape(first)[-1])
    a, b = (np.argsort(np.argsort(ranks(x), axis=-1, kind="stable"), axis=-1) < count for x in (first, second))
    return (a & b).sum(-1) / count


def rank_gap(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Mean distance (...) between a block's two ranks."""
    return abs(ranks(first) - ranks(second)).mean(-1)


def agreement(first: ArrayLike, second: ArrayLike) -> dict[str, np.ndarray]:
    """The measures of protocol section 5 by name, each (...). NaN if a row is not finite."""
    first, second = np.broadcast_arrays(first, second)
    finite = np.isfinite(first).all(-1) & np.isfinite(second).all(-1)
    measures = {
        "spearman": spearman(first, second),
        "pairwise_accuracy": pairwise_accuracy(first, second),
        "top1_hit": top_overlap(first, second, 1),
        **{f"top{count}_overlap": top_overlap(first, second, count) for count in TOPS},
        "mean_rank_gap": rank_gap(first, second),
    }
    return {name: np.where(finite, values, np.nan) for name, values in measures.items()}


def noise_floor(realisations: ArrayLike, nearest: ArrayLike) -> dict[str, np.ndarray]:
    """Spearman's correlation (...) between effects that were measured in equally good roundings.

    ``realisations`` (R, ..., L) are effects under stochastic rounding, ``nearest`` (..., L) effects under rounding to
    nearest. ``noise_floor`` is the mean correlation of a realisation with ``nearest``. A score with that correlation
    predicts the effects as well as another measurement does. ``between_realisations`` is the mean over pairs of
    realisations, NaN for a single one. A score that knew the effects without noise would have a correlation with
    ``nearest`` of about noise_floor / sqrt(between_realisations) (Spearman 1904, attenuation).
    """
    realisations = np.asarray(realisations)
    first, second = np.triu_indices(len(realisations), 1)
    pairs = spearman(realisations[first], realisations[second])
    floor = spearman(realisations, np.broadcast_to(nearest, realisations.shape)).mean(0)
    between = pairs.mean(0) if len(first) else np.full_like(floor, np.nan)
    return {"noise_floor": floor, "between_realisations": between}
