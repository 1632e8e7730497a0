"""Ladders: the schemes from which each library chooses, the bits of a weight in each, and the same recipe of ours."""

from dataclasses import dataclass

from fragility_numerics.formats import FORMATS, NARROW
from fragility_quantization.recipes import LINEAR, Operands, Recipe, weights_only
from fragility_quantization.schemes import Scheme


@dataclass(frozen=True)
class Rung:
    """One scheme of a ladder: its ``name`` in the library, ``bits`` a weight, and ``ours``, None for fp32.

    Bits leave scales out, as ModelOpt and Olive do. AutoRound is told to do the same.
    """

    name: str
    bits: int
    ours: Operands | None = None

    @property
    def recipe(self) -> Recipe | None:
        """Our recipe for this scheme, with kernels in fp32; None without a scheme."""
        return Recipe(self.name, FORMATS["fp32"], linear=self.ours) if self.ours else None


@dataclass(frozen=True)
class Ladder:
    """The rungs from which ``library`` chooses one for every layer, cheapest first, and its ``methods``."""

    library: str
    name: str
    rungs: tuple[Rung, ...]
    methods: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The key of the ladder in ``LADDERS``."""
        return f"{self.library} {self.name}"

    @property
    def cheaper(self) -> list[int]:
        """The numbers of all rungs but the dearest."""
        return [number for number, rung in enumerate(self.rungs) if rung.bits < max(self.bits)]

    @property
    def names(self) -> list[str]:
        """The names of the rungs."""
        return [rung.name for rung in self.rungs]

    @property
    def bits(self) -> list[int]:
        """Bits a weight on each rung."""
        return [rung.bits for rung in self.rungs]


def asymmetric(format: str, size: int) -> Operands:
    """Operands with weights alone, by a scheme from the smallest to the largest entry of each group."""
    return weights_only(Scheme(NARROW[format], "group", size, symmetric=False))


MXFP4_WEIGHTS = "MXFP4 weights"  # AutoRound has no name for it
INT8, INT4 = LINEAR["w8a16-g128"], LINEAR["w4a16-range-g128"]
METHODS = {"modelopt": ("gradient", "kl_div"), "autoround": ("DeltaLoss",), "olive": ("kld_gradient",), "own": ()}
RUNGS: dict[tuple[str, str], tuple[Rung, ...]] = {
    ("modelopt", "fp8"): (Rung("FP8_DEFAULT_CFG", 8, LINEAR["fp8-static"]), Rung("none", 16)),
    ("modelopt", "int4 int8"): (
        Rung("INT4_BLOCKWISE_WEIGHT_ONLY_CFG", 4, LINEAR["w4a16-g128"]),
        Rung("INT8_WEIGHT_ONLY_CFG", 8, LINEAR["w8a16-channel"]),
    ),
    ("autoround", "fp8"): (Rung("FP8_BLOCK", 8, LINEAR["fp8-block"]), Rung("none", 16)),
    # AutoRound's largest magnitude becomes -8, whatever its sign: its steps are 15/16 of those of the rule "range".
    ("autoround", "int4 int8"): (Rung("W4A16", 4, INT4), Rung("W8A16", 8, INT8)),
    ("autoround", "mxfp4 mxfp8"): (Rung("MXFP4", 4, LINEAR["mxfp4"]), Rung("MXFP8", 8, LINEAR["mxfp8"])),
    ("autoround", "mxfp4 int4 int8"): (
        Rung(MXFP4_WEIGHTS, 4, LINEAR["mxfp4-w"]), Rung("W4A16", 4, INT4), Rung("W8A16", 8, INT8),
    ),
    ("olive", "int4 int8"): (Rung("4 bits", 4, asymmetric("int4", 32)), Rung("8 bits", 8, asymmetric("int8", 32))),
    ("own", "int4 int8"): (Rung("w4a16-g32", 4, LINEAR["w4a16-g32"]), Rung("w8a16-g32", 8, LINEAR["w8a16-g32"])),
    ("own", "mxfp4 int8"): (Rung("mxfp4-w", 4, LINEAR["mxfp4-w"]), Rung("w8a16-g32", 8, LINEAR["w8a16-g32"])),
}  # fmt: skip
LADDERS = {
    found.title: found
    for found in (Ladder(library, name, rungs, METHODS[library]) for (library, name), rungs in RUNGS.items())
}


def get_ladder(name: str) -> Ladder:
    """The ladder called ``name``, such as "modelopt fp8"; raises ValueError for another name."""
    if name not in LADDERS:
        raise ValueError(f"a ladder must be one of {', '.join(LADDERS)}, got {name!r}")
    return LADDERS[name]
