"""E1 against the tables measured on the authors' release (tests/data/e1.json)."""

import json
from pathlib import Path

import pytest

from fragility_lab.experiments import e1
from fragility_lab.reporting.claims import E1_RELEASE

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "e1.json").read_text())
FIELDS = {
    "attention": {
        "margin": "margin", "value_scale": "value_scale", "score_norm": "score_norm",
        "softmax_jac_norm": "softmax_sensitivity", "kappa_softmax": "kappa_softmax",
        "measured_error": "measured", "theory_proxy": "proxy",
    },
    "layernorm": {"epsilon": "epsilon", "measured_change": "measured", "theory_magnitude": "theory"},
    "residual": {
        "rho": "rho", "measured_transport": "measured", "transport_bound": "bound", "bound_gap": "gap",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def sweeps():
    return e1.sweeps()


@pytest.mark.parametrize("sweep", FIELDS)
def test_every_row_is_the_released_one(sweeps, sweep):
    assert len(sweeps[sweep]) == len(RELEASED[sweep])
    for theirs, ours in FIELDS[sweep].items():
        released = [row[theirs] for row in RELEASED[sweep]]
        assert sweeps[sweep][ours].tolist() == pytest.approx(released, rel=1e-9, abs=1e-12), ours


def test_summary_is_the_released_one(sweeps):
    summary = e1.summary(sweeps)
    for name, known in E1_RELEASE.items():
        assert summary[name] == pytest.approx(known, abs=1e-9), name
    assert summary["layernorm_measured_nonincreasing"]
    assert summary["layernorm_theory_nonincreasing"]
    assert summary["residual_bound_respected"]


def test_published_constants_are_the_reference_file(sweeps):
    released = RELEASED["summary"]
    assert E1_RELEASE["attention_pearson"] == released["attention"]["pearson"]
    assert E1_RELEASE["layernorm_pearson"] == released["layernorm"]["pearson"]
    assert E1_RELEASE["residual_max_gap"] == released["residual"]["max_bound_gap"]


def test_other_configurations_are_computed_and_senseless_ones_refused():
    chosen = e1.Sweeps(margins=(1.0,), value_scales=(2.0,), epsilons=(1e-5, 1e-4), gains=(0.1,), depth=3)
    tables = e1.sweeps(chosen)
    assert [len(tables[name]) for name in FIELDS] == [1, 2, 1]
    assert tables["residual"].bound.item() == pytest.approx(1.1**3)
    for wrong, message in (
        ({"gains": ()}, "gains must name"), ({"depth": 0}, "depth must be at least 1"),
        ({"epsilons": (1e-4, 1e-5)}, "epsilons must ascend"), ({"margins": (-1.0,)}, "margins must not be negative"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            e1.Sweeps(**wrong)
