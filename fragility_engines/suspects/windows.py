"""Suspects of a sliding window of attention."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from fragility_core.models.paths import attention_modules
from fragility_engines.suspects.suspect import Suspect

CUTS = (4096, 2048, 1024, 512, 256, 128)  # tokens that engines keep of a longer prompt, and windows of attention


def kinds(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The attention modules of ``model``, each with its type of layer as the configuration says it.

    In some models other layers lie between those with attention, so that a module's own number counts.
    """
    config, modules = model.config.get_text_config(), attention_modules(model)
    usual = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    types = dict(enumerate(getattr(config, "layer_types", None) or []))
    return [(module, types.get(getattr(module, "layer_idx", place), usual)) for place, module in enumerate(modules)]


def fully_attending(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of ``model`` that see all tokens before their own."""
    return [module for module, kind in kinds(model) if kind == "full_attention"]


def windows(model: PreTrainedModel, longest: int) -> Iterator[Suspect]:
    """Suspects of a sliding window of attention, for models whose configuration knows one."""
    config = model.config.get_text_config()
    if not hasattr(config, "sliding_window"):
        return
    own, look = config.sliding_window, "sliding_window and layer_types of the engine's configuration"
    sliding = [module for module, kind in kinds(model) if own and kind == "sliding_attention"]
    full = fully_attending(model)
    if sliding and own < longest:
        yield Suspect(f"full attention in place of a window of {own}", look, partial(seeing, sliding, 0))
    for size in [own] if own else CUTS:
        if full and size < longest:
            yield Suspect(f"a window of {size} in place of full attention", look, partial(seeing, full, size))


@contextmanager
def seeing(modules: Sequence[nn.Module], size: int, model: nn.Module) -> Iterator[None]:
    """A context in which the attention ``modules`` see ``size`` tokens, themselves among them; 0 stands for all."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if "attention_mask" not in kwargs:
            return None
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        places = torch.arange(x.shape[1], device=x.device)
        back = places[:, None] - places
        unseen = (back < 0) | (back >= (size or len(places)))
        mask = torch.zeros(unseen.shape, dtype=x.dtype, device=x.device)
        return args, kwargs | {"attention_mask": mask.masked_fill(unseen, torch.finfo(x.dtype).min)[None, None]}

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
