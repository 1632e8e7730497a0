"""One page on one model. It stands alone: style, figures and the script of its explorer are inside."""

import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import transformers
from matplotlib.axes import Axes

from fragility_core.arithmetic.recipes import GIVEN, get_recipe
from fragility_core.models.tree import within
from fragility_core.protection import Contributions, Plan
from fragility_core.protection.bits import Choices
from fragility_lab import paths
from fragility_lab.diagnosis.causes import SITE_NAMES, block_shares, largest, shares, together
from fragility_lab.diagnosis.explore import explorer
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.run import Diagnosis
from fragility_lab.inputs.checkpoints import EMBEDDED
from fragility_lab.reporting import figures, figures_diagnosis
from fragility_lab.reporting.html import data_uri, template
from fragility_lab.reporting.tables import duration, number, percent, quantity
from fragility_lab.reporting.verdicts import student
from fragility_lab.running.files import write_whole

MANY = 24  # bars and rows that a page shows
TOLERATED = 1.1  # ratio of predicted to measured mismatch
# By target: what it is, the column of ``measure.compare`` that measures it, and where the first order ends.
TARGETS = {
    "hidden": ("mismatch ‖X̃ − X‖ / ‖X‖ of the final hidden state", "mismatch", 0.2),
    "kl": ("KL divergence from the fp32 next-token distribution, in nats a token", "kl", 0.4),
    "logprob": ("root mean square change of the log probability of the text's next token, in nats", "logprob", 1.0),
    "flips": ("share of the tokens whose most probable next token changes", "changed", 1.0),
}
# What this page calls a KL divergence in nats a token, by its upper limit: a convention, no measurement.
MEANING = {1e-3: "negligible", 1e-2: "small", 1e-1: "noticeable", np.inf: "large"}


def price(plan: Plan) -> str:
    """What ``plan`` costs, in words."""
    if plan.format == GIVEN:
        return "these modules take what they took before they were quantized"
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


def nats(x: float) -> str:
    """A number of nats."""
    return number(x, ".3g")


def estimate(found: dict[str, float], write: Callable[[float], str] = percent) -> str:
    """The mean of ``mean_of`` with its interval, each as ``write`` writes it."""
    interval = "" if np.isnan(found["low"]) else f" ({write(found['low'])} to {write(found['high'])})"
    return write(found["mean"]) + interval


def verdict(measured: pd.DataFrame) -> str:
    """What rounding does to the model, in words, from rows of ``measure.compare``."""
    kl, loss, exact = measured.kl.mean(), measured.loss.mean(), measured.reference_loss.mean()
    if not np.isfinite([kl, loss, exact]).all():
        return "The low-precision pass gives no finite probabilities."
    limit, word = next((limit, word) for limit, word in MEANING.items() if kl < limit)
    meaning = f"above {max(x for x in MEANING if np.isfinite(x)):g}" if np.isinf(limit) else f"below {limit:g}"
    change = f"{'raises' if loss > exact else 'lowers'} the loss of {exact:.4f} nats a token by {abs(loss - exact):.2g}"
    return (
        f"Rounding {change} ({abs(loss / exact - 1):.2%}), and moves the next-token distribution by a KL divergence of "
        f"{nats(kl)} nats, {kl / exact:.2%} of the loss. This page calls a divergence {meaning} nats {word}."
    )


def helps(diagnosis: Diagnosis) -> bool | None:
    """Whether the measured error is smaller with the plan, mean over windows; None if it was not measured."""
    if diagnosis.protected is None or diagnosis.measured is None:
        return None
    column = TARGETS[diagnosis.request.measured_in][1]
    tables = diagnosis.measured, diagnosis.protected
    without, with_plan = (table[column].replace(np.inf, np.nan).mean() for table in tables)
    return bool(with_plan < without)


def by_window(diagnosis: Diagnosis) -> pd.DataFrame:
    """The predicted and the measured error of every window, without and with the plan, as far as they are known."""
    column, flips = TARGETS[diagnosis.request.measured_in][1], diagnosis.flips
    known, planned = {"predicted": diagnosis.prediction.windows.set_index("window").predicted}, diagnosis.planned
    if column == "changed":
        planned = flips.with_plan(diagnosis.prediction, planned)
        known = {"predicted": flips.changed().reindex(known["predicted"].index)}
    if diagnosis.measured is not None:
        known["measured"] = diagnosis.measured.set_index("window")[column]
    if diagnosis.plan is not None:
        known["predicted with plan"] = planned
        if diagnosis.protected is not None:
            known["measured with plan"] = diagnosis.protected.set_index("window")[column]
    return pd.DataFrame(known)


def means(diagnosis: Diagnosis) -> tuple[pd.Series, dict[str, dict]]:
    """Which windows are compared, and the means of the columns of ``by_window`` over them.

    A window is compared if all its known mismatches are finite. Without a plan no prediction is finite, and only the
    measurement counts. If no window can be compared, each mean is over the windows in which its column is finite.
    """
    known = by_window(diagnosis)
    kept = np.isfinite(known if diagnosis.plan is not None else known.drop(columns="predicted")).all(axis=1)
    return kept, {name: mean_of(values[kept] if kept.any() else values) for name, values in known.items()}


def in_unit(diagnosis: Diagnosis, predicted: float) -> float:
    """A mean prediction in the unit of the page: for the target "flips" the share of changed tokens."""
    if diagnosis.request.measured_in != "flips":
        return predicted
    return diagnosis.flips.changed(predicted / diagnosis.prediction.windows.predicted.mean()).mean()


def disagreement(predicted: dict[str, float], measured: dict[str, float]) -> float | None:
    """The ratio of predicted to measured mean, if it is not within TOLERATED of 1 and their intervals are apart."""
    apart = predicted["low"] > measured["high"] or predicted["high"] < measured["low"]
    ratio = predicted["mean"] / measured["mean"] if measured["mean"] > 0 else 1.0
    return ratio if apart and not 1 / TOLERATED < ratio < TOLERATED else None


def command(request: Request, results: str) -> str:
    """The shell command that makes this page again, in the folder ``results`` under outputs."""
    given = [name for name in ("model", "data") if getattr(request, name) != EMBEDDED]
    given += ["reference_model"] if request.reference_model else ["format"]
    values = [*given, "budget", "windows", "length", "attention", "probes", "seed"]
    values += ["target"] * (request.target != "hidden") + ["keep"] * bool(request.keep)
    words = [f"{name.upper()}={shlex.quote(str(getattr(request, name)))}" for name in values]
    words += ["WEIGHTS_ONLY=yes"] * request.weights_only
    words += [
        f"{name.upper()}={getattr(request, name)}" for name in ("reference", "form") if getattr(request, name) != "auto"
    ]
    words += [f"RESULTS={shlex.quote(results)}"] * (results != EMBEDDED + "-custom")  # that of the Makefile
    return " ".join(["make diagnose", *words])


def snippet(request: Request, plan: Plan, attention: str) -> str:
    """Python that applies ``plan``."""
    kept = [f'"{plan.format}"']
    if plan.layers:
        kept.append("layers=(\n" + "".join(f'    ("{path}", "{name}"),\n' for path, name in plan.layers) + ")")
    if plan.modules:
        kept.append("modules=(\n" + "".join(f'    "{path}",\n' for path in plan.modules) + ")")
    kept += [f"{name}=True" for name in ("residual", "scores") if getattr(plan, name)]
    execution = ', "weights"' * (request.weights_only and not request.mixes)
    attention = f'\nmodel.set_attn_implementation("{attention}")' if attention == "eager" else ""
    name = "snippet_given.txt" if request.reference_model else "snippet.txt"
    text = (paths.ASSETS / "diagnosis" / name).read_text(encoding="utf-8").rstrip()
    names = {"model": json.dumps(request.model), "original": json.dumps(request.reference_model)}
    return text.format(**names, attention=attention, plan=", ".join(kept), execution=execution)


def schemes_of(plan: Plan, choices: Choices) -> list[list[str]]:
    """How many layers and weights have each scheme, and which layers, smallest scheme first."""
    given, rows = dict(plan.layers), []
    given |= {path: "fp32" for group in choices.groups for path in group if any(within(path, m) for m in plan.modules)}
    for name in choices.names:
        groups = [i for i, group in enumerate(choices.groups) if given.get(group[0], choices.kernels) == name]
        paths = [path for i in groups for path in choices.groups[i]]
        share = choices.bits[groups, -1].sum() / choices.bits[:, -1].sum()
        shown = ", ".join(paths[:MANY]) + (f" and {len(paths) - MANY} more" if len(paths) > MANY else "")
        rows.append([name, str(len(paths)), percent(share), shown or "none"])
    return rows


def kept_parts(plan: Plan, choices: Choices) -> list[str]:
    """What ``plan`` keeps in fp32 but for linear layers."""
    layers = {path for group in choices.groups for path in group}
    streams = ["the residual stream"] * plan.residual + ["attention scores"] * plan.scores
    return streams + [path for path in plan.modules if path not in layers]


def budgets(choices: Choices, write: Callable[[float], str]) -> list[list[str]]:
    """The best prediction for budgets of bits, without another pass."""
    return [[f"{row.bits:.2f}", write(row.predicted)] for row in choices.curve(9).itertuples()]


def alternatives(contributions: Contributions, write: Callable[[float], str] = percent) -> list[list[str]]:
    """What other budgets give: nothing, the first sites and the first blocks. No pass is run for them."""
    structure = contributions.structure
    budgets = [(count, "sites") for count in range(1, min(3, len(structure.sites)) + 1)]
    budgets += [(count, "blocks") for count in (1, 2, 4) if count <= len(structure.blocks)]
    rows = []
    for plan in (contributions.keep(), *(contributions.plan(*budget) for budget in budgets)):
        memory = [quantity(plan.parameter_bytes), quantity(plan.activation_bytes)]
        costs = [] if plan.format == GIVEN else [*memory, quantity(plan.flops, "FLOP")]
        rows.append([plan.label, write(plan.predicted), *costs])
    return rows


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
        found["sites"] = uri(figures_diagnosis.shares(by_site, "rounded in"))
        found["blocks"] = uri(figures_diagnosis.shares(block_shares(contributions).head(4 * MANY), "block"))
    target = TARGETS[diagnosis.request.measured_in][1]
    if diagnosis.choices is not None:
        bits = diagnosis.choices.curve()
        bits = bits.assign(predicted=[in_unit(diagnosis, x) for x in bits.predicted])
        mean = (
            in_unit(diagnosis, diagnosis.plan.predicted),
            None if diagnosis.protected is None else diagnosis.protected[target].mean(),
        )
        found["budgets"] = uri(figures_diagnosis.budgets(bits, float(diagnosis.plan.label.split()[0]), *mean, target))
    if diagnosis.drift is not None:
        named = {"none": diagnosis.drift, "recommended": diagnosis.protected_drift}
        curves = pd.concat([table.assign(plan=name) for name, table in named.items() if table is not None])
        found["drift"] = uri(figures_diagnosis.drift(curves[curves.error.notna()]))
        points = agreement(by_window(diagnosis))
        if len(points):
            found["windows"] = uri(figures_diagnosis.windows(points, target))
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
    words, column, limit = TARGETS[request.measured_in]
    write_number = percent if column in ("mismatch", "changed") else nats
    still = 0 if diagnosis.protected is None else int((~np.isfinite(diagnosis.protected.mismatch)).sum())
    ranges = diagnosis.ranges.head(MANY)[["module", "kind", "nonfinite", "saturated"]]
    recipe = get_recipe(request.format)

    def write_prediction(predicted: float) -> str:
        return write_number(in_unit(diagnosis, predicted))

    filters = {"number": number, "percent": percent, "estimate": partial(estimate, write=write_number)}
    return template("diagnosis/page.html.jinja", **filters).render(
        request=request,
        found=diagnosis,
        stored=recipe.kernels.name,
        operands=recipe.linear.inputs.name if recipe.linear.inputs else None,
        measured=measured,
        means=found,
        kept=int(kept.sum()),
        still_overflowing=still,
        quantity=words,
        large=known["mean"] > limit,
        verdict="" if measured is None or measured.empty else verdict(measured),
        helps=helps(diagnosis),
        schemes=[] if diagnosis.choices is None else schemes_of(plan, diagnosis.choices),
        kept_parts=[] if diagnosis.choices is None else kept_parts(plan, diagnosis.choices),
        absent=[] if contributions is None else [s for s in request.kept if s not in contributions.structure.sites],
        stored_size=None if diagnosis.choices is None else quantity(diagnosis.choices.stored_bytes(diagnosis.choice)),
        budgets=[] if diagnosis.choices is None else budgets(diagnosis.choices, write_prediction),
        disagreement=disagreement(found["predicted"], known) if measured is not None and len(measured) else None,
        overflowing=diagnosis.prediction.windows.query("overflow != ''"),
        effects=[] if measured is None or measured.empty else effects(measured, protected),
        modules=[] if contributions is None else largest(contributions),
        together=None if diagnosis.coherence is None else together(diagnosis.coherence),
        price=None if plan is None else price(plan),
        alternatives=[] if contributions is None else alternatives(contributions, write_prediction),
        ranges=ranges.to_numpy().tolist(),
        images=pictures(diagnosis),
        explorer=explorer(diagnosis),
        command=command(request, results),
        snippet=None if plan is None else snippet(request, plan, diagnosis.attention),
        seconds=duration(diagnosis.seconds),
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
    )


def write(diagnosis: Diagnosis, profile: str) -> Path:
    """Write ``outputs/<profile>/diagnosis.html`` and return its path."""
    write_whole(path := paths.output_folder(profile) / "diagnosis.html", page(diagnosis, profile))
    return path
