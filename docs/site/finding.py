"""Write the finding on the site's first page and the figure that shows it, which README has too: ``make docs``."""

import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from fragility_lab.reporting.figures import COLOURS, canvas, figure_of, finished, style
from fragility_lab.reporting.results import filled
from fragility_lab.reporting.results_sinks import present
from fragility_lab.reporting.tables import Tables, number
from fragility_lab.running.files import write_whole

SITE = Path(__file__).parent
FINDING, FIGURE, PREVIEW = (
    SITE / "templates" / "finding.html",
    SITE.parent / "finding.svg",
    SITE / "static/preview.png",
)
SAVED = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 1200 / 5.6, "metadata": {"Software": None}}}
KINDS = {"score": "the paper's score", "predicted": "backward passes"}


def agreement(models: Mapping[str, Tables]) -> pd.DataFrame:
    """One row a model: the correlation of score and prediction with the mismatch, and how far predictions are off."""
    found = []
    for label, tables in models.items():
        runs, signals = tables["x1_runs"], tables["e2_signals"].set_index("signal").pearson
        row = {"model": label, "score": runs.combined_pearson.mean(), "predicted": runs.adjoint_pearson.mean()}
        row["score_of_all"] = signals.combined  # windows: X1 has fewer of real models
        found.append(row | {"off": (runs.mean_ratio - 1).abs().max(), "real": "3 M" not in label})
    return pd.DataFrame(found)


@style()
def drawn(rows: pd.DataFrame) -> Axes:
    """Both correlations of every model of ``agreement``, a row a model: the paper's score, and backward passes."""
    axes = canvas(5.6, 2.94)  # small, so that its letters can be read on a phone
    places = range(len(rows))
    axes.hlines(places, rows.score, rows.predicted, color="0.8", linewidth=3, zorder=1)
    for colour, (column, name) in zip((COLOURS[1], COLOURS[0]), KINDS.items()):
        axes.scatter(rows[column], places, s=80, color=[colour], zorder=2)
        for place, value in zip(places, rows[column]):
            axes.annotate(
                number(value, ".2f"), (value, place), (0, -9), textcoords="offset points", ha="center", va="top"
            )
        axes.annotate(name, (rows[column].iloc[0], 0), (0, 11), textcoords="offset points", ha="center", color=colour)
    axes.set_yticks(places, rows.model)
    axes.set(xlim=(-0.02, 1.07), ylim=(len(rows) - 0.4, -0.7))
    axes.grid(axis="y", visible=False)
    return finished(
        axes, "correlation with the measured error", None, "Who tells which texts low precision hurts most?"
    )


def saved(rows: pd.DataFrame, form: str) -> bytes:
    """The figure of ``rows`` as "svg" or "png", the same bytes for the same numbers."""
    axes, content = drawn(rows), BytesIO()
    with style(), plt.rc_context({"svg.hashsalt": "finding"}):
        figure_of(axes).savefig(content, format=form, **SAVED[form])
    plt.close(figure_of(axes))
    wide = b' width="840" height="441" viewBox'  # a picture of vectors is shown at any size
    return re.sub(rb' width="[\d.]+pt" height="[\d.]+pt" viewBox', wide, content.getvalue())


def finding(rows: pd.DataFrame) -> str:
    """The finding as HTML, with the numbers of ``rows`` and the figure described in words."""
    pairs = [f"{row.model}: {number(row.score, '.2f')} and {number(row.predicted, '.2f')}" for row in rows.itertuples()]
    alt = f"Correlation of the paper's score, and of backward passes, with the measured error. {'; '.join(pairs)}."
    real = rows[rows.real]
    return filled("front.html.jinja", off=real.off.max(), real=real.to_dict("records"), alt=alt)


def main() -> None:
    rows = agreement(present())
    write_whole(FINDING, finding(rows))
    for path in (FIGURE, PREVIEW):
        write_whole(path, saved(rows, path.suffix[1:]))
    print(f"written: {FINDING}, {FIGURE} and {PREVIEW}")


if __name__ == "__main__":
    main()
