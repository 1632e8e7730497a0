"""How alike two scores rank the blocks of a window (protocol section 5, E3).

Scores are arrays (..., L), one row per window, larger meaning more important; every function compares
along the last axis, with NumPy broadcasting over the others.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

TOPS = (3, 5)


def ranks(scores: ArrayLike) -> np.ndarray:
    """Ranks from 1, the largest score, to L; ties share their average rank, a NaN makes its row NaN."""
    return stats.rankdata(-np.asarray(scores), axis=-1)


def spearman(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Spearman's correlation (...), Pearson's of the ranks; NaN where a row is constant."""
    a, b = (r - r.mean(-1, keepdims=True) for r in (ranks(first), ranks(second)))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def pairwise_accuracy(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Share (...) of the pairs of blocks, of those without a tie on either side, that both put in the same order."""
    pairs = np.triu_indices(np.shape(first)[-1], 1)
    a, b = (np.sign(r[..., pairs[0]] - r[..., pairs[1]]) for r in (ranks(first), ranks(second)))
    with np.errstate(invalid="ignore"):
        return (a * b > 0).sum(-1) / (a * b != 0).sum(-1)


def top_overlap(first: ArrayLike, second: ArrayLike, count: int) -> np.ndarray:
    """Share (...) of the ``count`` largest values (..., L) that both have, ties by place."""
    count = min(count, np.shape(first)[-1])
    a, b = (np.argsort(np.argsort(ranks(x), axis=-1, kind="stable"), axis=-1) < count for x in (first, second))
    return (a & b).sum(-1) / count


def rank_gap(first: ArrayLike, second: ArrayLike) -> np.ndarray:
    """Mean distance (...) of a block's two ranks."""
    return abs(ranks(first) - ranks(second)).mean(-1)


def agreement(first: ArrayLike, second: ArrayLike) -> dict[str, np.ndarray]:
    """Every measure of protocol section 5 by name, each (...); NaN where a row is not finite."""
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
    """Spearman (...) between effects measured in equally good roundings.

    ``realisations`` (R, ..., L) are effects under stochastic rounding, ``nearest`` (..., L) under
    rounding to nearest. ``with_nearest`` is the mean over each realisation with ``nearest``: a score that
    agrees with ``nearest`` as well is worth another measurement. ``between_realisations`` is the mean over
    pairs of realisations (NaN for one). A score that knew the effects free of noise would agree with
    ``nearest`` by about with_nearest / sqrt(between_realisations) (Spearman 1904, attenuation).
    """
    realisations = np.asarray(realisations)
    first, second = np.triu_indices(len(realisations), 1)
    pairs = spearman(realisations[first], realisations[second])
    with_nearest = spearman(realisations, np.broadcast_to(nearest, realisations.shape)).mean(0)
    return {
        "between_realisations": pairs.mean(0) if len(first) else np.full_like(with_nearest, np.nan),
        "with_nearest": with_nearest,
    }
