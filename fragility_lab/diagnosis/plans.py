"""The page's part on the plan: what it keeps, its price, the code that applies it, and what other budgets give."""

import json
from collections.abc import Callable

from torch import nn

from fragility_adjoint.mixed_precision import Contributions, Plan
from fragility_adjoint.mixed_precision.bits import Choices
from fragility_core.models.paths import within
from fragility_exports.libraries import Export, named
from fragility_exports.llama_cpp import LIBRARIES, libraries_for
from fragility_lab import paths
from fragility_lab.diagnosis.found import Diagnosis, made
from fragility_lab.diagnosis.means import TARGETS, helps, in_unit, writer
from fragility_lab.diagnosis.remedy import WHOLE, WIDE, mending
from fragility_lab.diagnosis.request import Request
from fragility_lab.reporting import figures_diagnosis
from fragility_lab.reporting.figures import uri
from fragility_lab.reporting.tables import percent, quantity
from fragility_numerics.formats import get_format
from fragility_quantization.recipes import PREQUANTIZED
from fragility_quantization.static_scales import needs_calibration

MANY = 24  # layers of a scheme that a page names


def price(plan: Plan) -> str:
    """The price of ``plan``, in words."""
    if plan.format == PREQUANTIZED:
        return "these modules take what they took before they were quantized"
    if plan.label == WHOLE:
        units = [get_format(name).unit_roundoff for name in (WIDE, "fp16")]
        return "two bytes a number, with a unit roundoff of {:.2g} (fp16: {:.2g})".format(*units)
    parts = [
        (plan.parameter_bytes, "B", " more for parameters"),
        (plan.activation_bytes, "B", " more per token for the residual stream"),
        (plan.flops, "FLOP", f" per token in fp32 instead of {plan.recipe.kernels.name}"),
    ]
    named = [quantity(count, unit) + what for count, unit, what in parts if count]
    return ", ".join(named) or "no extra memory, and no matrix product in fp32"


def snippet(request: Request, plan: Plan, attention: str) -> str:
    """Python that applies ``plan``."""
    kept = [f'"{plan.format}"']
    if plan.layers:
        kept.append("layers=(\n" + "".join(f'    ("{path}", "{name}"),\n' for path, name in plan.layers) + ")")
    if plan.modules:
        kept.append("modules=(\n" + "".join(f'    "{path}",\n' for path in plan.modules) + ")")
    kept += [f"{name}=True" for name in ("residual", "scores") if getattr(plan, name)]
    mixed = request.mixes and plan.format != WIDE
    execution = ', "weights"' * (request.weights_only and not mixed)
    attention = f'\nmodel.set_attn_implementation("{attention}")' if attention == "eager" else ""
    name = "snippet_given.txt" if request.reference_model else "snippet.txt"
    text = (paths.ASSETS / "diagnosis" / name).read_text(encoding="utf-8").rstrip()
    names = {"model": json.dumps(request.model), "original": json.dumps(request.reference_model)}
    scales = ", tokens=tokens" * needs_calibration(plan.recipe)  # measured over a text, which the reader gives
    return text.format(**names, attention=attention, plan=", ".join(kept), execution=execution, scales=scales)


def schemes_of(plan: Plan, choices: Choices) -> list[list[str]]:
    """One row per scheme that has layers, the smallest first: its name, their number, share of weights and names."""
    given, rows = dict(plan.layers), []
    given |= {path: "fp32" for group in choices.groups for path in group if any(within(path, m) for m in plan.modules)}
    for name in choices.names:
        groups = [i for i, group in enumerate(choices.groups) if given.get(group[0], choices.kernels) == name]
        if paths := [path for i in groups for path in choices.groups[i]]:
            share = choices.bits[groups, -1].sum() / choices.bits[:, -1].sum()
            rows.append([name, str(len(paths)), percent(share), named(paths, MANY)])
    return rows


def kept_parts(plan: Plan, choices: Choices) -> list[str]:
    """Names of the parts that ``plan`` keeps in fp32, without linear layers."""
    layers = {path for group in choices.groups for path in group}
    streams = ["the residual stream"] * plan.residual + ["attention scores"] * plan.scores
    return streams + [path for path in plan.modules if path not in layers]


def budgets(choices: Choices, write: Callable[[float], str]) -> list[list[str]]:
    """Rows of bits and the best prediction for them. No pass is run."""
    return [[f"{row.bits:.2f}", write(row.predicted)] for row in choices.curve(9).itertuples()]


def alternatives(contributions: Contributions, write: Callable[[float], str] = percent) -> list[list[str]]:
    """Rows for other budgets, with prediction and price: nothing, up to 3 sites, up to 4 blocks. No pass is run."""
    structure = contributions.structure
    budgets = [(count, "sites") for count in range(1, min(3, len(structure.sites)) + 1)]
    budgets += [(count, "blocks") for count in (1, 2, 4) if count <= len(structure.blocks)]
    rows = []
    for plan in (contributions.keep(), *(contributions.plan(*budget) for budget in budgets)):
        memory = [quantity(plan.parameter_bytes), quantity(plan.activation_bytes)]
        costs = [] if plan.format == PREQUANTIZED else [*memory, quantity(plan.flops, "FLOP")]
        rows.append([plan.label, write(made(plan.predicted)), *costs])
    return rows


def budgets_figure(diagnosis: Diagnosis) -> str:
    """The figure of all budgets for schemes."""
    target, bits = TARGETS[diagnosis.request.measured_in][1], made(diagnosis.choices).curve()
    bits = bits.assign(predicted=[in_unit(diagnosis, x) for x in bits.predicted])
    measured = None if diagnosis.protected is None else diagnosis.protected[target].mean()
    plan = made(diagnosis.plan)
    predicted, label = in_unit(diagnosis, made(plan.predicted)), float(plan.label.split()[0])
    return uri(figures_diagnosis.budgets(bits, label, predicted, measured, target))


def exports(plan: Plan, model: nn.Module) -> dict[str, Export | str]:
    """``plan`` for every other library by name, or why the library cannot have it."""
    found: dict[str, Export | str] = {}
    for library in libraries_for(plan):
        try:
            found[library] = LIBRARIES[library](plan, model)
        except ValueError as refused:
            found[library] = str(refused)
    return found


def export_file(library: str) -> str:
    """The name of the file, beside the page, with the plan for ``library``."""
    return f"plan.{library}.{ {'modelopt': 'yaml', 'llama-quantize': 'txt'}.get(library, 'json') }"


def of_mending(diagnosis: Diagnosis) -> dict:
    """The part of the plan that brings back windows that overflow, and how much of the budget it takes."""
    known, (budget, unit) = diagnosis.contributions, diagnosis.request.parsed_budget
    if known is None or diagnosis.request.mixes or (plan := mending(diagnosis.remedy, known)) is None:
        return {"mending": None}
    size = known.size(plan, unit)
    needed = quantity(size) if unit == "bytes" else f"{size} {unit if size != 1 else unit[:-1]}"
    return {"mending": plan, "needed": needed, "too_small": size > budget}


def of_plan(diagnosis: Diagnosis, known: dict) -> dict:
    """Values of the section on the plan: its price, its code, and what other budgets give."""
    request, plan, choices = diagnosis.request, made(diagnosis.plan), diagnosis.choices
    contributions = made(diagnosis.contributions)

    def write(predicted: float) -> str:
        return writer(request)(in_unit(diagnosis, predicted))

    return {
        "helps": helps(diagnosis),
        "price": price(plan),
        "snippet": snippet(request, plan, diagnosis.attention),
        "exports": {export_file(library): export for library, export in diagnosis.exports.items()},
        "alternatives": alternatives(contributions, write),
        **of_mending(diagnosis),
        "absent": [site for site in request.kept if site not in contributions.structure.sites],
        "schemes": [] if choices is None else schemes_of(plan, choices),
        "kept_parts": [] if choices is None else kept_parts(plan, choices),
        "stored_size": None if choices is None else quantity(choices.stored_bytes(made(diagnosis.choice))),
        "budgets": [] if choices is None else budgets(choices, write),
        "images": {} if choices is None else {"budgets": budgets_figure(diagnosis)},
    }


def title_of_plan(diagnosis: Diagnosis) -> str:
    """The title of the part about the plan."""
    return "Which scheme for which layer" if diagnosis.request.mixes else "What to keep in fp32"
