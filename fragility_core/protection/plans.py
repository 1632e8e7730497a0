"""Plans: what is kept in fp32."""

from dataclasses import dataclass

# The sites that can be kept in fp32, by the names that plans and budgets use.
KEEPABLE_SITES = ("residual", "norms", "embedding", "head", "attention", "mlp", "scores")


@dataclass(frozen=True)
class Plan:
    """What to keep in fp32 in a model that otherwise computes in ``format``.

    - ``modules``: paths of modules that are kept whole.
    - ``residual``: the residual stream is fp32. Embeddings and residual additions give fp32, norms read it (with
      rounded weights), and branches compute in the format.
    - ``scores``: attention computes query times key and the softmax in fp32.
    - ``weights_only``: only the weights of the model are in the format, and all kernels compute in fp32.

    The other fields say what the plan does. ``label`` names it. ``predicted`` is the expected mismatch, mean over the
    windows of the prediction. The price is ``parameter_bytes`` more for parameters, ``activation_bytes`` more per token
    for the residual stream, and ``flops`` per token that move from the format to fp32 (``cost.flops``).
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
