"""Numbers of real models for README and docs/results.md, from the tables that ``make real`` has left."""

from collections.abc import Mapping

import pandas as pd

from fragility_lab.inputs.fetched import MODELS
from fragility_lab.paths import OUTPUTS
from fragility_lab.reporting.claims import E2, E3
from fragility_lab.reporting.report import LABELS, read_tables
from fragility_lab.reporting.tables import Tables, number, shown
from fragility_lab.reporting.verdicts import compare

CLOSE = (0.9, 1.1)  # predicted over measured KL
EMPTY = pd.DataFrame(columns=["recipe", "quantity", "measured", "ratio", "overall"])  # a table that is not there


def present() -> dict[str, Tables]:
    """The tables of each real model with results of E2 in ``outputs``, by the model's name."""
    found = {name: read_tables(name) for name in MODELS if (OUTPUTS / name / "tables" / "e2_runs.csv").is_file()}
    return {name: tables for name, tables in found.items() if "e2_signals" in tables}


def measured(label: str, tables: Tables) -> dict[str, str]:
    """The results on one model, as text; "–" if the table of an experiment is missing."""
    runs, pearson = tables["e2_runs"], tables["e2_signals"].set_index("signal").pearson
    row = {name: number(pearson[name], ".2f") for name in ("combined", "no_transport", "transport_only", "norm_only")}
    known = runs.combined_pearson.notna()
    row |= {"model": label, "helps": f"{(runs.delta_pearson[known] > 0).sum()} of {known.sum()}"}
    row |= dict.fromkeys(("ratio", "kl", "logprob"), "–") | {
        "blocks": mean(tables, "e3_runs", "spearman"),
        "ranked": str(len(tables["x1_ranking"])) if "x1_ranking" in tables else "–",
        "score_single": mean(tables, "x1_ranking", "score_single"),
        "averaged": mean(tables, "x1_ranking", "score_average"),
        "adjoint_single": mean(tables, "x1_ranking", "adjoint_single"),
        "adjoint_average": mean(tables, "x1_ranking", "adjoint_average"),
        "adjoint": mean(tables, "x1_runs", "adjoint_pearson"),
        "beside": mean(tables, "x1_runs", "combined_pearson"),
    }
    if "x1_runs" in tables:
        least, most = tables["x1_runs"].mean_ratio.agg(["min", "max"])
        row["ratio"] = f"{number(least, '.2f')} to {number(most, '.2f')}"
    if "x2_recipes" in tables:
        for quantity, rows in tables["x2_recipes"].groupby("quantity"):
            row[quantity] = f"{rows.ratio.between(*CLOSE).sum()} of {rows.ratio.count()}"  # those that do not overflow
    counts = runs.groupby("precision")[["windows", "overflowed"]].sum().query("overflowed > 0")
    over = [f"{n.overflowed} of {n.windows + n.overflowed} in {format}" for format, n in counts.iterrows()]
    return row | {"overflow": ", ".join(over) or "none"}


def of_scales(tables: Tables) -> dict[str, object]:
    """Numbers of X2 about ``mxfp8``: weights out of range, their share of the squared error, and KL beside "ceil".

    ``drawn`` counts the recipes whose prediction is close to the mean of draws. All are missing if not run.
    """
    if not {"x2_draws", "x2_saturation"} <= tables.keys():
        return {}
    drawn, saturation = (tables[name].set_index("recipe") for name in ("x2_draws", "x2_saturation"))
    known = drawn.ratio.dropna()
    kl = {f"{name}_kl": drawn.measured.get(recipe) for name, recipe in (("floor", "mxfp8"), ("ceil", "mxfp8-ceil"))}
    kl["drawn"] = f"{known.between(*CLOSE).sum()} of {len(known)}"
    return saturation.reindex(["mxfp8"]).loc["mxfp8"].to_dict() | kl


def mean(tables: Tables, name: str, column: str) -> str:
    """The mean of a ``column`` of the table ``name``, as text; "–" if the table is missing."""
    return number(tables[name][column].mean() if name in tables else None, ".2f")


def verdicts(tables: Tables) -> pd.DataFrame:
    """E2's and E3's claims on one model, as text, by experiment and quantity."""
    rows = shown(compare(tables, (*E2, *E3)))
    return rows.assign(verdict=rows.verdict.where(rows.claim != "", "–")).set_index(["experiment", "quantity"])


def windows_of(table: str, models: Mapping[str, Tables]) -> str:
    """The number of windows of the runs of a ``table``, in words, for all ``models`` that have it."""
    known = [tables[table] for tables in models.values() if table in tables]
    counts = sorted({count for runs in known for count in runs.windows + runs.overflowed})
    return " or ".join(map(str, counts)) or "no"


def lengths_of(table: str, models: Mapping[str, Tables]) -> str:
    """The lengths of windows in the runs of a ``table``, in words, for each of ``models`` that has it, by label."""
    known = {label: sorted(tables[table].length.unique()) for label, tables in models.items() if table in tables}
    return "; ".join(f"{label}: {', '.join(map(str, lengths))}" for label, lengths in known.items()) or "none"


def claims(models: Mapping[str, Tables]) -> pd.DataFrame:
    """E2's and E3's claims on each of ``models``, named by label: two columns a model."""
    sides = {label: verdicts(tables)[["here", "verdict"]] for label, tables in models.items()}
    both = pd.concat(sides, axis=1)
    both.columns = [label if kind == "here" else f"verdict on {label}" for label, kind in both.columns]
    return both.reset_index()


def recipes(models: Mapping[str, Tables]) -> pd.DataFrame:
    """KL under each recipe of X2, one row per model and recipe: predicted, measured, their ratio, and half the errors.

    ``halves`` is four times the KL with half of every error, over the whole KL (``x2_growth``), and ``together`` the KL
    over what the errors would make if they were independent (``x2_coherence``); ``share`` and ``changed`` are the share
    of next tokens that change, and predicted over it (``x2_flips``). All are missing if not run.
    """
    found = []
    for label, tables in models.items():
        if "x2_recipes" in tables:
            rows = tables["x2_recipes"].query("quantity == 'kl'").assign(model=label)
            rows["interval"] = [f"{x.low:.2f} to {x.high:.2f}" if x.low == x.low else "–" for x in rows.itertuples()]
            rows["windows"] = rows.get("windows")  # tables of older code have none
            beside = (tables.get(name, EMPTY).set_index("recipe") for name in ("x2_growth", "x2_coherence", "x2_flips"))
            growth, acting, flips = beside
            flips = flips[flips.quantity == "changed"]
            columns = {"halves": growth.ratio[growth.quantity == "kl"], "together": acting.overall}
            columns |= {"share": flips.measured, "changed": flips.ratio}
            found.append(rows.assign(**{name: rows.recipe.map(each).astype(float) for name, each in columns.items()}))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def labelled(models: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """The rows of the table ``name`` of all ``models`` that have it, with the model's label; empty if none does."""
    tables = [found[name].assign(model=label) for label, found in models.items() if name in found]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def repeated(models: Mapping[str, Tables], name: str) -> pd.DataFrame:
    """X2's draws of signs, or realisations of rounding, with intervals in words; recipes that overflow are left out."""
    rows = rows if (rows := labelled(models, name)).empty else rows.dropna(subset="ratio")
    return rows.assign(interval=[f"{row.low:.2f} to {row.high:.2f}" for row in rows.itertuples()])


def saturated(models: Mapping[str, Tables]) -> pd.DataFrame:
    """Weights that scales leave out of range (``x2.saturation_table``), where they make 1 % of the squared error."""
    return rows if (rows := labelled(models, "x2_saturation")).empty else rows.query("of_error >= 0.01")


def plans(models: Mapping[str, Tables]) -> pd.DataFrame:
    """Mixed plans of X2, one row per model, ladder and budget: KL predicted and measured, and of a plan by chance."""
    if (rows := labelled(models, "x2_plans")).empty:
        return rows
    best, chance = map(rows.groupby("chosen_by").get_group, ("prediction", "chance"))
    return best.reset_index(drop=True).assign(chance=chance.measured.to_numpy())


def values(tables: Tables, second: Tables, real: Mapping[str, Tables]) -> dict[str, object]:
    """The numbers of the real models beside those of the two small ones; ``real`` is empty if no real model was run."""
    named = {LABELS[name]: found for name, found in real.items()}
    everyone = {"GPT-2, 3 M": tables, "Llama, 3 M": second} | named
    rows = pd.DataFrame([measured(label, found) for label, found in everyone.items()])
    by_label = {label: verdicts(found) for label, found in named.items()}
    first, blocks = ("E2", E2[0].name), ("E3", E3[0].name)
    return {
        "real": [
            measured(label, found) | {
                "positive": by_label[label].verdict[first], "interval": by_label[label].interval[first],
                "orders": by_label[label].verdict[blocks], "scales": of_scales(found),
            }
            for label, found in named.items()
        ],
        "real_rows": rows,
        "real_recipes": recipes(named),
        "real_plans": plans(named),
        "draws": repeated(everyone, "x2_draws"),
        "realised": repeated(everyone, "x2_realisations"),
        "saturated": saturated(everyone),
        "real_windows": {name: windows_of(f"{name}_runs", named) for name in ("e2", "x1")},
        "real_lengths": lengths_of("e3_runs", named),
        "real_claims": claims(named) if named else pd.DataFrame(),
    }  # fmt: skip
