"""Reference patching (subsec. E3): what one block costs, measured by computing that block in fp32.

The base low-precision pass and the patched passes of all L blocks are one pass through the
low-precision model: a patched variant is the base until its block, so it enters the batch there, and
every later block runs once over all variants that have entered. That is (L + 1) / 2 passes, not L.
Under stochastic rounding all variants meet the same random bits: what they differ by is the patch.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fragility_core.arithmetic.attention import observe_attention
from fragility_core.arithmetic.emulation import LowPrecision
from fragility_core.models.architectures import blocks
from fragility_core.models.tree import final_hidden
from fragility_core.theory import mismatch


class Patching:
    """Patched low-precision passes of a Hugging Face model (protocol section 5, E3)."""

    def __init__(self, model: PreTrainedModel, low: LowPrecision):
        """``low`` is ``model`` lowered; it runs with the attention of the monitored pass, ``model`` with its own.

        Raises TypeError for an architecture whose blocks are not known, and ValueError where the
        attention of ``model`` takes other masks than the monitored pass makes (eager, flash).
        """
        implementation = model.config._attn_implementation
        if AttentionMaskInterface().get(implementation) is not sdpa_mask:
            raise ValueError(
                "the fp32 blocks are called with the masks of the low-precision pass, those of sdpa attention, got a "
                f'model with {implementation} attention: call model.set_attn_implementation("sdpa")'
            )
        self.model, self.low = model, low
        self.pairs = [(b.module, fp32.module) for b, fp32 in zip(blocks(low.model), blocks(model), strict=True)]
        self.positions: tuple[Tensor, Tensor] | None = None  # cos and sin of rotary embeddings in fp32
        observe_attention(low.model)

    def stochastic(self, seed: int) -> "Patching":
        """The same models, the low-precision one rounding stochastically (``LowPrecision.stochastic``)."""
        twin = copy.copy(self)
        twin.low = self.low.stochastic(seed)
        return twin

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Final hidden states (L + 1, B, T, d_model) of ``tokens`` (B, T): the base's, then with block l patched.

        The fp32 block l reads the base's low-precision hidden state, and its result is cast back to
        the format. Raises ValueError for a model in training mode.
        """
        if self.model.training or self.low.model.training:
            raise ValueError("patched passes need both models in eval mode, got training mode: call model.eval()")
        with self._patching(len(tokens)), self.low.running():
            hidden = final_hidden(self.low.model, tokens)
        return hidden.unflatten(0, (-1, len(tokens)))

    @contextmanager
    def _patching(self, windows: int) -> Iterator[None]:
        """Hooks by which the patched variant of every block enters behind those before it, for one pass."""
        with ExitStack() as stack:
            stack.callback(self._share_bits, 1)
            if (rotary := getattr(self.low.model.base_model, "rotary_emb", None)) is not None:
                stack.callback(rotary.register_forward_hook(self._keep_positions, with_kwargs=True).remove)
            for block, reference in self.pairs:
                stack.callback(block.register_forward_pre_hook(one_mask, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._entry(reference, windows), with_kwargs=True).remove)
            yield

    def _keep_positions(self, rotary, args, kwargs, output) -> None:
        """Rotary embeddings are made once for all blocks, and rounded: the fp32 blocks get fp32 ones."""
        with self.low.paused():
            self.positions = self.model.base_model.rotary_emb(args[0].float(), *args[1:], **kwargs)

    def _entry(self, reference: nn.Module, windows: int):
        def hook(block, args, kwargs, output):
            if "position_embeddings" in kwargs:
                kwargs = kwargs | {"position_embeddings": self.positions}
            with self.low.paused():
                patched = reference(args[0][:windows].float(), *args[1:], **kwargs)
            self._share_bits(1)
            entered = torch.cat([output, patched.to(output.dtype)])  # the cast is a kernel of the format
            self._share_bits(len(entered) // windows)
            return entered

        return hook

    def _share_bits(self, variants: int) -> None:
        if self.low.execution == "stochastic":
            self.low.emulation.copies = variants


def one_mask(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The first window's mask for all variants of all windows: without padding, all windows' masks are equal."""
    mask = kwargs.get("attention_mask")
    return args, kwargs if mask is None else kwargs | {"attention_mask": mask[:1]}


def patch_effects(patched: Tensor, reference: Tensor) -> pd.DataFrame:
    """What patching block l takes off each window's mismatch, tidy rows one per window and block.

    ``patched`` (L + 1, B, T, d_model) are those of ``Patching``, ``reference`` (B, T, d_model) the
    fp32 hidden states. ``exact_reduction`` = ``base_mismatch`` - ``patched_mismatch`` (subsec. E3);
    ``reduction_fraction`` is that over the base's. An overflow shows as nonfinite values.
    """
    base, *rest = mismatch(patched, reference).cpu().double().numpy()  # (B,) each, one transfer
    depth, count = len(rest), len(base)
    effects = pd.DataFrame(
        {
            "window": np.repeat(np.arange(count), depth),
            "layer": np.tile(np.arange(depth), count),
            "base_mismatch": np.repeat(base, depth),
            "patched_mismatch": np.stack(rest, 1).ravel(),
        }
    )
    reduction = effects.base_mismatch - effects.patched_mismatch
    return effects.assign(exact_reduction=reduction, reduction_fraction=reduction / effects.base_mismatch)
