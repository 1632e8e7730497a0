"""What most probable tokens tell: a bound on KL, and changes of the most probable one."""

import numpy as np
import pytest
import torch
from test_suspects import LLAMA
from tiny import random_model, random_tokens

from fragility_engines.comparison.measuring import measure
from fragility_engines.logs import tops
from fragility_engines.logs.sequences import Scored
from fragility_engines.suspects.suspect import logprobs

WINDOWS = random_tokens(2, 24, seed=3, smallest=3)


def distributions(count=5, width=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).double().log_softmax(-1).numpy()


def test_a_divergence_of_all_tokens_is_kl_and_one_of_few_is_smaller():
    p, q = distributions(seed=1), distributions(seed=2)
    exact = (np.exp(p) * (p - q)).sum(1)
    assert tops.divergence(p, q) == pytest.approx(exact, abs=1e-5)
    few = tops.divergence(p[:, :3], q[:, :3])
    rest = [np.log(1 - np.exp(x[:, :3]).sum(1)) for x in (p, q)]
    by_hand = (np.exp(p) * (p - q))[:, :3].sum(1) + np.exp(rest[0]) * (rest[0] - rest[1])
    assert few == pytest.approx(by_hand) and (few >= 0).all() and (few <= exact + 1e-12).all()
    unknown = np.where(np.arange(7) < 3, q, np.nan)
    assert tops.divergence(p, unknown) == pytest.approx(few)
    assert np.isnan(tops.divergence(p, np.full_like(q, np.nan))).all()


def test_entries_are_laid_out_aligned_and_compared():
    first = Scored(np.arange(3), np.array([np.nan, -1, -1]), (None, {4: -0.5, 6: -1.5}, {9: -0.1}))
    second = Scored(np.arange(3), np.array([np.nan, -1, -1]), (None, {6: -0.4, 5: -3.0}, None))
    (a, x), (b, y) = tops.table(first), tops.table(second)
    assert a.tolist() == [[4, 6], [9, tops.NONE]] and b.tolist() == [[6, 5], [tops.NONE, tops.NONE]]
    np.testing.assert_array_equal(tops.aligned(a, b, y), [[np.nan, -0.4], [np.nan, np.nan]])
    best = tops.most_probable(a, x), tops.most_probable(b, y)
    assert best[0].tolist() == [4, 9] and best[1].tolist() == [6, tops.NONE]
    np.testing.assert_array_equal(tops.differs(*best), [1.0, np.nan])
    none = tops.table(Scored(np.arange(3), np.array([np.nan, -1, -1])))
    assert none[0].shape == (2, 0) and tops.most_probable(*none).tolist() == [tops.NONE] * 2


def engine(model, count):
    """The log of ``model`` with its ``count`` most probable tokens."""
    found = []
    for window in WINDOWS:
        with torch.no_grad():
            values, tokens = model(window[None]).logits[0, :-1].double().log_softmax(-1).topk(count)
        entries = [dict(zip(*pair)) for pair in zip(tokens.tolist(), values.tolist())]
        found.append(Scored(window.numpy(), np.concatenate([[np.nan], logprobs(model, window)]), (None, *entries)))
    return found


def test_a_gap_has_the_divergence_and_the_changed_tokens_of_its_engine():
    model, low = random_model(LLAMA), random_model(LLAMA).bfloat16()
    with torch.no_grad():
        p, q = (m(WINDOWS).logits[:, :-1].double().log_softmax(-1) for m in (model, low))
    exact = float((p.exp() * (p - q)).sum(-1).mean())
    changed = float((p.argmax(-1) != q.argmax(-1)).double().mean())
    whole, few = (measure(model, engine(low, count), "bf16", probes=1).tops for count in (101, 5))
    assert whole["kl"] == pytest.approx(exact, rel=0.02) and 0 < few["kl"] < whole["kl"]
    assert whole["flip"] == few["flip"] == pytest.approx(changed)
    assert 0.3 < whole["kl_rounding"] / whole["kl"] < 3
    same = measure(model, engine(low, 5), "bf16", probes=1, reference=engine(low, 5)).tops
    assert same["kl"] == 0 and same["flip"] == 0
    assert not measure(model, [Scored(e.tokens, e.logprobs) for e in engine(low, 5)], "bf16", probes=1).tops
