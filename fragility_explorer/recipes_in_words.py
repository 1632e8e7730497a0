"""Every recipe in words, in groups by what it rounds."""

from fragility_numerics.formats import FORMATS, NumberFormat
from fragility_quantization.ggml import GgmlType
from fragility_quantization.recipes import ENGINES, GGUF, PREQUANTIZED, RECIPES, Operands, Recipe
from fragility_quantization.schemes import Scheme

SCALES = {"e8m0": "under a power of two", "e4m3": "under an fp8 scale", "bf16": "under a bf16 scale"}
RULES = {"range": "the full range", "mse": "least squares", "signed": "a signed scale"}
CACHE, WEIGHTS, BOTH, RESULTS = "the KV cache", "weights", "weights and inputs", "the result of every kernel"
TYPES, MIXES, CPUS = "weights, by a GGUF type", "weights, by a GGUF mix", "as an engine on a CPU"


def group_of(recipe: Recipe) -> str:
    """The group of ``recipe``: what it rounds beside the results of kernels."""
    if recipe.name in ENGINES:
        return CPUS
    if recipe.gguf:
        return TYPES if recipe.gguf.startswith("ggml-") else MIXES
    if recipe.cache is not None:
        return CACHE
    if recipe.linear.inputs is not None:
        return BOTH
    return RESULTS if recipe.linear.weights is None else WEIGHTS


def scheme_in_words(scheme: NumberFormat | None, line: str) -> str:
    """A ``scheme`` in words; its rows are of the kind ``line``, such as "channel"."""
    if scheme is None:
        return "as the kernels"
    if isinstance(scheme, GgmlType):
        return f"{scheme.name.upper()}, {scheme.bits:g} bits"
    if not isinstance(scheme, Scheme):
        return scheme.name
    shared = {
        "tensor": "one scale a tensor", "row": f"one scale a {line}", "group": f"groups of {scheme.size}",
        "block": f"blocks of {scheme.size} x {scheme.size}",
    }  # fmt: skip
    told = [scheme.format.name, shared[scheme.granularity], SCALES.get(scheme.scale), RULES.get(scheme.rule)]
    return ", ".join(filter(None, [*told, "" if scheme.symmetric else "asymmetric", "measured before" * scheme.static]))


def in_words(recipe: Recipe) -> str:
    """The formats that ``recipe`` stores, in words, such as "int4, groups of 128"."""
    linear: Operands = recipe.linear
    if recipe.cache is not None:
        return f"keys and values in {scheme_in_words(recipe.cache, 'token and head')}"
    if group_of(recipe) == MIXES:
        return f"mostly {scheme_in_words(linear.weights, 'channel')}"
    if not linear:
        kernels = recipe.kernels
        scaled = ", each tensor under a power of two" if kernels.name not in FORMATS else ""
        return f"{kernels.bits:g} bits, unit roundoff {kernels.unit_roundoff:.2g}{scaled}"
    weights = scheme_in_words(linear.weights, "channel")
    if linear.inputs is None or isinstance(linear.weights, GgmlType):
        return weights
    inputs = scheme_in_words(linear.inputs, "token")
    return f"{weights}; inputs {'alike' if inputs == weights else inputs}"


def groups() -> dict[str, dict[str, str]]:
    """The recipes that a diagnosis takes, by group: a dictionary from the label of a recipe to its name."""
    found: dict[str, dict[str, str]] = {name: {} for name in (RESULTS, WEIGHTS, BOTH, CACHE, TYPES, MIXES, CPUS)}
    for name, recipe in (RECIPES | GGUF | ENGINES).items():
        if recipe.rounds and name != PREQUANTIZED:
            found[group_of(recipe)][f"{name}: {in_words(recipe)}"] = name
    return found
