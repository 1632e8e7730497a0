"""Figures show the contents of their tables, have labels, and give the same bytes twice."""

import subprocess
import sys

import matplotlib
import numpy as np
import pandas as pd
import pytest

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from fragility_lab.experiments import e1, e3
from fragility_lab.lessons import pictures
from fragility_lab.lessons.widgets import Explorer, slider
from fragility_lab.paths import PROJECT
from fragility_lab.reporting import figures


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


@pytest.fixture
def runs():
    rng = np.random.default_rng(0)
    grid = [(p, t, s) for p in ("bf16", "fp16") for t in (128, 512) for s in (0, 1)]
    table = pd.DataFrame(grid, columns=["precision", "length", "seed"])
    table["no_transport_pearson"] = rng.uniform(-0.2, 0.5, len(table))
    table["combined_pearson"] = rng.uniform(0, 0.8, len(table))
    table["delta_pearson"] = table.combined_pearson - table.no_transport_pearson
    return table


def test_importing_and_drawing_leave_the_settings_of_matplotlib_alone(runs):
    imports = "import fragility_lab.reporting.figures_x1, fragility_lab.diagnosis.page, fragility_lab.lessons.widgets"
    code = f"import matplotlib.pyplot as p; p.gcf(); before = dict(p.rcParams); {imports}; assert p.rcParams == before"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)  # gcf chooses a backend
    before = matplotlib.rcParams.copy()
    axes = figures.e2_delta(runs)
    figures.png(axes)
    assert matplotlib.rcParams == before
    assert axes.get_axisbelow() is True and axes.patches[0].get_edgecolor()[:3] == (1, 1, 1)  # whitegrid's


def test_explorers_draw_in_the_style_of_the_figures():
    def draw(x):
        return pictures.panels(), str(matplotlib.rcParams["axes.edgecolor"])

    assert Explorer(draw, x=slider("x", 0, 1, 1, 0)).drawn()[1] == figures.STYLE["axes.edgecolor"]


@pytest.mark.parametrize("sweep", ["attention", "layernorm", "residual"])
def test_e1_figures_have_labels_and_a_title(sweep):
    axes = getattr(figures, f"e1_{sweep}")(e1.sweeps()[sweep])
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert axes.get_title().startswith("E1")


def test_transport_figure_shows_every_run_and_the_diagonal(runs):
    axes = figures.e2_transport(runs)
    points = axes.collections[0].get_offsets()
    assert len(points) == len(runs)
    np.testing.assert_allclose(points[:, 1], runs.combined_pearson)
    diagonal = axes.lines[0].get_xydata()
    np.testing.assert_array_equal(diagonal[:, 0], diagonal[:, 1])
    assert axes.get_xlim()[0] < runs.no_transport_pearson.min()


def test_delta_figure_has_a_bar_per_run(runs):
    axes = figures.e2_delta(runs)
    widths = sorted(bar.get_width() for bar in axes.patches if bar.get_width())
    np.testing.assert_allclose(widths, sorted(runs.delta_pearson))


def test_written_figures_are_reproducible(runs, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        figures.save_figure(figures.e2_transport(runs), tmp_path / folder, "figure")
    for suffix in ("png", "pdf"):
        first, second = ((tmp_path / folder / f"figure.{suffix}").read_bytes() for folder in ("first", "second"))
        assert first == second
        assert len(first) > 5000


def test_e3_ranks_shows_every_count():
    counts = pd.DataFrame([[3.0, 1.0], [1.0, 3.0]], index=[1, 2], columns=[1, 2])
    axes = figures.e3_ranks(counts)
    assert axes.collections[0].get_array().ravel().tolist() == [3.0, 1.0, 1.0, 3.0]
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title().startswith("E3")


def test_e3_fidelity_has_a_point_a_run(runs):
    axes = figures.e3_fidelity(runs.assign(spearman=runs.delta_pearson, pairwise_accuracy=0.6))
    points = axes.collections[0].get_offsets()
    np.testing.assert_allclose(points[:, 0], runs.delta_pearson)
    assert (points[:, 1] == 0.6).all()


def test_e3_noise_floor_shows_measured_windows_once():
    windows = pd.DataFrame(
        {"precision": "fp16", "length": [128, 128, 512, 512], "spearman": [0.1, 0.2, 0.3, 0.3],
         "noise_floor": [0.7, np.nan, 0.9, 0.9], "base_mismatch": [1.0, 2.0, 3.0, 3.0]}
    )  # fmt: skip
    axes = figures.e3_noise_floor(e3.measured_twice(windows))
    points = np.concatenate([part.get_offsets() for part in axes.collections])
    assert sorted(points[:, 1]) == [0.1, 0.3, 0.7, 0.9]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["score", "another rounding"]


@pytest.fixture
def policies():
    table = pd.DataFrame([(p, s) for p in ("bgss", "none") for s in (0, 1)], columns=["policy", "seed"])
    return table.assign(
        onset_ratio=1.1, onsets=[3, 5, 8, 8], final_mismatch=[1e-3, 2e-3, 3e-3, 3e-3], max_mismatch=[2.0, 4.0, 5.0, 7.0]
    )


def test_e5_maximum_shows_every_seed_and_the_means(policies):
    axes = figures.e5_maximum(policies)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "BGSS (released)"]
    assert [bar.get_height() for bar in axes.patches] == [6.0, 3.0]
    points = np.concatenate([part.get_offsets() for part in axes.collections])
    assert sorted(points[:, 1]) == [2.0, 4.0, 5.0, 7.0]


def test_e5_events_shows_means_and_deviations(policies):
    axes = figures.e5_events(policies)
    points = axes.collections[0].get_offsets()
    np.testing.assert_allclose(points, [[8, 3e-3], [4, 1.5e-3]])
    assert axes.get_xlabel() == "onset events a run (ratio 1.1)"
    (horizontal,) = axes.containers[1].lines[2][0].get_segments()
    np.testing.assert_allclose(horizontal[:, 0], [4 - 2**0.5, 4 + 2**0.5])


def test_e5_looks_shows_an_interval_a_look_and_the_bound():
    looks = {"runs": [8, 16] * 2, "mean": [1.0, 0.5, 2.0, 2.5], "low": 0.0, "high": 3.0, "bound": 0.0}
    course = pd.DataFrame(looks | {"quantity": ["a"] * 2 + ["b"] * 2, "experiment": "E5", "smallest": 0.5})
    first = figures.e5_looks(course)
    panels = [axes for axes in first.figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    assert first.lines[0].get_xydata().tolist() == [[8, 1], [16, 0.5]]
    assert first.figure.get_supxlabel() == "number of seeds"


def test_e5_course_has_a_panel_a_policy_over_the_course_of_none():
    steps = pd.DataFrame(
        {"policy": ["none", "bgss"] * 4, "seed": [0] * 4 + [1] * 4, "step": [0, 0, 1, 1] * 2,
         "mismatch": [1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0]}
    )  # fmt: skip
    axes = figures.e5_course(steps)
    assert axes.get_yscale() == "log" and axes.get_title() == "BGSS (released)"
    none, bgss = (line.get_ydata().tolist() for line in axes.get_lines())
    assert none == [2.0, 4.0] and bgss == [3.0, 5.0]
    (alone,) = figures.e5_course(steps[steps.policy == "none"]).get_lines()[:1]
    assert alone.get_ydata().tolist() == [2.0, 4.0]
