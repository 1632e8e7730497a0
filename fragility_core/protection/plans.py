"""What is kept in fp32."""

from dataclasses import dataclass

# Kinds of site that can be kept in fp32.
KEEPABLE_SITES = ("residual", "norms", "embedding", "head", "attention", "mlp", "scores")


@dataclass(frozen=True)
class Plan:
    """What to keep in fp32 in a model that otherwise computes in ``format``, or has its weights in it alone.

    ``modules`` are paths of modules kept whole. With ``residual`` the residual stream is fp32: embeddings
    and residual additions are, norms read it in fp32 (with their rounded weights), branches as before.
    With ``scores`` attention forms query times key and the softmax in fp32.

    ``label`` says what that is in words. ``predicted`` is the mismatch to expect, the mean over the
    windows of the prediction. The price: ``parameter_bytes`` more for parameters;
    ``activation_bytes`` more per token for the residual stream; ``flops`` per token that move from the
    format to fp32 (``cost.flops``).
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
