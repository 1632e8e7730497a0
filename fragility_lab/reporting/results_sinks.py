"""Write docs/sinks.md and its figures from the tables ``sinks_*``: ``make docs``.

``experiments.sinks`` and ``experiments.positions`` leave these tables in ``outputs/embedded``,
``outputs/embedded-llama`` and the folders of real models. Every number of the page comes from them.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.reporting.figures import figure_of, save_figure, style
from fragility_lab.reporting.report import LABELS, read_tables
from fragility_lab.reporting.results import filled, intervals
from fragility_lab.reporting.tables import Tables, number

PAGE = PROJECT / "docs" / "sinks.md"
MODELS = LABELS
FIRST = 4  # positions that the signals "..._rest" leave out: ``experiments.sinks.FIRST``
SIGNALS = {
    "combined": "the paper's score", "no_transport": "without transport", "transport_only": "transport alone",
    "norm_only": "final norm alone", "travel": "travel, by token",
    "travel_rest": f"travel, by token, the first {FIRST} left out", "travel_frobenius": "travel, Frobenius norms",
    "travel_frobenius_rest": f"travel, Frobenius norms, the first {FIRST} left out",
}  # fmt: skip
MIDDLE = {
    "combined": "the paper's score, whole window", "norm_only": "final norm alone, whole window",
    "norm_only_counted": "final norm alone, tokens that count", "travel": "travel, whole window",
    "travel_counted": "travel, tokens that count",
}  # fmt: skip
SETTING = ["precision", "length", "half"]
FOUND, JUDGED = ("bf16", 128, "first"), ("bf16", 128, "second")


def present() -> dict[str, Tables]:
    """The tables of each model that has been run, by its label."""
    ran = {n: label for n, label in MODELS.items() if (OUTPUTS / n / "tables" / "sinks_signals.csv").is_file()}
    return {label: read_tables(name) for name, label in ran.items()}


def of_setting(rows: pd.DataFrame, setting: tuple) -> pd.DataFrame:
    """The ``rows`` of one ``setting``; none if it was not run or overflowed."""
    return rows[(rows[SETTING] == list(setting)).all(axis=1)]


def by_signal(tables: Tables, setting: tuple) -> pd.DataFrame:
    """The rows of ``setting`` in ``sinks_signals``, by signal."""
    return of_setting(tables["sinks_signals"], setting).set_index("signal")


def correlations(names: Mapping[str, str], models: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row for each signal of ``names``, one column per model, as text: correlations with their intervals."""
    found = {label: dict(zip(rows.index, intervals(rows, "pearson"))) for label, rows in models.items()}
    return pd.DataFrame(
        {"signal": name} | {label: texts.get(key, "–") for label, texts in found.items()} for key, name in names.items()
    )


def by_setting(models: Mapping[str, Tables], *signals: str) -> pd.DataFrame:
    """``correlations`` of the ``signals`` in every setting of the second half, one below the other."""
    every = pd.concat([tables["sinks_signals"] for tables in models.values()]).query("half == 'second'")
    names, parts = {name: SIGNALS[name] for name in signals}, []
    for setting in sorted({*every[SETTING].itertuples(index=False, name=None)}):
        part = correlations(names, {label: by_signal(tables, setting) for label, tables in models.items()})
        part.insert(0, "windows", f"{setting[0]}, {setting[1]} tokens")
        parts.append(part)
    return pd.concat(parts)


def facts(label: str, tables: Tables) -> dict[str, str]:
    """The first token's shares, and the agreement of one pass with the mean over realisations, as text."""
    layers, windows = tables["sinks_layers"], of_setting(tables["sinks_windows"], JUDGED)
    return {
        "model": label,
        "first token: share of ‖h‖² (median and most)": f"{layers.stream.median():.0%}, {layers.stream.max():.0%}",
        "of attention (mean and most)": f"{layers.attention.mean():.0%}, {layers.attention.max():.0%}",
        "worst token's share of the squared error": f"{windows.worst_token.mean():.0%}",
        "correlation of one pass with the mean": f"{by_signal(tables, JUDGED).passes_agree.iloc[0]:.2f}",
    }


def arising(models: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row per group of positions: shares of errors that arise there, by kernel, and that end there, as text.

    ``models`` are tables ``sinks_positions``, by label.
    """
    first, *_ = models.values()
    cells = {
        label: [f"{row.attention:.0%} + {row.other:.0%}, {row.measured:.0%}" for row in rows.itertuples()]
        for label, rows in models.items()
    }
    tokens = [f"{share:.1%}" for share in first.tokens]
    return pd.DataFrame({"positions": first.positions, "of all tokens": tokens, **cells})


@style()
def layers_figure(models: Mapping[str, Tables]) -> Axes:
    """The first token's share of the stream's squared norm, and of attention, by block."""
    _, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
    for label, tables in models.items():
        rows = tables["sinks_layers"]
        depth = (rows.layer + 0.5) / len(rows)
        for ax, column in zip(axes, ("stream", "attention")):
            ax.plot(depth, rows[column], marker="o", markersize=4, label=label)
    for ax, title in zip(axes, ("Share of ‖h‖² in the first token", "Share of attention that it draws")):
        ax.set(title=title, xlabel="depth, 0 the first block, 1 the last", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("share")
    axes[1].legend()
    return axes[0]


@style()
def signals_figure(models: Mapping[str, Tables]) -> Axes:
    """Pearson with the mismatch on the windows that judge, by signal and model, with 95 % intervals."""
    _, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    shown = ["combined", "no_transport", "transport_only", "norm_only", "travel"]
    for i, (label, tables) in enumerate(models.items()):
        rows = by_signal(tables, JUDGED).loc[shown]
        at = [k + 0.15 * (i - (len(models) - 1) / 2) for k in range(len(shown))]
        error = [rows.pearson - rows.low, rows.high - rows.pearson]
        axes.errorbar(rows.pearson, at, xerr=error, fmt="o", capsize=2, label=label)
    axes.set_yticks(range(len(shown)), [SIGNALS[name] for name in shown])
    axes.invert_yaxis()
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set(xlabel="Pearson with the mismatch of windows")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(models), frameon=False)
    return axes


def losses(models: Mapping[str, Tables]) -> list[dict[str, str]]:
    """The models on whose judging windows the score does better than ``travel``, with both on either half."""
    found = []
    for label, tables in models.items():
        judged, first = (by_signal(tables, setting).pearson for setting in (JUDGED, FOUND))
        if judged.combined > judged.travel:
            words = (f"{number(r.combined, '.2f')} against {number(r.travel, '.2f')}" for r in (judged, first))
            found.append(dict(zip(("label", "judged", "found"), (label, *words))))
    return found


def rendered(models: Mapping[str, Tables]) -> str:
    """The page."""
    found, judged = ({m: by_signal(tables, of) for m, tables in models.items()} for of in (FOUND, JUDGED))
    middles = {m: tables["sinks_middle"].set_index("signal") for m, tables in models.items()}
    arise = {m: tables["sinks_positions"] for m, tables in models.items()}
    first = {m: rows.iloc[0] for m, rows in arise.items()}
    second = pd.concat([tables["sinks_signals"] for tables in models.values()]).query("half == 'second'")
    travel, score = (second[second.signal == name] for name in ("travel", "combined"))
    path = ["combined", "travel_frobenius", "travel"]
    return filled(
        "sinks.md.jinja",
        models=len(models), first=FIRST, windows=min(rows.windows.iloc[0] for rows in judged.values()),
        facts=pd.DataFrame([facts(*model) for model in models.items()]),
        steps=[f"{m}: " + ", ".join(number(r, ".2f") for r in rows.pearson[path]) for m, rows in judged.items()],
        pairs=len(travel), above_score=int((travel.pearson.to_numpy() > score.pearson.to_numpy()).sum()),
        positive={"travel": int((travel.low > 0).sum()), "combined": int((score.low > 0).sum())},
        losses=losses(models), found=correlations(SIGNALS, found), judged=correlations(SIGNALS, judged),
        others=by_setting(models, "combined", "norm_only", "travel"), middle=correlations(MIDDLE, middles),
        lowest=pd.DataFrame({m: rows.pearson for m, rows in judged.items()}).min(axis=1),
        # models whose interval lies above 0
        above=sum((rows.low > 0).astype(int) for rows in judged.values()),
        middle_above=sum((rows.low > 0).astype(int) for rows in middles.values()),
        arise=arising(arise), equal_share=f"{next(iter(first.values())).tokens:.1%}",
        first_shares=", ".join(f"{row.attention + row.other:.0%} ({m})" for m, row in first.items()),
    )  # fmt: skip


def main() -> None:
    models = present()
    PAGE.write_text(rendered(models), encoding="utf-8")
    for name, axes in (("sinks_layers", layers_figure(models)), ("sinks_signals", signals_figure(models))):
        save_figure(axes, PAGE.parent, name)
        (PAGE.parent / f"{name}.pdf").unlink()
        plt.close(figure_of(axes))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
