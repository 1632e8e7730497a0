"""Write docs/sinks.md and its figures from the tables ``sinks_*``: ``make docs``.

``experiments.sinks`` and ``experiments.positions`` leave these tables in ``outputs/embedded``,
``outputs/embedded-llama`` and the folders of real models. Every number of the page comes from them.
"""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes

from fragility_lab.paths import OUTPUTS, PROJECT
from fragility_lab.reporting.figures import figure_of, save_figure, style
from fragility_lab.reporting.report import read_tables
from fragility_lab.reporting.results import TEMPLATES, table
from fragility_lab.reporting.results_real import LABELS

PAGE = PROJECT / "docs" / "sinks.md"
MODELS = {"embedded": "GPT-2, 3 M", "embedded-llama": "Llama, 3 M"} | LABELS
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

Tables = Mapping[str, pd.DataFrame]


def present() -> dict[str, Tables]:
    """The tables of each model that has been run, by its label."""
    ran = {n: label for n, label in MODELS.items() if (OUTPUTS / n / "tables" / "sinks_signals.csv").is_file()}
    return {label: read_tables(name) for name, label in ran.items()}


def of_setting(tables: Tables, setting: tuple) -> pd.DataFrame:
    """The rows of ``setting`` in ``sinks_signals``, by signal; none if it was not run or overflowed."""
    rows = tables["sinks_signals"]
    return rows[(rows[SETTING] == list(setting)).all(axis=1)].set_index("signal")


def pearson(row: pd.Series) -> str:
    """A correlation with its interval."""
    return f"{row.pearson:.2f} ({row.low:.2f} to {row.high:.2f})".replace("-", "−")


def by_signal(models: Mapping[str, Tables], setting: tuple) -> pd.DataFrame:
    """One row per signal, one column per model, as text."""
    cells = {label: of_setting(tables, setting) for label, tables in models.items()}
    return pd.DataFrame(
        [
            {"signal": name} | {m: pearson(rows.loc[key]) if key in rows.index else "–" for m, rows in cells.items()}
            for key, name in SIGNALS.items()
        ]
    )


def by_setting(models: Mapping[str, Tables], signals: tuple[str, ...]) -> pd.DataFrame:
    """One row per setting of the second half and signal, one column per model, as text."""
    settings = sorted({tuple(row) for t in models.values() for row in t["sinks_signals"][SETTING].to_numpy()})
    rows = []
    for precision, length, half in settings:
        if half == "second":
            for signal in signals:
                found = {m: of_setting(t, (precision, length, half)) for m, t in models.items()}
                cells = {m: pearson(own.loc[signal]) if signal in own.index else "–" for m, own in found.items()}
                rows.append({"windows": f"{precision}, {length} tokens", "signal": SIGNALS[signal]} | cells)
    return pd.DataFrame(rows)


def facts(models: Mapping[str, Tables]) -> pd.DataFrame:
    """The first token's shares, and the agreement of one pass with the mean over realisations, as text."""
    rows = []
    for label, tables in models.items():
        layers, windows = tables["sinks_layers"], tables["sinks_windows"]
        own = windows[(windows[SETTING] == list(JUDGED)).all(axis=1)]
        agree = of_setting(tables, JUDGED).passes_agree.iloc[0]
        rows.append(
            {
                "model": label,
                "of ‖h‖², median and largest block": f"{layers.stream.median():.0%}, {layers.stream.max():.0%}",
                "of attention, mean and largest block": f"{layers.attention.mean():.0%}, {layers.attention.max():.0%}",
                "worst token's share of the squared error": f"{own.worst_token.mean():.0%}",
                "one pass with the mean": f"{agree:.2f}",
            }
        )
    return pd.DataFrame(rows)


def arising(models: Mapping[str, Tables]) -> pd.DataFrame:
    """One row per group of positions: shares of errors that arise there, by kernel, and that end there, as text."""
    first = next(iter(models.values()))["sinks_positions"]
    cells = {
        label: [
            f"{row.attention:.0%} + {row.other:.0%}, {row.measured:.0%}" for row in t["sinks_positions"].itertuples()
        ]
        for label, t in models.items()
    }
    tokens = [f"{share:.1%}" for share in first.tokens]
    return pd.DataFrame({"positions": first.positions, "of all tokens": tokens, **cells})


def of_middles(models: Mapping[str, Tables]) -> pd.DataFrame:
    """One row per signal, one column per model: the correlation with the mismatch of second halves, as text."""
    found = {label: t["sinks_middle"].set_index("signal") for label, t in models.items()}
    return pd.DataFrame(
        [{"signal": name} | {m: pearson(rows.loc[key]) for m, rows in found.items()} for key, name in MIDDLE.items()]
    )


def first_shares(models: Mapping[str, Tables]) -> str:
    """The share of kernels at the first position in the predicted squared error, by model, in words."""
    first = {label: t["sinks_positions"].iloc[0] for label, t in models.items()}
    return ", ".join(f"{row.attention + row.other:.0%} ({label})" for label, row in first.items())


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
        rows = of_setting(tables, JUDGED).loc[shown]
        at = [k + 0.15 * (i - (len(models) - 1) / 2) for k in range(len(shown))]
        error = [rows.pearson - rows.low, rows.high - rows.pearson]
        axes.errorbar(rows.pearson, at, xerr=error, fmt="o", capsize=2, label=label)
    axes.set_yticks(range(len(shown)), [SIGNALS[name] for name in shown])
    axes.invert_yaxis()
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set(xlabel="Pearson with the mismatch of windows")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(models), frameon=False)
    return axes


def wins(ours: list[pd.DataFrame], scores: list[pd.DataFrame]) -> dict[str, object]:
    """Numbers of settings: with ``travel`` above the score, and with an interval of either above 0, from their rows."""
    travel, score = pd.concat(ours), pd.concat(scores)
    positive = {"travel": int((travel.low > 0).sum()), "combined": int((score.low > 0).sum())}
    above = int((travel.pearson.to_numpy() > score.pearson.to_numpy()).sum())
    return {"pairs": len(travel), "above_score": above, "positive": positive}


def losses(models: Mapping[str, Tables]) -> list[dict[str, str]]:
    """The models on whose judging windows the score does better than ``travel``, with both on either half."""
    found = []
    for label, tables in models.items():
        judged, first = (of_setting(tables, setting).pearson for setting in (JUDGED, FOUND))
        if judged.combined > judged.travel:
            words = (f"{own.combined:.2f} against {own.travel:.2f}".replace("-", "−") for own in (judged, first))
            found.append(dict(zip(("label", "judged", "found"), (label, *words))))
    return found


def rendered(models: Mapping[str, Tables]) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    lowest = {name: min(of_setting(t, JUDGED).pearson[name] for t in models.values()) for name in SIGNALS}
    above = {
        name: sum(of_setting(t, JUDGED).low[name] > 0 for t in models.values()) for name in SIGNALS
    }  # whose interval lies above 0
    path = ("combined", "travel_frobenius", "travel")
    steps = [
        f"{label}: " + ", ".join(f"{of_setting(t, JUDGED).pearson[name]:.2f}".replace("-", "−") for name in path)
        for label, t in models.items()
    ]
    second = [
        t[t.half == "second"].set_index([*SETTING, "signal"]) for t in (m["sinks_signals"] for m in models.values())
    ]
    sides = [[t.xs(name, level="signal") for t in second] for name in ("travel", "combined")]
    counts = {label: int(of_setting(t, JUDGED).windows.iloc[0]) for label, t in models.items()}
    return environment.get_template("sinks.md.jinja").render(
        facts=table(facts(models)), found=table(by_signal(models, FOUND)), judged=table(by_signal(models, JUDGED)),
        others=table(by_setting(models, ("combined", "norm_only", "travel"))), first=FIRST,
        lowest={name: f"{value:.2f}".replace("-", "−") for name, value in lowest.items()}, above=above,
        arise=table(arising(models)), middle=table(of_middles(models)), models=len(models),
        first_shares=first_shares(models),
        equal_share=f"{next(iter(models.values()))['sinks_positions'].tokens[0]:.1%}",
        middle_above={
            name: sum(t["sinks_middle"].set_index("signal").low[name] > 0 for t in models.values()) for name in MIDDLE
        }, steps=steps,
        **wins(*sides), losses=losses(models), windows=min(counts.values()),
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
