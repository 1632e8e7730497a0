"""Weights with many entries: their contributions are formed in pieces, and those of a table row by row."""

from functools import partial

import pytest
import torch
from tiny import fresh_model
from transformers import Gemma3TextConfig, LlamaConfig

from fragility_adjoint.predictor import Adjoint, parameters, recomputed, recorder
from fragility_numerics import rounding_errors
from fragility_numerics.formats import get_format
from fragility_quantization.quantized import lower

SIZES = {
    "vocab_size": 50_000, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 7, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = torch.tensor([[1, 5, 5, 7, 49_999, 5, 12, 0]])  # repeated ones, padding, the first and the last row

wide_model = partial(fresh_model, change=lambda name, matrix: matrix.normal_(0, 0.2))


def predicted_contributions(model, recipe: str, **options):
    low = lower(model, recipe)
    return Adjoint(low, model, target="kl", **options)(TOKENS).contributions


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "depth"), [(LlamaConfig, 2), (Gemma3TextConfig, 2), (LlamaConfig, 40)])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("bf16", {"gradients": "both", "probes": 2}),
        ("w4a16-g32", {"gradients": "both"}),
        ("fp16", {"gradients": "low", "probes": 2}),
        ("bf16", {"gradients": "secant", "probes": 2}),
    ],
)
def test_as_the_whole_gradient_gives_them(tied, kind, depth, recipe, options, monkeypatch):
    """Embedding and head are large; every contribution is that of weights that are formed as a whole."""
    model, taken = wide_model(kind(tie_word_embeddings=tied, num_hidden_layers=depth, **SIZES)), []
    look_up = recorder.ErrorRecorder.look_up
    monkeypatch.setattr(recorder.ErrorRecorder, "look_up", lambda *row: taken.append(look_up(*row)))
    found = predicted_contributions(model, recipe, **options)
    assert bool(taken) == (options["gradients"] != "secant")  # those slopes take whole gradients
    taken.clear()
    for module in (parameters, recomputed, recorder):
        monkeypatch.setattr(module, "LARGE", 2**30)
    want = predicted_contributions(model, recipe, **options)
    assert not taken and (want[want["name"] == "weight"].c2 > 0).any()
    torch.testing.assert_close(
        torch.tensor(found[["c2", "signed"]].to_numpy()), torch.tensor(want[["c2", "signed"]].to_numpy()),
        rtol=2e-3, atol=2e-6 * want.c2.max(), equal_nan=True,
    )  # fmt: skip  # products in bf16 round otherwise in another order
    table = [frame[frame.site == "embedding"].query("kind == 'weight'") for frame in (found, want)]
    if not tied:  # no product between
        assert table[0].c2.tolist() == pytest.approx(table[1].c2.tolist(), rel=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_pieces_are_parts_of_the_whole(known):
    """Error times gradient, with that of rows that were looked up, with and without a reference."""
    exact = torch.randn(700, recorder.LARGE // 512, generator=torch.Generator().manual_seed(0))
    rounded, gradient = exact.bfloat16().float(), exact.flip(0).expand(2, *exact.shape)
    weighted = parameters.WeightedError(rounded, exact if known else get_format("bf16"))
    error = exact - rounded if known else rounding_errors.expected_error(rounded, get_format("bf16"))
    pieces = [piece.clone() for piece in weighted(gradient)]
    assert len(pieces) > 10 and torch.equal(torch.cat(pieces, 1), error * gradient)
    indices = torch.tensor([699, 3, 31, 3, 32])
    of_rows = torch.randn(2, 5, exact.shape[1], generator=torch.Generator().manual_seed(1))
    looked_up = recorder.LookedUp.of(indices, of_rows)
    whole = gradient.index_add(1, indices, of_rows)
    found = torch.cat([piece.clone() for piece in weighted(gradient, looked_up)], 1)
    torch.testing.assert_close(found, error * whole)
    (alone,) = weighted(None, looked_up)
    torch.testing.assert_close(alone, (error * (whole - gradient))[:, [3, 31, 32, 699]])


def test_each_probe_alone():
    """Where probes cannot share a backward pass, rows of each are recorded with it."""
    model = wide_model(LlamaConfig(tie_word_embeddings=False, num_hidden_layers=2, **SIZES))
    adjoint = Adjoint(lower(model, "bf16"), model, 2, target="kl", gradients="fp32")
    together = adjoint(TOKENS).contributions
    adjoint.at_once = False
    alone = adjoint(TOKENS).contributions
    torch.testing.assert_close(
        torch.tensor(alone.c2.to_numpy()), torch.tensor(together.c2.to_numpy()), rtol=2e-3, atol=0, equal_nan=True
    )


def test_a_failed_pass_leaves_no_rows():
    model = wide_model(LlamaConfig(tie_word_embeddings=False, num_hidden_layers=2, **SIZES))
    adjoint = Adjoint(lower(model, "bf16"), model, target="kl", gradients="fp32")
    want = adjoint(TOKENS).contributions
    look_up = adjoint.recorder.look_up

    def failing(*row):
        look_up(*row)
        raise ValueError("interrupted")

    adjoint.recorder.look_up = failing
    with pytest.raises(ValueError, match="interrupted"):
        adjoint(TOKENS)
    adjoint.recorder.look_up = look_up
    assert adjoint(TOKENS).contributions.c2.tolist() == want.c2.tolist()
