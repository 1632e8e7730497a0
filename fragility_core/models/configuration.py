"""What a model's configuration says of text, wherever it lies in a multimodal one."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig


def heads_width(config: Any, number: int) -> int:
    """The width of all attention heads together in the layer of this ``number``; 0 if ``config`` does not give it."""
    layer = config.per_layer_config[number] if getattr(config, "is_heterogeneous", False) else config
    width, heads = (getattr(layer, name, 0) or 0 for name in ("hidden_size", "num_attention_heads"))
    return heads * (getattr(layer, "head_dim", None) or width // max(heads, 1))


def text_config(model: nn.Module) -> PreTrainedConfig | None:
    """The configuration for text, of the model or of one inside it; None if there is none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = next((config for config in configs if isinstance(config, PreTrainedConfig)), None)
    return None if found is None else found.get_text_config()
