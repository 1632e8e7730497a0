"""Plans as data: which parts of a model compute in fp32 and which scheme each layer has, and the same as JSON."""

import json
from dataclasses import asdict, dataclass, replace

from fragility_quantization.recipes import Recipe, get_recipe


@dataclass(frozen=True)
class Plan:
    """The parts to keep in fp32 in a model that otherwise computes in ``format``, the name of a recipe.

    - ``layers``: paths of linear layers that have the operands of another recipe, each with the recipe's name.
    - ``modules``: paths of modules that are kept whole.
    - ``residual``: the residual stream is fp32. Embeddings and residual additions give fp32, norms read it (with
      rounded weights), and branches compute in the format.
    - ``scores``: attention computes query times key and the softmax in fp32.
    - ``weights_only``: only the weights of the model are in the format, and all kernels compute in fp32.

    The other fields say what the plan does. ``label`` names it. ``predicted`` is the expected mismatch, mean over the
    windows of the prediction. The price is ``parameter_bytes`` more for parameters, ``activation_bytes`` more per token
    for the residual stream, and ``flops`` per token that move from the format to fp32 (``structure.flops``).
    Raises ValueError for values of other types. Modules inside of others are kept with them.
    """

    format: str
    modules: tuple[str, ...] = ()
    residual: bool = False
    scores: bool = False
    label: str = "nothing"
    predicted: float | None = None
    parameter_bytes: int = 0
    activation_bytes: int = 0
    flops: int = 0
    weights_only: bool = False
    layers: tuple[tuple[str, str], ...] = ()

    @property
    def recipe(self) -> Recipe:
        """The recipe called ``format``, with the ``layers``."""
        recipe = get_recipe(self.format)
        return replace(recipe, layers=dict(recipe.layers) | {p: get_recipe(name).linear for p, name in self.layers})

    def __post_init__(self):
        if not isinstance(self.format, str):
            raise ValueError(f"the format of a plan must be the name of a recipe, got {self.format!r}")
        for name in ("residual", "scores", "weights_only"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not (isinstance(self.modules, tuple) and all(isinstance(path, str) for path in self.modules)):
            raise ValueError(
                f"the modules of a plan must be a tuple of paths, got {self.modules!r}: such as "
                '("model.layers.3",); Contributions.keep(blocks=[3]) takes numbers of blocks'
            )
        pairs = self.layers if isinstance(self.layers, tuple) else (None,)
        if not all(isinstance(pair, tuple) and [*map(type, pair)] == [str, str] for pair in pairs):
            raise ValueError(f"the layers of a plan must be pairs of a path and a recipe's name, got {self.layers!r}")


def to_json(plan: Plan) -> str:
    """``plan`` as text, which ``from_json`` reads."""
    return json.dumps(asdict(plan), indent=2)


def from_json(text: str) -> Plan:
    """The plan that ``to_json`` wrote; raises ValueError for another text."""
    try:
        fields = json.loads(text)
        modules, layers = tuple(fields.pop("modules")), tuple(map(tuple, fields.pop("layers")))
        return Plan(modules=modules, layers=layers, **fields)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as cause:
        raise ValueError(f"a plan must be JSON that to_json wrote, got {text[:60]!r}") from cause
