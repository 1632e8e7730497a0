"""The request for a diagnosis, checked before any work."""

from dataclasses import dataclass

from fragility_adjoint.mixed_precision import KEEPABLE_SITES
from fragility_adjoint.mixed_precision.budget import mixes_schemes, parse_budget
from fragility_lab.diagnosis.options import Options
from fragility_lab.inputs.names import shortened, titled
from fragility_quantization.recipes import PREQUANTIZED, RECIPES, Recipe, get_recipe, schemes_beside


@dataclass(frozen=True)
class Request(Options):
    """A model, a text, a format or recipe, a budget, and how to compute; ``Options`` has the fields.

    A ``budget`` that keeps something in fp32 counts blocks if it is a bare number. One of bits or KL, or for a recipe
    with schemes for weights one of bytes, gives each linear layer one of the ``schemes``. Then ``keep`` names sites of
    which the plan may keep parts in fp32. The ``format`` "given" compares the weights of ``model``, as they are, with
    those of the fp32 ``reference_model``. Raises ValueError for options that do not go together.
    """

    def __post_init__(self):
        super().__post_init__()
        if (self.format == PREQUANTIZED) != bool(self.reference_model):
            raise ValueError(
                f'a reference model goes with the format "{PREQUANTIZED}", which compares weights as they are, got '
                f"{self.format!r} and {self.reference_model!r}: leave RECIPE= or REFERENCE_MODEL= away"
            )
        if not (self.reference_model or get_recipe(self.format).rounds):
            rounding = ", ".join(name for name, recipe in RECIPES.items() if recipe.rounds)
            raise ValueError(f"a diagnosis needs a format that rounds results, {rounding}, got {self.format!r}")
        if self.weights_only and get_recipe(self.format).cache is not None:
            raise ValueError(
                f"a KV cache holds no weights, which alone are to be rounded, got WEIGHTS_ONLY=yes beside RECIPE="
                f"{self.format}: leave one of the two away"
            )
        if self.target != "hidden":  # what is not asked for
            self.require_measured_in(self.target)
        if strange := [site for site in self.kept if site not in KEEPABLE_SITES]:
            raise ValueError(f"keep must name some of {', '.join(KEEPABLE_SITES)}, got {', '.join(strange)}")
        if self.mixes:
            self.schemes  # noqa: B018  raises
            if self.weights_only and get_recipe(self.format).linear.inputs is not None:
                raise ValueError(
                    f"a choice of schemes for weights alone needs a recipe that rounds weights alone, such as fp8-w or "
                    f"w4a16-g128, got {self.format!r}, which rounds inputs, too, beside WEIGHTS_ONLY=yes"
                )
        elif self.kept:
            raise ValueError(
                "keep goes with a budget for schemes (bits, KL, or MB with a recipe such as w4a16-g128); other budgets "
                f"choose among all parts: got KEEP={self.keep!r} with {self.budget!r}"
            )
        if self.reference_model and self.parsed_budget[1] == "bytes":
            raise ValueError(
                "a budget of bytes needs to know what weights take, but those of another's format do not say it, got "
                f"{self.budget!r}: count blocks, sites or modules"
            )

    def require_measured_in(self, target: str) -> None:
        """Raises ValueError if the budget is one of KL, and the ``target`` another."""
        if target != self.measured_in:
            beside = f"got TARGET={target} beside BUDGET={shortened(self.budget)}"
            raise ValueError(f"a budget of KL is measured in KL, {beside}: leave TARGET= away")

    @property
    def name(self) -> str:
        """The model as titles name it."""
        return titled(self.model)

    @property
    def kept(self) -> list[str]:
        """The sites that a choice of schemes may keep in fp32."""
        return self.keep.replace(",", " ").split()

    @property
    def rounds_weights_alone(self) -> bool:
        """True if weights alone are rounded, and kernels compute in fp32."""
        return self.weights_only or bool(self.reference_model)

    @property
    def described(self) -> str:
        """The low-precision side of the comparison, in words."""
        if self.reference_model:
            return f"weights as they are, against those of {titled(self.reference_model)}"
        return f"weights in {self.format}" if self.weights_only else self.format

    @property
    def execution(self) -> str:
        """The argument ``execution`` of ``lowering.lower``."""
        return "weights" if self.weights_only else "auto"

    @property
    def mixes(self) -> bool:
        """True if the budget is for a choice of schemes, not for what is kept in fp32."""
        return mixes_schemes(self.budget, get_recipe(self.format))

    @property
    def measured_in(self) -> str:
        """The target of the prediction: "kl" for a budget of KL, else ``target``."""
        return "kl" if self.parsed_budget[1] == "kl" else self.target

    @property
    def schemes(self) -> list[Recipe]:
        """The recipes among which a budget of bits chooses: ``format``, one of 8 bits, and the kernels' own format.

        Raises ValueError for a format without schemes for weights.
        """
        return schemes_beside(self.format, self.weights_only)

    @property
    def parsed_budget(self) -> tuple[float, str]:
        """Number and unit (``budget.parse_budget``)."""
        return parse_budget(self.budget)
