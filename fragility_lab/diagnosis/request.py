"""The request for a diagnosis, checked before any work."""

from dataclasses import dataclass

from fragility_adjoint.mixed_precision import KEEPABLE_SITES
from fragility_adjoint.mixed_precision.budget import mixes_schemes, parse_budget, schemes_beside
from fragility_adjoint.quantization.recipes import PREQUANTIZED, RECIPES, Recipe, get_recipe
from fragility_lab.inputs.checkpoints import shortened

ATTENTIONS = ("auto", "sdpa", "eager")
TARGETS = ("hidden", "kl", "logprob", "flips")
REFERENCES = ("auto", "yes", "no")
FORMS = ("auto", "whole", "streamed")


@dataclass(frozen=True)
class Request:
    """A model and a text (hub name, path, or "embedded"), the name of a recipe as ``format``, and a budget.

    - ``budget``: "2 blocks", "1 site", "6 modules" or "40 MB" are kept in fp32; a bare number counts blocks. "5 bits" a
      weight, "KL 0.01" at most, or for a recipe with schemes for weights "12 MB" of the whole model, are budgets for
      schemes: each linear layer gets one of the ``schemes``.
    - ``keep``: sites, such as "residual head", of which a plan for schemes may keep parts in fp32.
    - ``target``: the quantity whose error is predicted, one of TARGETS (``predictor.targets``).
    - ``seed`` draws ``windows`` windows of ``length`` tokens. The prediction averages over ``probes`` sign vectors.
    - ``attention``: the implementation that the model runs with.
    - ``reference``: "yes" measures fp32 passes, "no" does not, "auto" does if memory allows.
    - ``weights_only``: only the weights are rounded, and computing is in fp32.
    - ``reference_model``: the fp32 model with whose weights those of ``model``, as they are, are compared. The
      ``format`` is then "given".
    - ``form``: "streamed" holds one block after the other in memory; "auto" does so if the "whole" model does not fit.

    Raises ValueError for other values.
    """

    model: str
    data: str
    format: str
    budget: str
    windows: int
    length: int
    probes: int = 2
    seed: int = 0
    attention: str = "auto"
    reference: str = "auto"
    weights_only: bool = False
    target: str = "hidden"
    keep: str = ""
    reference_model: str = ""
    form: str = "auto"

    def __post_init__(self):
        if (self.format == PREQUANTIZED) != bool(self.reference_model):
            raise ValueError(
                f'a reference model goes with the format "{PREQUANTIZED}", which compares weights as they are, got '
                f"{self.format!r} and {self.reference_model!r}: leave RECIPE= or REFERENCE_MODEL= away"
            )
        if not (self.reference_model or get_recipe(self.format).rounds):
            rounding = ", ".join(name for name, recipe in RECIPES.items() if recipe.rounds)
            raise ValueError(f"a diagnosis needs a format that rounds results, {rounding}, got {self.format!r}")
        for name, known in (("attention", ATTENTIONS), ("reference", REFERENCES), ("target", TARGETS), ("form", FORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name, least in (("windows", 1), ("length", 2), ("probes", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.target not in ("hidden", self.measured_in):  # "hidden" stands for no target
            raise ValueError(
                f"a budget of KL is measured in KL, got TARGET={self.target} beside BUDGET={shortened(self.budget)}: "
                "leave TARGET= away"
            )
        if strange := [site for site in self.kept if site not in KEEPABLE_SITES]:
            raise ValueError(f"keep must name some of {', '.join(KEEPABLE_SITES)}, got {', '.join(strange)}")
        if self.mixes:
            self.schemes  # noqa: B018  raises
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

    @property
    def kept(self) -> list[str]:
        """The sites that a choice of schemes may keep in fp32."""
        return self.keep.replace(",", " ").split()

    @property
    def rounds_weights_alone(self) -> bool:
        """True if computing is in fp32."""
        return self.weights_only or bool(self.reference_model)

    @property
    def described(self) -> str:
        """The low-precision side of the comparison, in words."""
        if self.reference_model:
            return f"weights as they are, against those of {self.reference_model}"
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
