"""The price of a plan, from the parameters and the configuration of the model."""

from collections.abc import Collection

from torch import nn
from transformers import PreTrainedConfig

from fragility_core.arithmetic.formats import Format
from fragility_core.arithmetic.operands import linear_weights
from fragility_core.models.tree import block_of, within
from fragility_core.protection.structure import ATTENTION, Structure

FP32_BYTES = 4


def parameter_bytes(model: nn.Module, kept: Collection[str], format: Format) -> int:
    """Bytes that are added to the low-precision model if the parameters of the modules ``kept`` are stored in fp32.

    If a module outside of ``kept`` shares a parameter (a tied head), the parameter is stored twice.
    """
    multiplied = {id(p) for p in linear_weights(model).values()} if format.operands else set()
    uses: dict[int, tuple[int, set[bool]]] = {}
    for path, module in model.named_modules():
        inside = any(within(path, module_path) for module_path in kept)
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), (parameter.numel(), set()))[1].add(inside)

    def low_bytes(parameter: int) -> int:
        return (format.operands if parameter in multiplied else format).storage.itemsize

    return sum(n * (FP32_BYTES - low_bytes(p) * (where == {True})) for p, (n, where) in uses.items() if True in where)


def product_weights(module: nn.Module) -> int:
    """The number of entries of the matrices that ``module`` multiplies by; in a mixture, of all experts."""
    owners = (m for m in module.modules() if not isinstance(m, nn.Embedding))
    return sum(p.numel() for m in owners for p in m.parameters(recurse=False) if p.ndim >= 2)


def flops(structure: Structure, kept: Collection[str], scores: bool, length: int) -> int:
    """Floating-point operations per token that move from the format to fp32, at windows of ``length`` tokens T.

    A matrix of n entries counts 2 n. An attention branch that is kept counts 4 T d more, for query times key and for
    probabilities times value, d the width of all heads together. For ``scores`` each other branch counts 2 T d.
    Masked scores count, elementwise kernels do not.
    """
    weights = sum(product_weights(structure.model.get_submodule(path)) for path in kept)
    attending = structure.places[structure.places.site.isin(ATTENTION)].module.map(block_of)
    layers = {f"{path}.{branch}" for path, _, branch in attending if branch}
    inside = sum(any(within(layer, path) for path in kept) for layer in layers)
    others = (len(layers) - inside) * scores
    return 2 * weights + (4 * inside + 2 * others) * length * heads_width(structure.model)


def heads_width(model: nn.Module) -> int:
    """The width of the queries of all heads together; 0 if no configuration gives it."""
    config = text_config(model)
    width, heads = (getattr(config, name, 0) or 0 for name in ("hidden_size", "num_attention_heads"))
    return heads * (getattr(config, "head_dim", None) or width // max(heads, 1))


def stream_width(model: nn.Module) -> int:
    """d_model; 0 if no configuration gives it."""
    return getattr(text_config(model), "hidden_size", 0) or 0


def text_config(model: nn.Module) -> PreTrainedConfig | None:
    """The configuration for text, of the model or of one inside it; None if there is none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = next((config for config in configs if isinstance(config, PreTrainedConfig)), None)
    return None if found is None else found.get_text_config()
