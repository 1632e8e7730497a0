"""Recipes: how weights, inputs of linear layers and the KV cache are stored, beside the results of all kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch

from fragility_numerics.formats import FORMATS, NARROW, Format, NumberFormat, called_by_torch, of_dtype
from fragility_quantization.ggml import MIXES, TYPES, WEIGHTS, GgmlType, inputs_beside
from fragility_quantization.schemes import Scheme


@dataclass(frozen=True)
class Operands:
    """Schemes of a linear layer for its stored ``weights`` and the ``inputs`` it reads; None is the kernels' format."""

    weights: NumberFormat | None = None
    inputs: NumberFormat | None = None

    def __bool__(self) -> bool:
        return self.weights is not None or self.inputs is not None

    def wide(self, kernels: NumberFormat) -> bool:
        """True if products must run in fp32, since the dtype of ``kernels`` lacks numbers that they multiply.

        Devices multiply the stored numbers, and scale the sum. A layer that rounds no inputs reads weights in the
        dtype of the kernels.
        """
        schemes = [s for s in (self.weights, self.inputs) if isinstance(s, Scheme | GgmlType)]
        return self.inputs is not None and not all(s.exact_in(kernels.compute_dtype) for s in schemes)


@dataclass(frozen=True)
class Recipe:
    """A model's number formats. Results of ``kernels`` are stored in one format, or by one scheme.

    The linear layers of blocks (``operands.linear_weights``) have the ``linear`` operands, those at the paths in
    ``layers`` others. The KV ``cache`` stores keys and values as they are multiplied, after rotary embeddings; those of
    attention within the paths ``uncached`` stay as they are. The ``embedding`` of tokens and the ``head`` have operands
    of their own. ``gguf`` is the name of a recipe of GGUF; a mix says the operands of each layer of a model
    (``with_known_layers``).
    """

    name: str
    kernels: NumberFormat
    linear: Operands = Operands()
    embedding: Operands = Operands()
    head: Operands = Operands()
    cache: NumberFormat | None = None
    layers: Mapping[str, Operands] = field(default_factory=dict, hash=False)
    uncached: frozenset[str] = frozenset()
    gguf: str = ""

    def operands(self, path: str) -> Operands:
        """Operands of the linear layer, or of the experts, at ``path``."""
        return self.layers.get(path, self.linear)

    @property
    def plain(self) -> bool:
        """True if the recipe rounds the results of kernels and nothing else."""
        return not (self.linear or self.embedding or self.head or self.cache or any(self.layers.values()))

    @property
    def rounds(self) -> bool:
        """True if it changes more than factors of products, as fp32 and tf32 do."""
        return self.kernels.name not in ("fp32", "tf32") or not self.plain

    def beside(self, kernels: str) -> "Recipe":
        """This recipe with kernels in another format, one of FORMATS."""
        return replace(self, name=f"{self.name}@{kernels}", kernels=FORMATS[kernels])


def weights_only(scheme: Scheme) -> Operands:
    """Operands with a ``scheme`` for weights alone. Products read the weights in the format of the kernels."""
    return Operands(weights=scheme)


def both(scheme: NumberFormat) -> Operands:
    """Operands with one ``scheme`` for weights and inputs."""
    return Operands(scheme, scheme)


E4M3, E5M2 = FORMATS["fp8_e4m3"], FORMATS["fp8_e5m2"]
INT8, INT4, INT3 = NARROW["int8"], NARROW["int4"], NARROW["int3"]
GROUPS = {**{f"g{size}": ("group", size) for size in (32, 64, 128)}, "channel": ("row", 0)}


def microscaled(format: Format, rule: str = "floor") -> Scheme:
    """A scheme of OCP Microscaling Formats 1.0 (2023): groups of 32 under a power of two, by a ``rule``."""
    return Scheme(format, "group", 32, "e8m0", rule)


NVFP4 = Scheme(NARROW["fp4_e2m1"], "group", 16, "e4m3")
TOKEN_INT8, CHANNEL_E4M3 = Scheme(INT8, "row"), Scheme(E4M3, "row")
POWERS = {
    f"{f.name}_scaled": Scheme(f, scale="e8m0", rule="ceil", named=f"{f.name}_scaled") for f in (E4M3, E5M2)
}  # Micikevicius et al. 2022 (arXiv:2209.05433): each tensor under a power of two of its own

LINEAR: dict[str, Operands] = {
    **{
        f"w{f.bits}a16-{name}": weights_only(Scheme(f, *how))
        for f in (INT8, INT4, INT3) for name, how in GROUPS.items()
    },
    "w4a16-zero-g128": weights_only(Scheme(INT4, "group", 128, "bf16", symmetric=False)),
    "w4a16-range-g128": weights_only(Scheme(INT4, "group", 128, rule="range")),
    "w4a16-mse-g128": weights_only(Scheme(INT4, "group", 128, rule="mse")),
    "w8a8-int8": Operands(Scheme(INT8, "row"), TOKEN_INT8),
    "w4a8-int8": Operands(Scheme(INT4, "group", 128), TOKEN_INT8),
    "fp8-dynamic": Operands(CHANNEL_E4M3, Scheme(E4M3, "row")),
    "fp8-tensor": both(Scheme(E4M3)),
    "fp8-static": Operands(Scheme(E4M3), Scheme(E4M3, static=True)),
    "fp8-block": Operands(Scheme(E4M3, "block", 128), Scheme(E4M3, "group", 128)),
    "fp8-e5m2": both(Scheme(E5M2)),
    "fp8-w": weights_only(CHANNEL_E4M3),
    "fp8-tensor-w": weights_only(Scheme(E4M3)),
    **{f"mx{name}": both(microscaled(f)) for name, f in (
        ("fp8", E4M3), ("fp8-e5m2", E5M2), ("fp6", NARROW["fp6_e2m3"]), ("fp6-e3m2", NARROW["fp6_e3m2"]),
        ("fp4", NARROW["fp4_e2m1"]), ("int8", INT8),
    )},
    **{f"mxfp{f.bits}-ceil": both(microscaled(f, "ceil")) for f in (E4M3, NARROW["fp6_e2m3"], NARROW["fp4_e2m1"])},
    "mxfp4-w": weights_only(microscaled(NARROW["fp4_e2m1"])),
    "nvfp4-w4a4": both(NVFP4),
    "nvfp4-w": weights_only(NVFP4),
    **{name.replace("scaled", "linear"): both(scheme) for name, scheme in POWERS.items()},
}  # fmt: skip
SIGNED_INT4 = Scheme(INT4, "group", 32, rule="signed")
TENSOR_UINT8 = Scheme(INT8, symmetric=False)  # of inputs, from their smallest to their largest number
CHANNEL_UINT8, GROUP_INT8 = Scheme(INT8, "row", symmetric=False), Scheme(INT8, "group", 32)
RANGE_INT8 = Scheme(INT8, "row", rule="range")
GROUP_UINT4 = Scheme(INT4, "group", 32, symmetric=False)


def products(name: str, linear: Operands) -> Recipe:
    """The recipe of an engine whose linear layers and head have ``linear`` operands; the rest is fp32."""
    return Recipe(name, FORMATS["fp32"], linear, head=linear)


def everywhere(name: str, linear: Operands, ends: Operands | None = None) -> Recipe:
    """The recipe of ``products`` whose embedding and head have the operands ``ends``, or else ``linear``."""
    return replace(products(name, linear), embedding=ends or linear, head=ends or linear)


# What engines run on CPUs, as fragility_engines.referees finds it.
ENGINES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    everywhere("ctranslate2-int8", Operands(Scheme(INT8, "row"), TOKEN_INT8)),
    everywhere("llama.cpp-f16", both(FORMATS["fp16"])),
    products("onnxruntime-int8", Operands(Scheme(INT8), TENSOR_UINT8)),
    products("onnxruntime-int4", weights_only(SIGNED_INT4)),
    everywhere("openvino-int8-w", weights_only(CHANNEL_UINT8)),
    everywhere("openvino-int8", Operands(CHANNEL_UINT8, GROUP_INT8)),
    everywhere("openvino-int4-w", weights_only(GROUP_UINT4), weights_only(CHANNEL_UINT8)),
    everywhere("openvino-int4", Operands(GROUP_UINT4, GROUP_INT8), Operands(CHANNEL_UINT8, GROUP_INT8)),
    products("torch-int8", Operands(Scheme(INT8, rule="range"), Scheme(NARROW["int7"], symmetric=False))),
    products("torchao-int8", both(RANGE_INT8)),
    products("torchao-int8-w", weights_only(RANGE_INT8)),
)}  # fmt: skip
PREQUANTIZED = "given"  # weights that somebody else has rounded, as they are, beside kernels in fp32
CACHES: dict[str, NumberFormat] = {
    "kv-fp8": E4M3,
    "kv-int8": TOKEN_INT8,
    "kv-fp16": FORMATS["fp16"],
    "kv-q8_0": TYPES["q8_0"],
    "kv-q4_0": TYPES["q4_0"],
}  # fp8 with the scale 1, which engines start with
RECIPES: dict[str, Recipe] = {
    **{name: Recipe(name, kernels) for name, kernels in (FORMATS | POWERS).items()},
    **{name: Recipe(name, FORMATS["bf16"], linear=operands) for name, operands in LINEAR.items()},
    **{name: Recipe(name, FORMATS["bf16"], cache=cache) for name, cache in CACHES.items()},
    PREQUANTIZED: Recipe(PREQUANTIZED, FORMATS["fp32"]),
}


def of_type(name: str) -> Operands:
    """Weights of a type of ggml, and inputs as llama.cpp's CPU kernels multiply them by it."""
    return Operands(TYPES[name], inputs_beside(TYPES[name]))


# One type for every matrix (``llama-quantize --pure``), and llama-quantize's mixes. Kernels compute in fp32.
GGUF: dict[str, Recipe] = {
    **{f"ggml-{name}": replace(everywhere(f"ggml-{name}", of_type(name)), gguf=f"ggml-{name}") for name in WEIGHTS},
    **{
        f"gguf-{mix}": Recipe(f"gguf-{mix}", FORMATS["fp32"], of_type(of), gguf=f"gguf-{mix}")
        for mix, of in MIXES.items()
    },
}


def get_recipe(name: str | Recipe | NumberFormat | torch.dtype) -> Recipe:
    """The recipe called ``name``, or one whose kernels have a format or dtype; a recipe is returned as it is.

    "fp8-dynamic+kv-fp8" adds a cache to a recipe, and ``"fp8-dynamic@fp16"`` puts it beside kernels in another format
    than its own. Raises ValueError for other names, and TypeError for what is neither.
    """
    if isinstance(name, Recipe):
        return name
    if isinstance(name, torch.dtype):
        name = of_dtype(name)
    if not isinstance(name, str):
        if not hasattr(name, "compute_dtype"):
            raise TypeError(f"a recipe must be a name, a Recipe, a format or a dtype, got a {type(name).__name__}")
        return RECIPES.get(name.name, Recipe(name.name, name))
    base, at, kernels = name.partition("@")
    own, *added = base.split("+")
    every = RECIPES | GGUF | ENGINES
    if own not in every or len(added) > 1 or (added and (added[0] not in CACHES or own in CACHES)):
        asked = called_by_torch(name)
        begins = [known for known in every if name and known.startswith(asked.lower())]
        alike = begins[:3] or get_close_matches(asked.lower(), every)
        meant = f" (do you mean {' or '.join(alike)}?)" if alike else ""
        known = f'{", ".join(RECIPES)}, or such as "fp8-dynamic+kv-fp8", "ggml-q4_k" or "gguf-q4_k_m"'
        raise ValueError(f"a recipe must be known, got {name!r}{meant}: take one of {known}")
    found = every[own]
    if added:
        found = replace(found, name=base, cache=CACHES[added[0]])
    if at and kernels not in FORMATS:
        raise ValueError(f"kernels beside which a recipe runs must be in one of {', '.join(FORMATS)}, got {name!r}")
    return found.beside(kernels) if at else found


def schemes_beside(name: str, weights_only: bool = False) -> list[Recipe]:
    """The recipes among which a budget of bits chooses: the one named ``name``, one of 8 bits, and the kernels' format.

    For a type of ggml they are all types with at least its bits, for a mix all types. Raises ValueError for a recipe
    without schemes for weights, with a cache, or with schemes for embedding and head.
    """
    recipe = get_recipe(name)
    ends = not recipe.gguf and (recipe.embedding or recipe.head)
    if recipe.linear.weights is None or recipe.cache is not None or ends:
        raise ValueError(
            "a budget of bits, KL or MB divides the weights between schemes, so the recipe must name the smallest, "
            f"such as w4a16-g128, without a KV cache or schemes for embedding and head, got {name!r}"
        )
    names = [name.partition("@")[0]]
    if recipe.gguf:
        least = recipe.linear.weights.bits if recipe.gguf == f"ggml-{recipe.linear.weights.name}" else 0
        names = [f"ggml-{each}" for each in WEIGHTS if TYPES[each].bits >= least]
        names.sort(key=lambda each: each != recipe.gguf)
    elif recipe.linear.weights.bits < 8:
        names.append("w8a16-g128" if recipe.linear.inputs is None else "fp8-dynamic")
    kernels = "fp32" if weights_only else recipe.kernels.name
    beside = [get_recipe(each if get_recipe(each).kernels.name == kernels else f"{each}@{kernels}") for each in names]
    return [*beside, get_recipe(kernels)]
