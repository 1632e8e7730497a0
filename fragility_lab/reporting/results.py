"""Write docs/results.md, and the findings in README.md, from the tables of the embedded profile.

``python -m fragility_lab.reporting.results`` (``make docs``) writes both. The prose is in two templates in
``fragility_lab/assets/results``. Numbers come from ``outputs/embedded/tables``, numbers of another CPU from
``outputs/embedded-amx/tables``, numbers of a second trained family from ``outputs/embedded-llama/tables``, and numbers
of real models, if ``make real`` has left any, from folders with their names. No number is typed.
"""

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fragility_lab.paths import ASSETS, PROJECT, require_project
from fragility_lab.reporting import reruns, results_real, results_rivals
from fragility_lab.reporting.claims import E5, E5_SCARCE
from fragility_lab.reporting.report import read_tables
from fragility_lab.reporting.tables import Tables, cells, number, shown
from fragility_lab.reporting.verdicts import UNDECIDED, VERDICTS, compare
from fragility_lab.running.files import write_whole

TEMPLATES = ASSETS / "results"
PAGE, README = PROJECT / "docs" / "results.md", PROJECT / "README.md"
RESULTS, OTHER, SECOND = "embedded", "embedded-amx", "embedded-llama"  # another CPU, a second trained family
REALISATION = "realisation"  # E5's first seeds, all initial weights moved by half a unit roundoff
INDEPENDENT = ("independent", "independent-embedded-llama")  # no two runs share a window; both trained families
PAPER_LEDGER = 2742  # protected layer-steps of each controller in the paper's table of E5
FINDINGS = re.compile(r"(?<=<!-- findings: make docs -->\n).*?(?=<!-- end of findings -->)", re.S)


def markdown(rows: pd.DataFrame, **columns: tuple[str, str]) -> str:
    """``rows`` as a Markdown table; ``columns`` give each column's heading and format (``tables.number``)."""
    texts = cells(rows[[*columns]], [(name, *shape) for name, shape in columns.items()])
    lines = [[heading for heading, _ in columns.values()], ["---"] * len(columns), *texts]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(rows: pd.DataFrame) -> str:
    """``rows`` of texts as a Markdown table, all columns under their names."""
    return markdown(rows, **{name: (name, "") for name in rows})


def claims(comparison: pd.DataFrame, seeds: bool = False) -> str:
    """The paper beside the run, one row per quantity (a table of ``verdicts.compare``).

    With ``seeds``, there are the number of seeds and the number that an undecided claim needs; numbers of the paper
    that the interval excludes are marked "(outside)".
    """
    rows = shown(comparison.assign(verdict=comparison.verdict.fillna("–")))
    if not seeds:
        return markdown(rows, **{name: (name, "") for name in ("quantity", "paper", "here", "interval", "verdict")})
    needed = comparison.runs_needed.where(comparison.verdict == UNDECIDED).to_numpy()
    outside = [f"{paper} (outside)" if out else paper for paper, out in zip(rows.paper, comparison.excludes_paper)]
    rows = rows.assign(seeds=comparison.runs.to_numpy(), needed=needed, paper=outside)
    columns = dict.fromkeys(("quantity", "paper", "here", "interval", "seeds"), "") | {"needed": ",.0f", "verdict": ""}
    return markdown(rows, **{name: (name, digits) for name, digits in columns.items()})


def signals(tables: Tables) -> pd.DataFrame:
    rows = tables["e2_signals"]
    above = [number(n) if name != "combined" else "–" for name, n in zip(rows.signal, rows.runs_above_combined)]
    return rows.assign(above=above, signal=[f"`{name}`" for name in rows.signal])


def policies(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of every policy."""
    means = runs.groupby("policy", sort=False).mean(numeric_only=True).reset_index()
    return means.assign(policy=[f"`{name}`" for name in means.policy])


def by_length(rows: pd.DataFrame, **columns: str) -> str:
    """Means of ``columns``, given with their headings, for every window length."""
    means = rows.groupby("length").mean(numeric_only=True).reset_index()
    return markdown(means, length=("tokens a window", ""), **{name: (text, ".2f") for name, text in columns.items()})


def listed(both: pd.DataFrame, second: str) -> str:
    """The rows of ``reruns.side_by_side`` as Markdown; ``second`` names the second of the results."""
    headings = ("experiment", "claim", "here", "verdict", second, "verdict there")
    rows = both.reset_index().set_axis([*"abcdef"], axis=1)
    return markdown(rows, **{name: (heading, "") for name, heading in zip("abcdef", headings)})


def other_cpu(tables: Tables, other: Tables) -> dict[str, object]:
    """The verdicts that differ between the two CPUs, as Markdown."""
    both = reruns.side_by_side({RESULTS: tables["claims"], OTHER: other["claims"]})
    differing = reruns.differing(both)
    return {"claims": len(both), "alike": len(both) - len(differing), "differing": listed(differing, "other CPU")}


def realisation(tables: Tables) -> dict[str, object]:
    """E5's claims on the seeds that were run under two realisations of rounding."""
    again = read_tables(REALISATION)
    runs = [name for name in ("e5_seeds", "e5_scarce_seeds") if name in again]
    seeds = again["e5_seeds"].seed.unique()
    same: dict[str, pd.DataFrame] = {name: tables[name][tables[name].seed.isin(seeds)] for name in runs}
    quantities = (*E5, *E5_SCARCE) if len(runs) == 2 else E5
    both_runs: dict[str, Tables] = {"": same, "moved": again}
    compared = {name: compare(found, quantities) for name, found in both_runs.items()}
    both = reruns.side_by_side({name: table[table.claim != ""] for name, table in compared.items()})
    alike = len(both) - len(reruns.differing(both))
    return {"seeds": len(seeds), "claims": len(both), "alike": alike, "listed": listed(both, "moved")}


def families(tables: Tables, second: Tables) -> str:
    """E2's and E3's claims on both trained families, as Markdown."""
    mine, theirs = (results_real.verdicts(found) for found in (tables, second))
    both = mine.assign(llama=theirs.here, there=theirs.verdict).reset_index()
    headings = {"experiment": "", "quantity": "quantity", "paper": "paper", "here": "GPT-2", "verdict": "verdict"}
    headings |= {"llama": "Llama", "there": "verdict on it"}
    return markdown(both, **{name: (heading, "") for name, heading in headings.items()})


def independent() -> dict[str, object]:
    """E2's and E3's claims on both trained families, on windows that no two runs share."""
    tables, second = (read_tables(name) for name in INDEPENDENT)
    runs = tables["e2_runs"]
    return {"runs": len(runs), "seeds": runs.seed.nunique(), "claims": families(tables, second)}


def intervals(rows: pd.DataFrame, column: str = "ratio") -> list[str]:
    """The numbers in ``column``, each with the interval from ``low`` to ``high``."""
    texts = ([number(x, ".2f") for x in rows[name]] for name in (column, "low", "high"))
    return [f"{found} ({low} to {high})" for found, low, high in zip(*texts)]


def planned(tables: Tables) -> dict[str, pd.Series]:
    """The errors of X1's predictions for all different plans, and what keeping each kind of site leaves, by label."""
    plans = tables["x1_plans"].drop_duplicates(["precision", "length", "seed", "label"])
    unplanned = tables["x1_plans"].query("chosen_by == 'none'").groupby("precision").measured.mean()
    kinds = tables["x1_kinds"].set_index(["precision", "label"]).measured.unstack().div(unplanned, axis=0).mean()
    return {"plan_errors": (plans.predicted / plans.measured - 1).abs(), "kinds": kinds}


def predictor(tables: Tables, second: Tables) -> dict[str, object]:
    """X1 on the second trained family beside the first; the second has some of the window lengths."""
    lengths, found = second["x1_runs"].length.unique(), planned(second)
    mine = tables["x1_runs"][tables["x1_runs"].length.isin(lengths)]
    return found | {
        "lengths": f"{', '.join(map(str, sorted(lengths)[:-1]))} and {max(lengths)}",
        "runs": second["x1_runs"],
        "summary": second["x1_summary"],
        "sites": second["x1_sites"],
        "plans": len(found["plan_errors"]),
        "best": found["kinds"].idxmin(),
        "left": found["kinds"].min(),
        "first_pearson": mine.adjoint_pearson.mean(),
    }


def recipe_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per recipe of a table of X2: measured values, and ratios with their intervals as text."""
    known = rows.assign(text=intervals(rows)).pivot(index="recipe", columns="quantity", values=["measured", "text"])
    known = known.loc[list(dict.fromkeys(rows.recipe))]
    ratios = known["text"].add_suffix("_ratio")
    return known["measured"].astype(float).join(ratios).reset_index()


def within(tables: Tables) -> dict[str, int]:
    """The number of recipes of X2 whose prediction is as close as was aimed for, by quantity, and of plans."""
    rows = pd.concat([tables["x2_recipes"], tables["x2_flips"]])
    ratios = rows.pivot(index="recipe", columns="quantity", values="ratio")
    aims = {"kl": (0.9, 1.1), "logprob": (0.95, 1.05), "changed": (0.9, 1.1), "length": (0.8, 1.2)}
    plans = {f"plans_{name}": int((errors <= 0.1).sum()) for name, errors in plan_errors(tables["x2_plans"]).items()}
    return {quantity: int(ratios[quantity].between(*aim).sum()) for quantity, aim in aims.items()} | plans


def plan_errors(plans: pd.DataFrame) -> dict[str, pd.Series]:
    """The relative errors of the predictions for X2's plans: of their KL, and of their share of changed tokens."""
    return {"kl": (plans.predicted / plans.measured - 1).abs(), "changed": (plans.changed_ratio - 1).abs()}


def beside(name: str, tables: Tables, second: Tables) -> pd.DataFrame:
    """``recipe_rows`` of the table ``name``, with the ratios of the ``second`` family in columns ``second_...``."""
    ratios = recipe_rows(second[name]).set_index("recipe").filter(like="_ratio").add_prefix("second_")
    return recipe_rows(tables[name]).join(ratios, on="recipe")


def quantization(tables: Tables, second: Tables) -> dict[str, object]:
    """The numbers of X2 for the template, by name."""
    ratios = tables["x2_recipes"].pivot(index="recipe", columns="quantity", values="ratio")
    plans = tables["x2_plans"]
    measured = plans.assign(number=plans.groupby(["schemes", "chosen_by"]).cumcount())
    pairs = measured.pivot(index=["schemes", "number"], columns="chosen_by", values="measured")
    halves = tables["x2_growth"].assign(text=intervals(tables["x2_growth"]))
    grown = halves.pivot(index="recipe", columns="quantity", values="ratio")
    signed, shares = tables["x2_coherence"], ("inside", "between", "overall")
    return {
        "recipes": beside("x2_recipes", tables, second),
        "halves": halves.pivot(index="recipe", columns="quantity", values="text").loc[grown.index].reset_index(),
        "largest_remainder": max(each["x2_coherence"].remainder.max() for each in (tables, second)),
        "coherent": signed.assign(
            **{x: [f"{a:.2f} ± {b:.2f}" for a, b in zip(signed[x], signed[f"{x}_error"])] for x in shares}
        ),
        "explained": ratios.corrwith(grown, method="spearman"),
        "choices": beside("x2_flips", tables, second),
        "within": within(tables),
        "second_within": within(second),
        "experts": tables["x2_experts"].assign(text=intervals(tables["x2_experts"])),
        "best_plans": plans[plans.chosen_by == "prediction"],
        "errors": plan_errors(plans),
        "chance_factor": float(np.exp(np.log(pairs.prediction / pairs.chance).mean())),
    }


def values(tables: Tables, other: Tables, second: Tables, real: Mapping[str, Tables]) -> dict[str, object]:
    """Values for the templates beside ``tables``: tables as Markdown, and numbers computed from several columns."""
    runs, signal = tables["x1_runs"], tables["e2_signals"].set_index("signal")
    windows = tables["x1_windows"].query("not overflow")
    gates, protection = tables["e5_gates"], tables["x1_protection"]
    blocks = protection.query("unit == 'blocks' and budget > 0")
    trained = tables["e5_seeds_claims"]
    ledger = tables["e5_seeds"].query("actions > 0").groupby("seed").protected_layer_steps
    achieved = trained[(trained.experiment == "E5") & ~trained.quantity.str.startswith("Protected")]
    return (
        {
            "signal": signal,
            "attention_share": windows.attention_only / windows.combined,
            "achieved": achieved,
            "counts": {verdict: int((achieved.verdict == verdict).sum()) for verdict in VERDICTS},
            "seeds": tables["e5_seeds"].seed.nunique(),
            "as_in_the_paper": int((ledger.agg(["min", "max"]) == PAPER_LEDGER).all(axis=1).sum()),
            "opened": round(float((gates.regime * gates.layer_steps).sum())),
            "plans": blocks.pivot(index="budget", columns="chosen_by", values="measured_of_none").reset_index(),
            "protection": protection.set_index(["unit", "budget", "chosen_by"]).measured_of_none,
            "ratio_is_off_by": (pd.concat([runs, second["x1_runs"]]).mean_ratio - 1).abs().max(),
            "other": other_cpu(tables, other),
            "second": second,
            "second_signal": second["e2_signals"].set_index("signal"),
            "families": families(tables, second),
            "independent": independent(),
            "predictor": predictor(tables, second),
            "realisation": realisation(tables),
        }
        | planned(tables)
        | quantization(tables, second)
        | results_rivals.values(tables, second)
        | results_real.values(tables, second, real)
    )


def filled(name: str, **values: object) -> str:
    """The template ``name`` with ``values``."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.globals |= {"claims": claims, "signals": signals, "policies": policies}
    environment.globals |= {"markdown": markdown, "by_length": by_length, "table": table}
    environment.filters["number"] = number
    return environment.get_template(name).render(values)


def rendered(name: str, tables: Tables, other: Tables, second: Tables, real: Mapping[str, Tables] | None = None) -> str:
    """The template ``name`` with the numbers of ``tables``, of the ``other`` CPU's and of the ``second`` family's.

    ``real`` are the tables of real models by name, those in ``outputs`` unless given.
    """
    real = results_real.present() if real is None else real
    return filled(name, tables=tables, **values(tables, other, second, real))


def main() -> None:
    require_project()
    tables, other, second = (read_tables(name) for name in (RESULTS, OTHER, SECOND))
    known = values(tables, other, second, results_real.present())
    write_whole(PAGE, filled("page.md.jinja", tables=tables, **known))
    findings = filled("findings.md.jinja", tables=tables, **known)
    write_whole(README, FINDINGS.sub(lambda _: findings, README.read_text(encoding="utf-8")))
    print(f"written: {PAGE}, and the findings in {README}")


if __name__ == "__main__":
    main()
