"""A signal beside the paper's that keeps tokens apart: how far the residual stream travels, over where it ends.

The paper's score takes Frobenius norms over all positions, and bounds the rounding errors of a block by norms of
weights and inputs. Where a few tokens have a residual stream many times that of the others (attention sinks), such
norms describe these tokens alone. This signal takes each token's own norms, and for a block's rounding errors the size
of what the block adds. docs/sinks.md says how it was found, on which windows it was judged, and what it misses.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fragility_core.models.blocks import Block, blocks
from fragility_core.models.paths import final_hidden
from fragility_numerics.attention import observing_attention
from fragility_numerics.lowering import LowPrecision, require_low
from fragility_numerics.nested import together


class StreamNorms(NamedTuple):
    """Norms by token of one pass over windows (B, T), in fp32.

    ``attention`` and ``mlp`` (L, B, T) are those of what the sublayers add, ``entering`` (L, B, T) and ``last`` (B, T)
    those of the residual stream before each block and behind the last one, ``hidden`` (B, T) those of the final hidden
    state.
    """

    attention: Tensor
    mlp: Tensor
    entering: Tensor
    last: Tensor
    hidden: Tensor

    def relative_travel(self) -> Tensor:
        """The relative error of each token (B, T) that errors of unit size relative to each addition may add up to.

        sum_l sqrt(|a_l,t|^2 + |m_l,t|^2) / |h_L,t|, with a and m as attention and MLP of block l add them.
        """
        return torch.hypot(self.attention, self.mlp).sum(0) / self.last

    def travel(self, unit_roundoff: float) -> Tensor:
        """u sqrt(sum_t (s_t |x_t|)^2) / ||X_L|| of each window (B,), s_t the ``relative_travel``, x_t the final state.

        This is the relative mismatch in the Frobenius norm if token t has the relative error u s_t.
        """
        errors = torch.linalg.vector_norm(self.relative_travel() * self.hidden, dim=-1)
        return unit_roundoff * errors / torch.linalg.vector_norm(self.hidden, dim=-1)


@torch.inference_mode(False)
@torch.no_grad()
def stream_norms(low: LowPrecision, tokens: Tensor) -> StreamNorms:
    """The norms of one low-precision pass over ``tokens`` (B, T), with the attention of a monitored pass.

    Raises TypeError for a model that was not lowered and for an architecture whose blocks are not known
    (``models.blocks.blocks``).
    """
    require_low(low)
    model, found = low.model, blocks(low.model)
    seen: dict[str, list[Tensor]] = {"attention": [], "mlp": [], "entering": [], "last": []}
    with ExitStack() as stack:
        for block in found:
            for handle in _attach(block, seen, low, len(tokens)):
                stack.callback(handle.remove)
        with observing_attention(model), low.running():
            hidden = final_hidden(model, tokens)
    by_block = {name: torch.stack(together(values)).to(hidden.device) for name, values in seen.items()}
    return StreamNorms(**by_block | {"last": by_block["last"][-1]}, hidden=_norms(hidden))


def _norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)


def _attach(block: Block, seen: dict[str, list[Tensor]], low: LowPrecision, windows: int) -> Iterator[RemovableHandle]:
    def keep(name: str, value: Tensor) -> None:
        with low.paused():
            norms = _norms(value)
            seen[name].append(norms if norms.ndim > 1 else norms.unflatten(0, (windows, -1)))  # OPT's MLP has (B T, d)

    def added(name: str, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(lambda module, args, output: keep(name, output))

    yield added("attention", block.out_norm_1.module if block.out_norm_1 else block.attention_out)
    yield added("mlp", block.out_norm_2.module if block.out_norm_2 else block.mlp_out)
    yield block.module.register_forward_pre_hook(lambda module, args: keep("entering", args[0]))
    yield block.module.register_forward_hook(
        lambda module, args, output: keep("last", output[0] if isinstance(output, tuple) else output)
    )
