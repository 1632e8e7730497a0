"""Targets: what the error of a low-precision pass is measured in.

Contributions are squared errors of its output. The prediction is their sum over its squared norm, or the root of that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fragility_core.models.padding import without_padding
from fragility_core.models.paths import final_hidden

NEGLIGIBLE = 1e-12  # probability of a token
AT_ONCE = 2**20  # logits: 4 MiB, which caches hold
Output = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Target:
    """A quantity by its ``name``, with its ``unit``.

    ``output`` gives the tensor (B, T or less, ...) whose error counts, for a model and tokens (B, T). ``norm`` gives
    the number by whose square the squared error is divided, for the output of one window and a mask or 1.0 by which it
    is multiplied. If ``squared``, the quotient itself is predicted, else its root.

    ``output`` holds some values fixed. With secant slopes they lie ``between`` the fp32 pass, 0, and the low one, 1.
    """

    name: str
    output: Output
    norm: Callable[[Tensor, Tensor], Tensor]
    unit: str = "relative error"
    squared: bool = False
    between: float = 0.0


def own_norm(output: Tensor, counted: Tensor) -> Tensor:
    """||X|| over the positions that count: errors are relative to it."""
    return torch.linalg.vector_norm(output * counted)


def root_of_count(output: Tensor, counted: Tensor) -> Tensor:
    """The root of the number of positions: errors are root mean squares."""
    return counted.expand((*output.shape[:-1], 1)).sum().sqrt()


def root_of_twice_the_count(output: Tensor, counted: Tensor) -> Tensor:
    """The root of twice the number of positions, for squares that are halved."""
    return (2 * root_of_count(output, counted) ** 2).sqrt()


@without_padding
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits (B, T, vocabulary) in fp32, as the model scales or caps them, with the mask of ``final_hidden``.

    Raises TypeError for a model without a head.
    """
    output = model(tokens, use_cache=False)
    if not hasattr(output, "logits"):
        raise TypeError(f"this target needs a head: load AutoModelForCausalLM, got {type(model).__name__}")
    return output.logits.float()


def distribution(z: Tensor) -> Tensor:
    """The probabilities of logits ``z``, as constants; 0 below NEGLIGIBLE.

    Gradients of smaller ones are denormal numbers, with which a CPU takes a hundred times as long.
    """
    p = torch.softmax(z.detach(), -1)
    return p.masked_fill(p < NEGLIGIBLE, 0.0)


def divergence(model: nn.Module, tokens: Tensor) -> Tensor:
    """sqrt(p) (z - <p, z>) for logits z, with the probabilities p held fixed.

    To second order, a change d of the logits changes the distribution by KL = d' (diag(p) - p p') d / 2, which is half
    the squared change of this output (Amari 2016, doi:10.1007/978-4-431-55978-8).
    """

    def of(z: Tensor) -> Tensor:
        p = distribution(z)
        return p.sqrt() * (z - (p * z).sum(-1, keepdim=True))

    z = logits(model, tokens)
    return torch.cat([of(rows) for rows in z.split(max(1, AT_ONCE // z.shape[-1]), 1)], 1)


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """z_t - <p, z> for the next token t of the text, (B, T - 1, 1), with the probabilities p held fixed.

    It changes as the log probability of t does, to first order. Raises ValueError for windows of a single token.
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"windows must have 2 tokens or more for a next one, got {tokens.shape[1]}")
    z = logits(model, tokens)[:, :-1]
    return z.gather(-1, tokens[:, 1:, None].to(z.device)) - (distribution(z) * z).sum(-1, keepdim=True)


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """A number (B, 1, 1), in nats, that changes as the mean next-token cross entropy does, to first order."""
    return -log_probabilities(model, tokens).mean(1, keepdim=True)


def margins(model: nn.Module, tokens: Tensor) -> Tensor:
    """Margins (B, T, 1): how far the logit of the most probable next token is above the second.

    ``explain.changed_choices`` says how many next tokens change, and how many where contributions are left out.
    """
    z = logits(model, tokens)
    first, second = z.detach().topk(2, -1).indices.split(1, -1)
    return z.gather(-1, first) - z.gather(-1, second)


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("hidden", final_hidden, own_norm),
        Target("kl", divergence, root_of_twice_the_count, "nats a token", True, 1 / 3),
        Target("logprob", log_probabilities, root_of_count, "nats, root mean square", between=0.5),
        Target("loss", mean_loss, lambda z, counted: torch.ones(()), "nats, standard deviation", between=0.5),
        Target("flips", margins, root_of_count, "logits, root mean square"),
    )
}


def get_target(target: str | Target | Output) -> Target:
    """The target named ``target``, a name in TARGETS. A Target is returned as it is; a function becomes its output.

    Errors of a function's output are relative. Raises ValueError for another name.
    """
    if isinstance(target, Target):
        return target
    if callable(target):
        return Target("output", target, own_norm)
    if target not in TARGETS:
        raise ValueError(f"a target must be one of {', '.join(TARGETS)}, got {target!r}")
    return TARGETS[target]
