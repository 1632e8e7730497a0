"""One page on one model: style and figures inside, no script."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from matplotlib.axes import Axes

from fragility_core.arithmetic.formats import get_format
from fragility_core.protection import Contributions, Plan
from fragility_lab import paths
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.run import Diagnosis
from fragility_lab.inputs.checkpoints import EMBEDDED
from fragility_lab.reporting import figures
from fragility_lab.reporting.bootstrap import spread
from fragility_lab.reporting.html import data_uri, template
from fragility_lab.reporting.tables import number
from fragility_lab.reporting.words import duration, percent, quantity

TEMPLATES = paths.ASSETS / "diagnosis"
MANY = 24  # bars and rows that a page shows
TOLERATED = 1.1  # predicted over measured

SITE_NAMES = {
    "residual": "residual additions", "norm": "norms", "scores": "attention scores", "softmax": "softmax",
    "context": "attention context", "projection": "attention projections", "attention": "attention, other",
    "mlp": "MLP", "embedding": "embedding", "router": "router", "head": "head",
}  # fmt: skip


# --- Words and numbers --------------------------------------------------------------------------


def price(plan: Plan) -> str:
    """What ``plan`` costs, in words."""
    parts = [
        (plan.parameter_bytes, "B", " more for parameters"),
        (plan.activation_bytes, "B", " more per token for the residual stream"),
        (plan.flops, "FLOP", f" per token in fp32 instead of {plan.format}"),
    ]
    named = [quantity(count, unit) + what for count, unit, what in parts if count]
    return ", ".join(named) or "no extra memory, and no matrix product in fp32"


@dataclass(frozen=True)
class Mean:
    """A mean over windows and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def mean_of(values: pd.Series) -> Mean:
    """The mean of ``values`` over windows, those that are finite."""
    found = spread(values[values.abs() != float("inf")])
    return Mean(found["mean"], found["low"], found["high"])


def finite(diagnosis: Diagnosis) -> tuple[pd.DataFrame | None, pd.DataFrame | None]:
    """What was measured without and with the plan, in the windows that are finite in both."""
    tables = [table for table in (diagnosis.measured, diagnosis.protected) if table is not None]
    if not tables:
        return None, None
    kept = np.isfinite(np.stack([table.mismatch for table in tables])).all(0)
    return tables[0][kept], tables[1][kept] if len(tables) > 1 else None


def disagreement(predicted: Mean, measured: Mean) -> float | None:
    """Mean predicted over mean measured mismatch where they differ by more than TOLERATED and their intervals."""
    if not measured.mean > 0:
        return None
    ratio = predicted.mean / measured.mean
    apart = predicted.low > measured.high or predicted.high < measured.low
    return ratio if apart and not 1 / TOLERATED < ratio < TOLERATED else None


def command(request: Request, results: str) -> str:
    """The shell command that makes this page again, in the folder ``results`` under outputs."""
    given = [name for name in ("model", "data") if getattr(request, name) != EMBEDDED]
    values = [*given, "format", "budget", "windows", "length", "attention", "probes", "seed"]
    words = [f"{name.upper()}={shlex.quote(str(getattr(request, name)))}" for name in values]
    words += ["WEIGHTS_ONLY=yes"] * request.weights_only
    words += [f"REFERENCE={request.reference}"] * (request.reference != "auto")
    words += [f"RESULTS={shlex.quote(results)}"] * (results != EMBEDDED + "-custom" * bool(given))
    return " ".join(["make diagnose", *words])


def snippet(request: Request, plan: Plan) -> str:
    """Python that applies ``plan``."""
    kept = [f'"{plan.format}"']
    if plan.modules:
        kept.append("modules=(\n" + "".join(f'    "{path}",\n' for path in plan.modules) + ")")
    kept += [f"{name}=True" for name in ("residual", "scores") if getattr(plan, name)]
    execution = ', "weights"' * request.weights_only
    attention = f'\nmodel.set_attn_implementation("{request.attention}")' if request.attention != "sdpa" else ""
    return f"""# From the project's folder, or with PYTHONPATH= set to it.
from transformers import AutoModelForCausalLM

from fragility_lab.inputs.checkpoints import load_model, load_tokenizer
from fragility_core.protection import Plan, apply

model = load_model({json.dumps(request.model)}, auto_class=AutoModelForCausalLM){attention}
tokens = load_tokenizer({json.dumps(request.model)})("Any text.", return_tensors="pt").input_ids.to(model.device)
plan = Plan({", ".join(kept)})
low = apply(model, plan{execution})  # raises if a module does not match or its dtype did not change
with low.running():
    logits = low.model(tokens).logits"""


# --- Tables and figures -------------------------------------------------------------------------


def alternatives(contributions: Contributions) -> list[Plan]:
    """What other budgets would keep, best first choices of each unit; no pass is run for them."""
    structure = contributions.structure
    sites = min(3, len(structure.sites))
    blocks = [count for count in (1, 2, 4) if count <= len(structure.blocks)]
    plans = [contributions.keep()]
    plans += [contributions.plan(count, "sites") for count in range(1, sites + 1)]
    return plans + [contributions.plan(count, "blocks") for count in blocks]


def shares(contributions: Contributions, columns: str | list[str]) -> pd.Series:
    """Share of the squared error by ``columns`` of the places, largest first."""
    summed = contributions.structure.places.assign(c2=contributions.relative).groupby(columns).c2.sum()
    return (summed / summed.sum()).sort_values(ascending=False)


def largest(contributions: Contributions, count: int = 8) -> list[tuple[str, str, float]]:
    """Module, kind of site and share of the ``count`` largest contributions."""
    by_module = shares(contributions, ["module", "site"]).head(count)
    return [(module or "the model itself", SITE_NAMES[site], share) for (module, site), share in by_module.items()]


def block_shares(contributions: Contributions) -> pd.Series:
    """Share of the squared error by block and, apart, of what lies before and after them, in the order of the model."""
    places = contributions.structure.places
    names = places.layer.astype("string").fillna(places.site.map({"embedding": "embedding"}).fillna("after"))
    summed = pd.Series(contributions.relative).groupby(names.to_numpy()).sum()
    order = sorted(summed.index, key=lambda name: {"embedding": -1, "after": len(places)}.get(name) or int(name))
    return summed[order] / summed.sum()


def uri(axes: Axes) -> str:
    """The figure of ``axes`` as an address that holds it."""
    image = figures.png(axes)
    plt.close(axes.get_figure())
    return data_uri(image)


def pictures(diagnosis: Diagnosis) -> dict[str, str]:
    """The page's figures by name, as far as there is something to show."""
    found, contributions = {}, diagnosis.contributions
    if contributions is not None:
        by_site = shares(contributions, "site")
        found["sites"] = uri(
            figures.diagnosis_shares(by_site.rename(SITE_NAMES)[by_site.to_numpy() > 1e-4], "rounded in")
        )
        found["blocks"] = uri(figures.diagnosis_shares(block_shares(contributions).head(4 * MANY), "block"))
    if diagnosis.drift is not None:
        named = {"none": diagnosis.drift, "recommended": diagnosis.protected_drift}
        curves = pd.concat([table.assign(plan=name) for name, table in named.items() if table is not None])
        found["drift"] = uri(figures.diagnosis_drift(curves[curves.error.notna()]))
        finite = agreement(diagnosis)
        if len(finite):
            found["windows"] = uri(figures.diagnosis_windows(finite))
    return found


def agreement(diagnosis: Diagnosis) -> pd.DataFrame:
    """Predicted and measured mismatch of every window that is finite in both, without and with the plan."""
    tables = [diagnosis.prediction.windows.assign(measured=diagnosis.measured.mismatch, plan="none")]
    if diagnosis.plan is not None:
        under = diagnosis.contributions.predict(diagnosis.plan).set_index("window").predicted
        protected = diagnosis.protected.set_index("window").mismatch
        table = pd.DataFrame({"predicted": under, "measured": protected, "plan": "recommended"})
        tables.append(table.rename_axis("window").reset_index())
    joined = pd.concat(tables)[["window", "plan", "predicted", "measured"]]
    return joined[(joined[["predicted", "measured"]] < float("inf")).all(axis=1)]


# --- The page -----------------------------------------------------------------------------------


def page(diagnosis: Diagnosis, results: str = EMBEDDED) -> str:
    """The page as HTML, for the folder ``results`` under outputs."""
    contributions, plan = diagnosis.contributions, diagnosis.plan
    measured, protected = finite(diagnosis)
    predicted = mean_of(diagnosis.prediction.windows.predicted)
    overflow_left = 0 if diagnosis.protected is None else int((~np.isfinite(diagnosis.protected.mismatch)).sum())
    operands = get_format(diagnosis.request.format).operands
    filters = {"number": number, "percent": percent, "quantity": quantity, "mean": mean_of, "price": price}
    return template(TEMPLATES, **filters).render(
        request=diagnosis.request,
        found=diagnosis,
        stored=diagnosis.request.format if operands is None else "bf16",
        operands=None if operands is None else operands.name,
        measured=measured,
        protected=protected,
        still_overflowing=overflow_left,
        predicted=predicted,
        disagreement=None if measured is None else disagreement(predicted, mean_of(measured.mismatch)),
        under_plan=None if plan is None else mean_of(contributions.predict(plan).predicted),
        overflowing=diagnosis.prediction.windows.query("overflow != ''"),
        modules=[] if contributions is None else largest(contributions),
        alternatives=[] if contributions is None else alternatives(contributions),
        ranges=diagnosis.ranges.head(MANY),
        images=pictures(diagnosis),
        command=command(diagnosis.request, results),
        snippet=None if plan is None else snippet(diagnosis.request, plan),
        seconds=duration(diagnosis.seconds),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def write(diagnosis: Diagnosis, profile: str) -> Path:
    """Write ``outputs/<profile>/diagnosis.html`` and return its path."""
    path = paths.output_folder(profile) / "diagnosis.html"
    path.write_text(page(diagnosis, profile), encoding="utf-8")
    return path
