"""Reference patching (Section 6.3 (`subsec:e3`)): what one block costs, measured by computing that block in fp32.

The base low-precision pass and the patched passes of all L blocks are one pass through the low-precision model. The
variant with block l patched equals the base before block l, so it enters the batch there. Every later block runs once
over all variants that have entered. That is (L + 1) / 2 passes, not L. Under stochastic rounding all variants get the
same random bits, so they differ by the patch alone.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from fragility_core.models.blocks import blocks
from fragility_core.models.padding import require_model
from fragility_core.models.paths import block_paths, final_hidden
from fragility_core.theory import mismatch
from fragility_numerics.attention import observing_attention
from fragility_numerics.internals import attention_of
from fragility_numerics.lowering import LowPrecision, require_low


class Patching:
    """Patched low-precision passes of a Hugging Face model (protocol section 5, E3)."""

    def __init__(self, model: PreTrainedModel, low: LowPrecision):
        """``low`` is ``model`` lowered. It runs with the attention of the monitored pass, ``model`` with its own.

        Raises TypeError for an architecture whose blocks are not known, and ValueError if the attention of ``model``
        takes other masks than the monitored pass makes (eager, flash), or if it has another number of blocks. Raises
        TypeError for a ``low`` that ``lower`` did not return, and for a ``model`` that is none of transformers.
        """
        require_low(low)
        require_model(model)
        implementation = attention_of(model)
        if AttentionMaskInterface().get(implementation) is not sdpa_mask:
            raise ValueError(
                "the fp32 blocks are called with the masks of the low-precision pass, those of sdpa attention, got a "
                f'model with {implementation} attention: call model.set_attn_implementation("sdpa") if it has that'
            )
        self.model, self.low = model, low
        exact = [block.module for block in blocks(model)]
        paths, copies = block_paths(model), block_paths(low.model)
        if paths != copies:
            raise ValueError(f"low must be lowered from this model, got {len(copies)} blocks in place of {len(paths)}")
        named = {module: path for path, module in model.named_modules()}
        self.pairs = [(low.model.get_submodule(named[block]), block) for block in exact]
        self.positions: dict[int, tuple[Any, Any]] = {}  # rotary embeddings and the same in fp32, by the former's id

    def stochastic(self, seed: int) -> "Patching":
        """This patching with stochastic rounding of the low-precision model (``LowPrecision.stochastic``)."""
        twin = copy.copy(self)
        twin.low = self.low.stochastic(seed)
        return twin

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Final hidden states (L + 1, B, T, d_model) of ``tokens`` (B, T): of the base, then with block l patched.

        The fp32 block l reads the base's low-precision hidden state. Its result is cast back to the format. Raises
        ValueError for a model in training mode.
        """
        self.require_evaluating()
        with observing_attention(self.low.model), self._patching(len(tokens)), self.low.running():
            hidden = final_hidden(self.low.model, tokens.repeat(self._copies(), 1))
        return hidden.unflatten(0, (-1, len(tokens)))

    def _copies(self) -> int:
        """The number of copies of the tokens that a pass gets: 1, but GPTBigCode shapes its result as its tokens."""
        return len(self.pairs) + 1 if self.low.model.config.model_type == "gpt_bigcode" else 1

    def require_evaluating(self) -> None:
        """Raises ValueError for a model in training mode, where dropout would add to the error."""
        if any(module.training for model in (self.model, self.low.model) for module in model.modules()):
            raise ValueError("patched passes need both models in eval mode, got training mode: call model.eval()")

    @contextmanager
    def _patching(self, windows: int) -> Iterator[None]:
        """Hooks, for one pass, that add the patched variant of every block after the variants before it."""
        with ExitStack() as stack:
            stack.callback(self._share_bits, 1)
            stack.callback(self.positions.clear)
            self._follow_positions(stack)
            stack.callback(self.pairs[0][0].register_forward_pre_hook(partial(first_windows, windows)).remove)
            for block, reference in self.pairs:
                stack.callback(block.register_forward_pre_hook(one_mask, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._entry(reference, windows), with_kwargs=True).remove)
            yield

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """A context in which passes of the low-precision model have block ``number`` in fp32."""
        block, reference = self.pairs[number]

        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return self._patched(reference, args[0], args, kwargs).to(output.dtype)

        with ExitStack() as stack:
            stack.callback(self.positions.clear)
            self._follow_positions(stack)
            stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _follow_positions(self, stack: ExitStack) -> None:
        for path, rotary in self.low.model.named_modules():  # that of a multimodal model is deeper inside
            if path.endswith("rotary_emb"):
                keep = partial(self._keep_positions, self.model.get_submodule(path))
                stack.callback(rotary.register_forward_hook(keep, with_kwargs=True).remove)

    def _patched(self, reference: nn.Module, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Result of the fp32 block ``reference`` for ``x``, with the other arguments of a low-precision block.

        A cache of keys and values is that of the low-precision pass, and must hold nothing of passes before.
        """
        if any(isinstance(each, Cache) and each.get_seq_length() > x.shape[1] for each in (*args, *kwargs.values())):
            raise ValueError("a patched pass needs all tokens at once, got a cache of earlier ones: give no cache")
        args = tuple(None if isinstance(each, Cache) else each for each in args)
        kwargs = {name: None if isinstance(each, Cache) else each for name, each in kwargs.items()}
        if "position_embeddings" in kwargs:
            kwargs = kwargs | {"position_embeddings": self.positions[id(kwargs["position_embeddings"])][1]}
        with self.low.paused():
            return reference(x.float(), *args[1:], **kwargs)

    def _keep_positions(self, twin: Any, rotary: nn.Module, args: Any, kwargs: dict[str, Any], output: object) -> None:
        """Compute rotary embeddings in fp32 for the fp32 blocks; each kind of layer has its own in Gemma 3."""
        with self.low.paused():
            exact = twin(args[0].float(), *args[1:], **kwargs)
        self.positions[id(output)] = output, exact  # what is kept has an id of its own

    def _entry(self, reference: nn.Module, windows: int) -> Callable[..., Tensor]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            patched = self._patched(reference, args[0][:windows], args, kwargs)
            self._share_bits(1)
            entered = torch.cat([output, patched.to(output.dtype)])  # the cast is a kernel of the format
            self._share_bits(len(entered) // windows)
            return entered

        return hook

    def _share_bits(self, variants: int) -> None:
        if self.low.emulation is not None and self.low.execution == "stochastic":
            self.low.emulation.copies = variants


def first_windows(windows: int, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The call of the first block with ``windows`` alone, which all variants begin with."""
    return (args[0][:windows], *args[1:])


def one_mask(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with the first window's mask for all variants. Without padding the masks of all windows are equal."""
    mask = kwargs.get("attention_mask")
    return args, kwargs if mask is None else kwargs | {"attention_mask": mask[:1]}


def patch_effects(patched: Tensor, reference: Tensor) -> pd.DataFrame:
    """Effects of patching block l on the mismatch of each window: tidy rows, one per window and block.

    ``patched`` (L + 1, B, T, d_model) are those of ``Patching``, ``reference`` (B, T, d_model) the fp32 hidden states.
    ``exact_reduction`` = ``base_mismatch`` - ``patched_mismatch`` (Section 6.3 (`subsec:e3`)).
    ``reduction_fraction`` is ``exact_reduction`` / ``base_mismatch``. An overflow gives nonfinite values.
    """
    base, *rest = mismatch(patched, reference).detach().cpu().double().numpy()  # (B,) each, one transfer
    places = pd.MultiIndex.from_product([range(len(base)), range(len(rest))], names=["window", "layer"])
    measured = {"base_mismatch": np.repeat(base, len(rest)), "patched_mismatch": np.stack(rest, 1).ravel()}
    effects = pd.DataFrame(measured, places).reset_index()
    reduction = effects.base_mismatch - effects.patched_mismatch
    return effects.assign(exact_reduction=reduction, reduction_fraction=reduction / effects.base_mismatch)


def patch(low: LowPrecision, model: PreTrainedModel, block: int) -> AbstractContextManager[None]:
    """A context in which block number ``block`` of ``low`` is that of the fp32 ``model``.

        with patch(low, model, block=3):
            logits = low(tokens).logits

    Raises IndexError for a block that is not there, TypeError for one that is no number, and the errors of
    ``Patching``.
    """
    patching = Patching(model, low)
    patching.require_evaluating()
    if not isinstance(block, int | np.integer):
        raise TypeError(f"a block is a number, 0 to {len(patching.pairs) - 1}, got {block!r:.40}")
    if not 0 <= block < len(patching.pairs):
        raise IndexError(f"block must be one of 0 to {len(patching.pairs) - 1}, got {block}")
    return patching.only(block)
