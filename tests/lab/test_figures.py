"""Figures show the contents of their tables, have labels, and give the same bytes twice."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import seaborn as sns

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from fragility_lab.experiments import agreement, e1, e3
from fragility_lab.reporting import figures, figures_e5, figures_x1, figures_x2
from fragility_lessons import pictures
from fragility_lessons.explorers import Control, Figure


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


def test_drawing_leaves_the_settings_of_matplotlib_alone(runs):
    """So does importing any module (``test_structure``)."""
    before = matplotlib.rcParams.copy()
    axes = figures.e2_transport(runs)
    figures.png(axes)
    assert matplotlib.rcParams == before
    assert axes.get_axisbelow() is True  # whitegrid's


def test_explorers_draw_in_the_style_of_the_figures():
    def draw(x):
        return pictures.panels(), str(matplotlib.rcParams["axes.edgecolor"])

    figure = Figure(draw, {"x": Control("slider", "x", [0, 1], 0)})
    assert figure.drawn(figure.start)[1] == figures.STYLE["axes.edgecolor"]


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


def test_windows_figure_shows_every_window_and_numbers_the_worst():
    windows = pd.DataFrame(
        {"precision": ["bf16"] * 4 + ["fp16"], "length": 128, "start": [0, 128, 256, 0, 0], "overflow": False,
         "combined": [1.0, 2.0, 3.0, 4.0, 5.0], "mismatch": [0.1, 0.4, 0.3, 0.1, 0.2]}
    )  # fmt: skip
    named = agreement.named_worst(windows, count=2)
    assert named.name.tolist() == ["", "bf16-1", "bf16-2", "", "fp16-1"]
    axes = figures.e2_windows(named)
    np.testing.assert_allclose(axes.collections[0].get_offsets()[:, 1], windows.mismatch[:4])
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("1", (2.0, 0.4)), ("2", (3.0, 0.3))]
    assert [panel.get_title() for panel in axes.figure.axes] == ["bf16", "fp16"]


def test_trend_figure_has_points_a_format_and_all_windows_and_no_line():
    windows = pd.DataFrame({"precision": ["bf16", "fp16"] * 24, "overflow": False, "combined": np.arange(1.0, 49.0)})
    bins = agreement.trends(windows.assign(mismatch=windows.combined / 2))
    axes = figures.e2_trend(bins)
    assert not axes.get_lines() and [text.get_text() for text in axes.texts] == ["bf16", "fp16"]
    assert [len(points.get_offsets()) for points in axes.collections] == [12, 12, 12]
    alone = figures.e2_trend(bins[bins.precision != "fp16"])
    assert [len(points.get_offsets()) for points in alone.collections] == [12, 0]


def test_written_figures_are_reproducible(runs, tmp_path):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        figures.save_figure(figures.e2_transport(runs), tmp_path / folder, "figure")
    for suffix in ("png", "pdf"):
        first, second = ((tmp_path / folder / f"figure.{suffix}").read_bytes() for folder in ("first", "second"))
        assert first == second
        assert len(first) > 5000


def test_e3_ranks_shows_every_count_beside_chance():
    counts = pd.DataFrame([[3.0, 1.0], [1.0, 3.0]], index=[1, 2], columns=[1, 2])
    axes = figures.e3_ranks(counts)
    assert axes.collections[0].get_array().ravel().tolist() == [1.5, 0.5, 0.5, 1.5]
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title().startswith("E3")


def test_e3_fidelity_has_a_point_a_run_and_measure_and_a_line_at_chance(runs):
    measures = {"spearman": runs.delta_pearson, "pairwise_accuracy": 0.6, "top1_hit": 0.1, "top3_overlap": 0.2}
    axes = figures.e3_fidelity(runs.assign(**measures, top5_overlap=0.7, layers=10))
    points = np.concatenate([part.get_offsets() for part in axes.collections])
    assert sorted(points[np.round(points[:, 1]) == 0, 0]) == pytest.approx(sorted(runs.delta_pearson))
    assert len(points) == 5 * len(runs)
    chance = [line.get_xdata()[0] for line in axes.get_lines() if len(line.get_xdata())]  # the legend's have none
    assert chance == [0, 0.5, 0.1, 0.3, 0.5]


def test_e3_noise_floor_shows_measured_windows_once():
    windows = pd.DataFrame(
        {"precision": "fp16", "length": [128, 128, 512, 512], "spearman": [0.1, 0.2, 0.3, 0.3],
         "noise_floor": [0.7, np.nan, 0.9, 0.9], "base_mismatch": [1.0, 2.0, 3.0, 3.0]}
    )  # fmt: skip
    axes = figures.e3_noise_floor(e3.measured_twice(windows))
    np.testing.assert_allclose(sorted(axes.collections[0].get_offsets().tolist()), [[0.7, 0.1], [0.9, 0.3]])


@pytest.fixture
def policies():
    table = pd.DataFrame([(p, s) for p in ("bgss", "none") for s in (0, 1)], columns=["policy", "seed"])
    return table.assign(
        onset_ratio=1.1, onsets=[3, 5, 8, 8], final_mismatch=[1e-3, 2e-3, 3e-3, 3e-3], max_mismatch=[2.0, 4.0, 5.0, 7.0]
    )


def test_e5_outcomes_shows_every_seed_and_the_means_and_joins_nothing(policies):
    axes = figures_e5.e5_outcomes(policies)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["none", "BGSS (released)"]
    assert axes.get_xlabel() == "onsets (rises by 1.1 times)"
    *_, largest = axes.figure.axes
    assert [line.get_xdata().tolist() for line in largest.get_lines()] == [[5.0, 2.0], [7.0, 4.0]]  # seed by seed
    assert {line.get_linestyle() for line in largest.get_lines()} == {"None"}
    assert largest.collections[0].get_offsets()[:, 0].tolist() == [6.0, 3.0]
    assert [text.get_text() for text in largest.texts] == ["6", "3"]
    assert largest.get_xscale() == "log"


def test_e5_looks_is_a_forest_with_a_row_a_claim_in_one_unit():
    looks = {"runs": [8, 16] * 3, "mean": [1.0, 0.5, 2.0, 2.5, 9.0, 9.0], "low": 0.0, "high": 3.0, "bound": 0.0}
    looks |= {"sd": [2.0, 0.5, 5.0, 5.0, 1.0, 1.0], "verdict": ["undecided", "holds"] * 3}
    course = pd.DataFrame(
        looks | {"quantity": [*"aabbcc"], "experiment": "E5", "smallest": [0.5] * 4 + [0.0] * 2}  # c has no row
    )
    axes = figures_e5.e5_looks(course)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in axes.texts] == ["holds", "holds"]
    assert axes.lines[0].get_xdata().tolist() == [2.0, 1.0] and axes.lines[2].get_xdata().tolist() == [0.4, 0.5]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(-1.0, 2.0), (-0.1, 0.2)]


def test_e5_course_has_a_panel_a_policy_relative_to_none():
    steps = pd.DataFrame(
        {"policy": ["none", "bgss"] * 4, "seed": [0] * 4 + [1] * 4, "step": [0, 0, 1, 1] * 2,
         "mismatch": [1.0, 2.0, 3.0, 4.0, 4.0, 2.0, 3.0, 6.0]}
    )  # fmt: skip
    axes = figures_e5.e5_course(steps)
    assert axes.get_yscale() == "log" and axes.get_title(loc="left") == "BGSS (released)"
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [(2 * 2 / 4) ** 0.5, (4 * 6 / 9) ** 0.5])
    assert "error without a controller" in axes.figure.get_supylabel()
    assert all(panel.get_visible() for panel in axes.figure.axes)  # no empty slot, whatever their number
    alone = figures_e5.e5_course(steps[steps.policy == "none"])
    np.testing.assert_allclose(alone.get_lines()[0].get_ydata(), [2.0, 3.0])


def test_x1_plans_shows_measured_and_predicted_shares_of_no_plan_on_one_scale():
    rows = [("none", "blocks", 0, "nothing", 4.0, 4.0), ("adjoint", "blocks", 2, "blocks 0, 1", 1.0, 1.2)]
    rows += [("random", "blocks", 2, f"blocks {i}", 3.0, 2.0 + 2 * i) for i in (0, 1)]
    rows += [("adjoint", "sites", 2, "mlp, norms", 2.0, 2.0), ("each", "sites", 2, "norms, mlp", 2.0, 2.0)]
    plans = pd.DataFrame(rows, columns=["chosen_by", "unit", "budget", "label", "predicted", "measured"])
    axes = figures_x1.x1_plans(plans.assign(precision="bf16", length=8, seed=0, flops=3e6))
    blocks, sites = axes.figure.axes
    assert [label.get_text() for label in blocks.get_yticklabels()] == ["backward passes", "at random"]
    assert [label.get_text() for label in sites.get_yticklabels()] == ["mlp, norms (3 M)"]
    lines, measured, predicted = blocks.collections
    np.testing.assert_allclose(measured.get_offsets()[:, 0], [0.3, 0.75])
    np.testing.assert_allclose(predicted.get_offsets()[:, 0], [0.25, 0.75])
    np.testing.assert_allclose([path[:, 0] for path in lines.get_segments()], [[0.3, 0.3], [0.5, 1.0]])
    assert blocks.get_xlim() == sites.get_xlim() and not blocks.get_legend()


def test_x2_recipes_groups_rows_by_kind_and_writes_what_is_beyond_the_scale():
    names = ["kv-int8", "bf16", "w3a16-g128", "mine", "w4a16-g128"]
    rows = pd.DataFrame({"recipe": names, "quantity": "kl", "ratio": [1.05, 0.95, 6.66, 1.3, np.nan]})
    axes = figures_x2.x2_recipes(
        pd.concat([rows.assign(low=0.9, high=1.2), rows.assign(quantity="changed", low=1, high=1)])
    )
    order = ["bf16", "w3a16-g128", "w4a16-g128", "kv-int8", "mine"]
    assert [label.get_text() for label in axes.get_yticklabels()] == order
    assert [panel.get_title() for panel in axes.figure.axes] == [
        f"{name}\n2 of 4 within 10 %" for name in ("KL", "changed tokens")
    ]
    written = [text.get_text() for text in axes.texts]
    assert written == ["6.7", "16-bit formats", "weights in integers", "cache of keys and values", "other"]
    assert len({panel.get_xlim() for panel in axes.figure.axes}) == 1


def test_x2_rivals_has_one_scale_and_names_lines_where_they_are_apart():
    plans = pd.DataFrame(
        {"ladder": ["a", "a", "b", "b"], "rival": "r", "bits": [4.0, 5.0, 8.0, 9.0], "rival_kl": [0.4, 0.2, 0.4, 0.4],
         "ours": [0.4, 0.2, 0.4, 0.1], "oracle": [0.4, 0.1, 0.4, 0.1], "random": 0.5}
    )  # fmt: skip
    axes = figures_x2.x2_rivals(plans)
    first, second = axes.figure.axes
    assert [text.get_text() for text in first.texts] == ["best possible"]
    assert [text.get_text() for text in second.texts] == ["library", "ours"]
    np.testing.assert_allclose(sorted(first.lines[1].get_ydata()), [0.4, 0.8])
    assert first.get_ylim() == second.get_ylim() and not axes.figure.legends


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.004, 0.04, [0.005, 0.01, 0.02]),
        (0.007, 0.016, [0.007, 0.008, 0.009, 0.01]),  # 0.01 alone would not say how long a decade is
        (0.001, 0.2, [0.001, 0.01, 0.1]),
        (6e6, 9e8, [1e7, 1e8]),
        (6e6, 2.4e8, [1e7, 2e7, 5e7, 1e8, 2e8]),  # 10M to 200M are short
        (6e-4, 0.03, [0.001, 0.01]),
    ],
)
def test_ticks_of_logarithms_are_few_but_two(low, high, shown):
    axes = figures.canvas()
    axes.set(xscale="log", xlim=(low, high))
    figures.plain_log_ticks(axes.xaxis)
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == pytest.approx(shown)


def test_large_numbers_are_short_on_a_logarithmic_axis():
    axes = figures.canvas()
    axes.set(xscale="log", xlim=(4e3, 2.5e6))
    figures.plain_log_ticks(axes.xaxis)
    write = axes.xaxis.get_major_formatter()
    assert [write(x) for x in (5e3, 1e4, 2e5, 2e6)] == ["5000", "10k", "200k", "2M"]


def test_one_scale_of_values_needs_no_scale_of_colours():
    table = pd.DataFrame({"proxy": [1.0, 2.0], "measured": [1.0, 3.0], "value_scale": 1.0, "margin": [0.0, 4.0]})
    assert figures.e1_attention(table).get_legend() is not None


def test_runs_that_overflow_everywhere_have_no_figure_of_correlations():
    runs = pd.DataFrame(
        {"precision": "fp16", "length": [64], "combined_pearson": np.nan, "no_transport_pearson": np.nan}
    )
    with pytest.raises(ValueError, match="need a run with correlations, got none: nearly all windows overflowed"):
        figures.e2_transport(runs)


def test_the_style_is_that_of_seaborn():
    """But for its colour map, which only seaborn knows."""
    wanted = matplotlib.RcParams({**sns.axes_style("whitegrid"), **sns.plotting_context("notebook")})
    assert {name: figures.STYLE.get(name) for name in wanted} == dict(wanted) | {"image.cmap": None}
    np.testing.assert_array_equal(figures.COLOURS, sns.color_palette("colorblind"))


def test_a_narrow_logarithmic_axis_has_few_ticks():
    for low, high in ((0.0008, 0.00089), (0.00138, 0.00222)):
        axes = plt.figure().subplots()
        axes.set(xscale="log", xlim=(low, high))
        figures.plain_log_ticks(axes.xaxis)
        shown = [tick for tick in axes.xaxis.get_major_locator()() if low <= tick <= high]
        assert 2 <= len(shown) <= 4
        plt.close(axes.figure)
