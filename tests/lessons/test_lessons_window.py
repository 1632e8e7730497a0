"""Notebook 6: the passes against plain ones, the prediction by recursion, formulas that add up, larger epsilons."""

import re

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")

from fragility_core import theory
from fragility_core.models.blocks import blocks
from fragility_core.surrogates.shadow import set_epsilons
from fragility_lab.inputs.checkpoints import EMBEDDED, load_tokenizer
from fragility_lessons import embedded, own_text, pictures, window
from fragility_numerics.formats import get_format

FORMATS = pytest.mark.parametrize("format", window.FORMATS)


@torch.no_grad()
def plain_states(monitor) -> torch.Tensor:
    """Hidden states of one pass as transformers gives them: behind all blocks but the last, then after ln_f."""
    with monitor.running():
        output = monitor.model.base_model(embedded.prepared()[1], use_cache=False, output_hidden_states=True)
    return torch.stack(output.hidden_states[1:]).float()[:, 0]


def test_words_are_the_window():
    assert len(window.words()) == embedded.LENGTH
    assert 'If omitted or "None", the *chars* argument defaults to' in "".join(window.words())


@FORMATS
def test_drift_is_that_of_plain_passes(format):
    low, exact = plain_states(window.monitor(format)), plain_states(embedded.prepared()[0])
    seen = window.passed(format)
    difference = (low - exact).double().numpy()
    norms = np.linalg.norm(exact.double().numpy(), axis=-1)
    expected = np.linalg.norm(difference, axis=(1, 2)) / np.linalg.norm(norms, axis=1)
    np.testing.assert_allclose(seen.drift[:-1], expected[:-1], rtol=1e-4)
    np.testing.assert_allclose(seen.token_drift[:-1], (np.linalg.norm(difference, axis=-1) / norms)[:-1], rtol=1e-4)
    assert seen.window.mismatch == pytest.approx(expected[-1], rel=1e-4)


@FORMATS
def test_predicted_drift_by_recursion(format):
    """e_l = (1 + rho_l) e_{l-1} + u M_l, divided by the norm of the hidden state there."""
    seen = window.passed(format)
    states = plain_states(window.monitor(format)).double()
    error, u = 0.0, get_format(format).unit_roundoff
    for block, row in enumerate(seen.layers.itertuples()):
        error = (1 + row.transport) * error + u * row.magnitude
        if block < len(states) - 1:
            assert seen.predicted_drift[block] == pytest.approx(error / states[block].norm().item(), rel=1e-5)
    # Behind the last block the norms of the hidden state and of ln_f's output differ, nothing else does.
    assert seen.window.combined == pytest.approx(error / seen.window.final_norm, rel=1e-9)


def test_a_pass_leaves_no_hook_behind():
    for monitor in (embedded.prepared()[0], window.monitor("bf16")):
        before = [len(block.module._forward_hooks) for block in monitor.blocks]
        window.passed.__wrapped__("bf16")
        window.final_states(monitor, embedded.prepared()[1])
        assert [len(block.module._forward_hooks) for block in monitor.blocks] == before
        assert all(block.norm_1.eps == block.norm_2.eps == 1e-5 for block in monitor.blocks)


# --- Formulas -------------------------------------------------------------------------------------


def evaluated(expression: str) -> float:
    """A printed expression of numbers, evaluated."""
    return eval(expression.replace("·", "*"), {"__builtins__": {}})


@FORMATS
@pytest.mark.parametrize("block", range(12))
def test_the_printed_numbers_add_up(format, block):
    seen = window.passed(format)
    row, u = seen.layers.iloc[block], get_format(format).unit_roundoff
    lines = window.formulas(row, seen.window.final_norm, u)
    computed = re.findall(r"= ([-+·/() \de.]+) = ([\de.+-]+)", "\n".join(lines))
    assert len(computed) == 8
    for expression, result in computed:
        assert evaluated(expression) == pytest.approx(evaluated(result), rel=0.03), expression
    text = "\n".join(lines)
    for name in (
        "kappa_softmax", "chi_score", "attention_term", "layernorm_1_term", "layernorm_2_term", "remainder_term",
        "magnitude", "risk", "dominance", "layernorm_ratio", "downstream_transport", "transport",
    ):  # fmt: skip
        assert f" = {row[name]:.3g}" in text, name


# --- Larger epsilons ------------------------------------------------------------------------------


@torch.no_grad()
def final_state(monitor, block: int, epsilon: float) -> torch.Tensor:
    """The final hidden state of one plain pass with ``epsilon`` in ``block``."""
    chosen = [blocks(monitor.model)[block]]
    set_epsilons(chosen, (epsilon,))
    with monitor.running():
        hidden = monitor.model.base_model(embedded.prepared()[1], use_cache=False).last_hidden_state
    set_epsilons(chosen, (1e-5,))
    return hidden[0].float()


@pytest.mark.parametrize(("block", "place"), [(0, 0), (0, 3), (5, 6), (11, 6)])
def test_variants_are_passes_of_their_own(block, place):
    exact, tokens = embedded.prepared()
    variant = window.final_states(exact, tokens)[block, place]
    plain = final_state(exact, block, window.EPSILONS[place])
    assert theory.mismatch(variant, plain) < 1e-5


@FORMATS
def test_variants_in_low_precision_differ_by_rounding_only(format):
    low, (_, tokens) = window.monitor(format), embedded.prepared()
    variant = window.final_states(low, tokens)[0, 3]
    plain = final_state(low, 0, window.EPSILONS[3])
    assert theory.mismatch(variant, plain) < window.passed(format).window.mismatch
    original = window.raised_epsilons().loc[(7, 1e-5), format]
    assert original == pytest.approx(window.passed(format).window.mismatch, rel=0.2)


def test_raised_epsilons_has_every_block_and_epsilon():
    table = window.raised_epsilons()
    assert table.shape == (12 * len(window.EPSILONS), 3)
    assert (table.change.xs(1e-5, level="epsilon") < 1e-6).all()
    assert table.notna().all(axis=None)


# --- Pictures and what the notebook says ----------------------------------------------------------


def test_text_shows_every_token_and_names_the_worst():
    (axes,), readout = window.text(block=11, format="bf16")
    drift = window.passed("bf16").token_drift
    assert len(axes.texts) == embedded.LENGTH
    np.testing.assert_allclose(axes.collections[0].get_array().ravel(), np.log10(drift[11]))
    assert f"largest at token {drift[11].argmax()} " in readout
    assert not any(character in text.get_text() for text in axes.texts for character in "\n ")


def test_profile_shows_terms_measurement_and_prediction():
    (axes, drift), _ = window.profile(block=2, format="fp16")
    seen = window.passed("fp16")
    np.testing.assert_array_equal(axes.lines[1].get_ydata(), seen.layers.attention_term)
    predicted, measured = drift.lines[1:3]
    np.testing.assert_array_equal(predicted.get_ydata(), seen.predicted_drift)
    np.testing.assert_array_equal(measured.get_ydata(), seen.drift)


def test_epsilon_shows_the_frozen_and_the_measured():
    (axes, _), readout = window.epsilon(block=0, exponent=-2, format="bf16")
    frozen, measured = (line.get_ydata() for line in axes.lines[1:3])
    assert frozen[0] == measured[0] == 1 and (np.diff(frozen) < 0).all()
    change = window.raised_epsilons().loc[(0, 1e-2), "change"]
    assert f"the output itself changes by {change:.2g}" in readout


def test_exercises_are_true_of_the_window():
    bf16, fp16 = map(window.passed, window.FORMATS)
    for seen in (bf16, fp16):
        growth = seen.drift / np.append(seen.drift[0], seen.drift[:-1])
        assert np.log(growth[4:9]).sum() > 0.8 * np.log(growth).sum() and growth[4:9].prod() == pytest.approx(
            7, rel=0.15
        )
        assert seen.predicted_drift[0] / seen.drift[0] == pytest.approx(6, rel=0.15)
        assert 2000 < seen.predicted_drift[-1] / seen.drift[-1] < 6000
        assert window.EXERCISES[2].solution == f"block {seen.layers.risk.argmax()}"
    assert bf16.drift[-1] / fp16.drift[-1] == pytest.approx(8, rel=0.25)
    row = window.raised_epsilons().loc[(0, 1e-2)]
    start = window.raised_epsilons().loc[(0, 1e-5)]
    assert row.change == pytest.approx(0.5, rel=0.1) and abs(row.bf16 / start.bf16 - 1) < 0.25
    (frozen, _), _ = window.epsilon(block=0, exponent=-2, format="bf16")
    assert 0.15 < 1 - frozen.lines[1].get_ydata()[window.EPSILONS.index(1e-2)] < 0.2


# --- The reader's own text ------------------------------------------------------------------------


def test_errors_of_a_text_are_those_of_the_window_for_its_text():
    _, tokens = embedded.prepared()
    text = load_tokenizer(EMBEDDED).decode(tokens[0])
    assert own_text.encoded(text).equal(tokens)
    np.testing.assert_allclose(own_text.errors(text, "bf16"), window.passed("bf16").token_drift, rtol=1e-3)
    assert own_text.words(text) == [window.readable(word) for word in window.words()]


def test_a_new_text_brings_its_tokens_and_its_pictures():
    text = "Split the string at spaces."
    figure = own_text.explorer(text)
    tokens = figure.controls["token"].values
    assert [label.partition(" ")[2] for label in tokens] == own_text.words(text)
    expected = own_text.errors(text, "bf16")[:, 2]
    (_, single), told = figure.draw(token=tokens[2], format="bf16")
    assert f"off by {expected[0]:.2g} after block 0 and by {expected[-1]:.2g} at the end" in told
    np.testing.assert_array_equal(single.lines[1].get_ydata(), expected)
    assert f"token 0 “{own_text.words(text)[0]}”" in figure._repr_mimebundle_()["text/plain"]


def test_equal_tokens_have_buttons_of_their_own():
    tokens = own_text.explorer("the the the").controls["token"].values
    assert len(set(tokens)) == len(tokens) >= 3


@pytest.mark.parametrize("blank", ["", "  \n "])
def test_an_empty_text_is_told(blank):
    with pytest.raises(ValueError, match="write a few words between the quotation marks"):
        own_text.explorer(blank)


def test_a_long_text_is_cut_and_told():
    text = "word " * 500
    assert len(own_text.words(text)) == own_text.errors(text, "fp16").shape[1] == own_text.MOST
    assert own_text.depth(text, 3, "fp16")[1].endswith("Only the first 64 tokens are read.")
    assert "Only" not in own_text.depth(own_text.START, 3, "fp16")[1]


def test_any_characters_are_a_text():
    odd = "$x$ <b>é</b> 😀 \\frac{1}{2}_^"
    for token in range(len(own_text.words(odd))):
        axes, readout = own_text.depth(odd, token, "bf16")
        assert all(pictures.svg(panel) for panel in axes) and "nan" not in readout
