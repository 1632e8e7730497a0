"""One page on one model. It stands alone: style and figures are inside, and there is no script."""

import json
import shlex
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from matplotlib.axes import Axes

from fragility_core.arithmetic.recipes import get_recipe
from fragility_core.protection import Contributions, Plan
from fragility_lab import paths
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.run import Diagnosis
from fragility_lab.inputs.checkpoints import EMBEDDED
from fragility_lab.reporting import figures
from fragility_lab.reporting.html import data_uri, template
from fragility_lab.reporting.tables import duration, number, percent, quantity
from fragility_lab.reporting.verdicts import student

MANY = 24  # bars and rows that a page shows
TOLERATED = 1.1  # ratio of predicted to measured mismatch
LARGE = 0.2  # mismatch beyond the first order

SITE_NAMES = {
    "residual": "residual additions", "norm": "norms", "scores": "attention scores", "softmax": "softmax",
    "context": "attention context", "projection": "attention projections", "attention": "attention, other",
    "mlp": "MLP", "embedding": "embedding", "router": "router", "head": "head",
}  # fmt: skip


def price(plan: Plan) -> str:
    """What ``plan`` costs, in words."""
    parts = [
        (plan.parameter_bytes, "B", " more for parameters"),
        (plan.activation_bytes, "B", " more per token for the residual stream"),
        (plan.flops, "FLOP", f" per token in fp32 instead of {plan.format}"),
    ]
    named = [quantity(count, unit) + what for count, unit, what in parts if count]
    return ", ".join(named) or "no extra memory, and no matrix product in fp32"


def mean_of(values: pd.Series) -> dict[str, float]:
    """The mean of the finite ``values``, one per window, and its 95 % interval from ``low`` to ``high``."""
    finite = values[np.isfinite(values)]
    low, high = student(finite)
    return {"mean": finite.mean(), "low": low, "high": high}


def estimate(found: dict[str, float]) -> str:
    """The mean of ``mean_of`` with its interval, in percent."""
    interval = "" if np.isnan(found["low"]) else f" ({percent(found['low'])} to {percent(found['high'])})"
    return percent(found["mean"]) + interval


def by_window(diagnosis: Diagnosis) -> pd.DataFrame:
    """The predicted and the measured mismatch of every window, without and with the plan, as far as they are known."""
    tables = {"predicted": diagnosis.prediction.windows, "measured": diagnosis.measured}
    if diagnosis.plan is not None:
        tables["predicted with plan"] = diagnosis.contributions.predict(diagnosis.plan)
        tables["measured with plan"] = diagnosis.protected
    known = {name: table.set_index("window") for name, table in tables.items() if table is not None}
    return pd.DataFrame({name: t.predicted if "predicted" in t else t.mismatch for name, t in known.items()})


def means(diagnosis: Diagnosis) -> tuple[pd.Series, dict[str, dict]]:
    """Which windows are compared, and the means of the columns of ``by_window`` over them.

    A window is compared if all its known mismatches are finite. Without a plan no prediction is finite, and only the
    measurement counts. If no window can be compared, each mean is over the windows in which its column is finite.
    """
    known = by_window(diagnosis)
    kept = np.isfinite(known if diagnosis.plan is not None else known.drop(columns="predicted")).all(axis=1)
    return kept, {name: mean_of(values[kept] if kept.any() else values) for name, values in known.items()}


def disagreement(predicted: dict[str, float], measured: dict[str, float]) -> float | None:
    """The ratio of predicted to measured mean, if it is not within TOLERATED of 1 and their intervals are apart."""
    apart = predicted["low"] > measured["high"] or predicted["high"] < measured["low"]
    ratio = predicted["mean"] / measured["mean"] if measured["mean"] > 0 else 1.0
    return ratio if apart and not 1 / TOLERATED < ratio < TOLERATED else None


def command(request: Request, results: str) -> str:
    """The shell command that makes this page again, in the folder ``results`` under outputs."""
    given = [name for name in ("model", "data") if getattr(request, name) != EMBEDDED]
    values = [*given, "format", "budget", "windows", "length", "attention", "probes", "seed"]
    words = [f"{name.upper()}={shlex.quote(str(getattr(request, name)))}" for name in values]
    words += ["WEIGHTS_ONLY=yes"] * request.weights_only
    words += [f"REFERENCE={request.reference}"] * (request.reference != "auto")
    words += [f"RESULTS={shlex.quote(results)}"] * (results != EMBEDDED + "-custom")  # that of the Makefile
    return " ".join(["make diagnose", *words])


def snippet(request: Request, plan: Plan) -> str:
    """Python that applies ``plan``."""
    kept = [f'"{plan.format}"']
    if plan.modules:
        kept.append("modules=(\n" + "".join(f'    "{path}",\n' for path in plan.modules) + ")")
    kept += [f"{name}=True" for name in ("residual", "scores") if getattr(plan, name)]
    execution = ', "weights"' * request.weights_only
    attention = f'\nmodel.set_attn_implementation("{request.attention}")' if request.attention != "sdpa" else ""
    text = (paths.ASSETS / "diagnosis" / "snippet.txt").read_text(encoding="utf-8").rstrip()
    model = json.dumps(request.model)
    return text.format(model=model, attention=attention, plan=", ".join(kept), execution=execution)


def alternatives(contributions: Contributions) -> list[list[str]]:
    """What other budgets give: nothing, the first sites and the first blocks. No pass is run for them."""
    structure = contributions.structure
    budgets = [(count, "sites") for count in range(1, min(3, len(structure.sites)) + 1)]
    budgets += [(count, "blocks") for count in (1, 2, 4) if count <= len(structure.blocks)]
    rows = []
    for plan in (contributions.keep(), *(contributions.plan(*budget) for budget in budgets)):
        memory = [quantity(plan.parameter_bytes), quantity(plan.activation_bytes)]
        rows.append([plan.label, percent(plan.predicted), *memory, quantity(plan.flops, "FLOP")])
    return rows


def shares(contributions: Contributions, columns: str | list[str]) -> pd.Series:
    """Share of the squared error by ``columns`` of the places, largest first."""
    summed = contributions.structure.places.assign(c2=contributions.relative).groupby(columns).c2.sum()
    return (summed / summed.sum()).sort_values(ascending=False)


def largest(contributions: Contributions, count: int = 8) -> list[tuple[str, str, str]]:
    """Module, kind of site and share of the ``count`` largest contributions."""
    by_module = shares(contributions, ["module", "site"]).head(count)
    named = [(module or "the model itself", SITE_NAMES[site]) for module, site in by_module.index]
    return [(*names, percent(share)) for names, share in zip(named, by_module)]


def block_shares(contributions: Contributions) -> pd.Series:
    """Share of the squared error by block, with what comes before and after the blocks, in the model's order."""
    places = contributions.structure.places
    names = places.layer.astype("string").fillna(places.site.map({"embedding": "embedding"}).fillna("after"))
    summed = pd.Series(contributions.relative).groupby(names.to_numpy()).sum()
    order = sorted(summed.index, key=lambda name: {"embedding": -1, "after": len(places)}.get(name) or int(name))
    return summed[order] / summed.sum()


def effects(measured: pd.DataFrame, protected: pd.DataFrame | None) -> list[list[str]]:
    """What rounding does to the tokens, without and with the plan: rows of ``measure.compare`` as texts."""
    plans, rows = {"none": measured, "recommended": protected}, []
    for name, table in plans.items():
        if table is not None:
            means = [
                estimate(mean_of(table.mismatch)),
                estimate(mean_of(table.changed)),
                number(table.kl.mean(), ".2e"),
            ]
            rows.append([name, *means, number(table.largest_kl.max(), ".2e"), number(table.loss.mean(), ".4f")])
    return [*rows, ["fp32", "0", "0", "0", "0", number(measured.reference_loss.mean(), ".4f")]]


def uri(axes: Axes) -> str:
    """The figure of ``axes`` as an address that holds it."""
    image = figures.png(axes)
    plt.close(axes.get_figure())
    return data_uri(image)


def pictures(diagnosis: Diagnosis) -> dict[str, str]:
    """The page's figures by name; a figure without data is absent."""
    found, contributions = {}, diagnosis.contributions
    if contributions is not None:
        by_site = shares(contributions, "site")
        by_site = by_site.rename(SITE_NAMES)[by_site.to_numpy() > 1e-4]
        found["sites"] = uri(figures.diagnosis_shares(by_site, "rounded in"))
        found["blocks"] = uri(figures.diagnosis_shares(block_shares(contributions).head(4 * MANY), "block"))
    if diagnosis.drift is not None:
        named = {"none": diagnosis.drift, "recommended": diagnosis.protected_drift}
        curves = pd.concat([table.assign(plan=name) for name, table in named.items() if table is not None])
        found["drift"] = uri(figures.diagnosis_drift(curves[curves.error.notna()]))
        points = agreement(by_window(diagnosis))
        if len(points):
            found["windows"] = uri(figures.diagnosis_windows(points))
    return found


def agreement(mismatches: pd.DataFrame) -> pd.DataFrame:
    """The columns of ``by_window`` as rows (predicted, measured, plan), where both are finite."""
    names, pairs = ["predicted", "measured"], []
    for plan, suffix in (("none", ""), ("recommended", " with plan")):
        if f"measured{suffix}" in mismatches:
            pair = mismatches[[name + suffix for name in names]]
            pairs.append(pair.set_axis(names, axis=1).assign(plan=plan))
    rows = pd.concat(pairs, ignore_index=True)
    return rows[np.isfinite(rows[["predicted", "measured"]]).all(axis=1)]


def page(diagnosis: Diagnosis, results: str = EMBEDDED) -> str:
    """The page as HTML, for the folder ``results`` under outputs."""
    request, contributions, plan = diagnosis.request, diagnosis.contributions, diagnosis.plan
    kept, found = means(diagnosis)
    measured, protected = (
        None if table is None else table[kept.to_numpy()] for table in (diagnosis.measured, diagnosis.protected)
    )
    known = found.get("measured", found["predicted"])
    still = 0 if diagnosis.protected is None else int((~np.isfinite(diagnosis.protected.mismatch)).sum())
    ranges = diagnosis.ranges.head(MANY)[["module", "kind", "nonfinite", "saturated"]]
    recipe = get_recipe(request.format)
    return template("diagnosis/page.html.jinja", number=number, percent=percent, estimate=estimate).render(
        request=request,
        found=diagnosis,
        stored=recipe.kernels.name,
        operands=recipe.linear.inputs.name if recipe.linear.inputs else None,
        measured=measured,
        means=found,
        kept=int(kept.sum()),
        still_overflowing=still,
        large=known["mean"] > LARGE,
        disagreement=disagreement(found["predicted"], known) if measured is not None and len(measured) else None,
        overflowing=diagnosis.prediction.windows.query("overflow != ''"),
        effects=[] if measured is None or measured.empty else effects(measured, protected),
        modules=[] if contributions is None else largest(contributions),
        price=None if plan is None else price(plan),
        alternatives=[] if contributions is None else alternatives(contributions),
        ranges=ranges.to_numpy().tolist(),
        images=pictures(diagnosis),
        command=command(request, results),
        snippet=None if plan is None else snippet(request, plan),
        seconds=duration(diagnosis.seconds),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def write(diagnosis: Diagnosis, profile: str) -> Path:
    """Write ``outputs/<profile>/diagnosis.html`` and return its path."""
    path = paths.output_folder(profile) / "diagnosis.html"
    path.write_text(page(diagnosis, profile), encoding="utf-8")
    return path
