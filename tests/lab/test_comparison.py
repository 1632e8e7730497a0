"""Probabilities of two passes, compared in fp64: tiny divergences, vocabularies larger than what is held at once."""

import math

import numpy as np
import pytest
import torch
from tiny import random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from fragility_lab.measurement import comparison
from fragility_lab.measurement.comparison import ObservedPass, by_token, compare

T, TOKENS = 7, random_tokens(3, 7, seed=2, vocabulary=300)


def peaked_logits(vocabulary, change, batch=3):
    """fp32 logits (batch, T, vocabulary) of a peaked distribution, and others that differ by about ``change``."""
    generator = torch.Generator().manual_seed(0)
    exact = 5 * torch.randn(batch, T, vocabulary, generator=generator)
    return exact + change * torch.randn(exact.shape, generator=generator), exact


def by_hand(low, exact):
    """KL (T,) of one window, as a sum of terms none of which is negative, so that nothing cancels; one by one."""
    p, q = ([[math.exp(z - max(row)) for z in row] for row in x.tolist()] for x in (exact, low))
    found = []
    for a, b, u, v in zip(p, q, exact.tolist(), low.tolist()):
        total, other = math.fsum(a), math.fsum(b)
        terms = []
        for x, z, w in zip(a, u, v):
            gap = (z - max(u) - math.log(total)) - (w - max(v) - math.log(other))
            terms.append(x / total * (gap + math.expm1(-gap)))
        found.append(math.fsum(terms))
    return found


@pytest.mark.parametrize("change", [1e-5, 3e-5, 1e-3, 0.1, 1.0])
def test_divergences_are_those_of_fp64_however_small(change):
    low, exact = peaked_logits(300, change)
    kl = by_token(low, exact, TOKENS).kl
    want = np.array([by_hand(*window) for window in zip(low, exact)])
    assert kl.dtype == torch.float64 and kl.min() > 0
    np.testing.assert_allclose(kl.numpy(), want, rtol=1e-3 if change < 1e-4 else 1e-6, atol=1e-14)
    assert change > 1e-4 or want.mean() < 1e-9


def test_equal_logits_have_no_divergence_and_a_shift_changes_nothing():
    _, exact = peaked_logits(300, 0)
    same, shifted = by_token(exact, exact, TOKENS), by_token(exact + 8, exact, TOKENS)
    assert not same.kl.any() and not same.changed.any() and torch.equal(same.logprob, same.exact_logprob)
    assert shifted.kl.abs().max() < 1e-10  # the shifted fp32 logits are rounded


def test_columns_of_windows():
    low, exact = peaked_logits(300, 0.3)
    state = torch.ones(3, T, 4)
    windows, _ = compare(*(ObservedPass(z, state, [state]) for z in (low, exact)), TOKENS)
    for number, row in enumerate(windows.itertuples()):
        p, q = (torch.log_softmax(z[number].double(), -1)[:-1] for z in (exact, low))
        following = TOKENS[number, 1:, None]
        change = (q - p).gather(-1, following)
        assert row.logprob == pytest.approx(change.square().mean().sqrt().item(), rel=1e-12)
        assert row.loss == pytest.approx(-q.gather(-1, following).mean().item(), rel=1e-12)
        assert row.reference_loss == pytest.approx(-p.gather(-1, following).mean().item(), rel=1e-12)
        assert row.changed == (low[number].argmax(-1) != exact[number].argmax(-1)).double().mean().item()


class Wide(TorchDispatchMode):
    """Keeps the size of the largest fp64 tensor that any kernel makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(("vocabulary", "at_once"), [(300, 1000), (300, 100), (300, 2**21), (262_144, None)])
def test_positions_are_compared_a_few_at_a_time(vocabulary, at_once, monkeypatch):
    low, exact = peaked_logits(vocabulary, 1e-3, batch=2)
    whole = by_token(low, exact, TOKENS[:2])
    if at_once is not None:
        monkeypatch.setattr(comparison, "AT_ONCE", at_once)
    with Wide() as wide:
        parts = by_token(low, exact, TOKENS[:2])
    assert wide.largest <= max(comparison.AT_ONCE, vocabulary) < 2 * T * 262_144
    assert wide.largest >= vocabulary
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("shape", [(1, T, 300), (3, T - 1, 300), (3, T, 299), (T, 300)])
def test_logits_of_other_windows_are_refused(shape):
    low, exact = peaked_logits(300, 0.1)
    other = low.flatten()[: math.prod(shape)].view(shape)
    for pair in ((other, exact), (exact, other)):
        with pytest.raises(ValueError, match=r"logits must be those of the tokens, \(3, 7, 'vocabulary'\), got shapes"):
            by_token(*pair, TOKENS)
