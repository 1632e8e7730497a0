"""Notebook 7: sums of random errors against their variance, gradients against autograd, the model's picture."""

import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")

from fragility_adjoint.mixed_precision import Contributions
from fragility_adjoint.predictor import Adjoint
from fragility_explorer import build
from fragility_lessons import adjoint_predictor, shipping
from fragility_quantization.quantized import lower


@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
def test_errors_have_the_correlation_and_the_size_that_is_said(alike):
    found = np.cov(adjoint_predictor.errors(alike).T, ddof=0)
    assert np.abs(np.diag(found) - 1).max() < 0.35
    off = found[~np.eye(len(found), dtype=bool)]
    assert off.mean() == pytest.approx(alike, abs=0.02)


@pytest.mark.parametrize("alike", [0.0, 0.1, 1.0])
def test_the_measured_sum_has_its_typical_size(alike):
    (_, growth), readout = adjoint_predictor.squares(64, alike)
    measured = growth.lines[3].get_ydata()
    number = np.arange(1, 65)
    expected = (number * (1 + (number - 1) * alike)) ** 0.5  # the root of the number if errors are independent
    np.testing.assert_allclose(measured, expected, rtol=0.15)  # 400 draws
    assert f"measured {measured[-1]:.3g}" in readout


def test_gradients_by_hand_are_those_of_autograd():
    x = torch.tensor([0.7, 1.0, 2.5], dtype=torch.float64)
    z = torch.stack([2 * x, 3 * x], -1).requires_grad_()
    h = z**2
    h.retain_grad()
    y = h[:, 0] - h[:, 1] / 2
    y.sum().backward()
    expected = torch.cat([z.grad, h.grad, torch.ones(3, 1)], -1)
    np.testing.assert_allclose(adjoint_predictor.gradients(x.numpy()), expected)
    assert adjoint_predictor.gradients(np.array(1.0)).tolist() == [4, -3, 1, -0.5, 1]


@pytest.mark.parametrize("format", adjoint_predictor.FORMATS)
def test_local_errors_add_up_to_the_error_of_the_toy(format):
    """To first order: the sum of gradient times error, with signs, is the error of y."""
    x = adjoint_predictor.inputs(1.1)
    stored, local = adjoint_predictor.toy(x, adjoint_predictor.rounding(format))
    exact, none = adjoint_predictor.toy(x, lambda values: values)
    assert not none.any()
    first_order = (adjoint_predictor.gradients(x) * local).sum(-1)
    error = stored[:, -1] - exact[:, -1]
    u = {"bf16": 2**-8, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}[format]
    assert np.abs(first_order - error).max() < 30 * u**2 * x.max() ** 2


@pytest.mark.parametrize("format", adjoint_predictor.FORMATS)
@pytest.mark.parametrize("x", [0.5, 1.1, 3.0])
def test_the_prediction_is_right_over_many_roundings(x, format):
    table = adjoint_predictor.toy_errors(x, format)
    typical, measured = ((table[name] ** 2).mean() ** 0.5 for name in ("predicted", "measured"))
    assert typical == pytest.approx(measured, rel=0.25)


def test_the_panel_shows_the_numbers_of_the_toy():
    (page, _), readout = adjoint_predictor.by_hand(1.1, "bf16")
    texts = [text.get_text() for text in page.texts]
    assert "z₁ = 2x" in texts and "4.4" in texts and "-3.3" in texts  # gradients at 1.1
    assert readout.startswith("bf16: errors of y near x = 1.1 are ")


# --- The model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    model, windows = build.embedded(shipping.WINDOWS, shipping.LENGTH)
    return Contributions(model, Adjoint(lower(model, "bf16"), model, 2, gradients="low")(windows))


def test_exercise_names_the_best_site(known):
    gains = known.gains("sites").set_index("label").gain
    options = [option.lower() for option in adjoint_predictor.EXERCISES[3].options]
    assert gains[options].idxmax() == adjoint_predictor.EXERCISES[3].solution == known.plan(1, "sites").label


def test_live_picture_has_both_views_and_measured_plans(known):
    keep, choose = adjoint_predictor.live().views
    assert (keep["kind"], choose["kind"]) == ("keep", "choose")
    assert [target["name"] for target in keep["targets"]] == ["hidden", "kl"]
    assert keep["measured"][0]["predicted"]["hidden"] == pytest.approx(known.keep().predicted, rel=0.02)
    for plan in keep["measured"]:
        assert 0.85 < plan["predicted"]["hidden"] / plan["found"]["hidden"] < 1.15, plan["label"]


def test_shipped_predictions_are_those_of_the_model(known):
    """Sums round in another order on another CPU, which moves single roundings and hardly their squares' sum."""
    keep = adjoint_predictor.live().views[0]
    assert len(keep["measured"]) == len(list(build.plans_of(known)))
    for shown, plan in zip(keep["measured"], build.plans_of(known)):
        assert shown["label"] == plan.label
        assert shown["predicted"]["hidden"] == pytest.approx(plan.predicted, rel=0.02)


def test_a_shipped_measurement_is_that_of_the_model(known):
    model, windows = build.embedded(shipping.WINDOWS, shipping.LENGTH)
    plan, shown = known.plan(2, "blocks"), adjoint_predictor.live().views[0]["measured"][1]
    found = build.Evaluator(model, windows).measure(build.apply(model, plan)).mismatch.mean()
    assert shown["found"]["hidden"] == pytest.approx(found, rel=0.1)
