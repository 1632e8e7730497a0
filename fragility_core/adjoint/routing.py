"""Mixtures of experts: where rounding changes the choice of experts, which no first-order estimate sees."""

from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fragility_core.adjoint.estimator import Adjoint
from fragility_core.arithmetic.lowering import LowPrecision
from fragility_core.models.tree import final_hidden


class Routes(TorchFunctionMode):
    """The choices made inside: for every router, in order, the ``experts`` of each token and its ``margins``.

    A margin is the log probability of the last expert chosen less that of the first one left out; where a
    router's scores are no probabilities (logits, sigmoids), their difference. Choosing all experts does not count
    as a choice.
    """

    def __init__(self, tokens: int | None = None):
        """With ``tokens``, only what is chosen once for each of so many counts, not choices within groups."""
        super().__init__()
        self.tokens = tokens
        self.experts: list[Tensor] = []  # (tokens, k) each, ascending
        self.margins: list[Tensor] = []  # (tokens,) each

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "topk":
            scores, k = args[0].float().flatten(0, -2), result.indices.shape[-1]
            if k < scores.shape[-1] and len(scores) == (self.tokens or len(scores)):
                self.experts.append(result.indices.flatten(0, -2).sort(-1).values)
                best = log_probabilities(scores).topk(k + 1).values
                self.margins.append(best[:, k - 1] - best[:, k])
        return result


def log_probabilities(scores: Tensor) -> Tensor:
    """The logarithms of ``scores`` (tokens, experts) where all rows are probabilities, else ``scores`` themselves."""
    sums_to_one = (scores.detach().sum(-1) - 1).abs() < 2**-6  # in a 16-bit format, nearly
    probable = (sums_to_one & (scores > 0).all(-1)).all()
    return torch.where(probable, scores.where(probable, 1.0).log(), scores)


def routes(model: nn.Module, tokens: Tensor) -> Routes:
    """The choices of ``model`` for ``tokens`` (B, T); raises ValueError for a model that makes none by torch.topk."""
    with Routes(tokens.numel()) as seen:
        final_hidden(model, tokens)
    if not seen.experts:
        raise ValueError("the model must choose experts by torch.topk, but it made no such choice")
    return seen


def router_margins(model: nn.Module, tokens: Tensor) -> Tensor:
    """Margins (routers, tokens) of all choices: an ``output`` for ``Adjoint``."""
    return torch.stack(routes(model, tokens).margins)


@dataclass(frozen=True)
class Routing:
    """How the low-precision passes of some windows choose experts.

    ``routers`` has one row per window and router: the share of tokens whose experts ``changed``, the
    share of ``near_ties``, whose margin is below the standard deviation of its predicted error, and
    the share of changes ``expected`` from the margins. ``unchanged`` (B, T) is True for tokens that
    kept their experts everywhere; ``undisturbed`` for those before the first change in their window,
    which no change can reach in a causal model.
    """

    routers: pd.DataFrame
    unchanged: Tensor
    undisturbed: Tensor


@torch.no_grad()
def changed_choices(low: LowPrecision, reference: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``low`` chooses other experts than ``reference`` for ``tokens`` (B, T), and its margins: (routers, B, T).

    Raises ValueError for a model that makes no choices.
    """
    exact = routes(reference, tokens)
    with low.running():
        rounded = routes(low.model, tokens)
    changed = torch.stack([(a != b).any(-1) for a, b in zip(exact.experts, rounded.experts)])
    return changed.unflatten(1, tokens.shape), torch.stack(rounded.margins).unflatten(1, tokens.shape)


def compare_routes(low: LowPrecision, reference: nn.Module, tokens: Tensor) -> Routing:
    """Routing of the windows ``tokens`` (B, T) in the low-precision model beside the ``reference`` model.

    Near ties and expected changes need no reference: margins and their error are the low-precision
    model's own. Raises ValueError for a model that makes no choices.
    """
    changed, margins = changed_choices(low, reference, tokens)
    error = Adjoint(low, reference, output=router_margins)(tokens).windows
    deviation = torch.tensor((error.predicted * error.final_norm).to_numpy()) / margins[:, 0].numel() ** 0.5
    scaled = margins / deviation[:, None].to(margins)
    shares = {"changed": changed, "near_ties": scaled < 1, "expected": torch.special.ndtr(-scaled)}
    pairs = range(len(tokens)), range(len(changed))
    rows = pd.MultiIndex.from_product(pairs, names=["window", "router"]).to_frame(False)
    columns = {name: x.float().mean(-1).T.flatten().cpu().numpy() for name, x in shares.items()}
    unchanged = ~changed.any(0)
    return Routing(rows.assign(**columns), unchanged, unchanged.cumprod(1).bool())
