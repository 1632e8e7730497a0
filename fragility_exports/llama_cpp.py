"""Plans of GGUF's types for llama.cpp, as a file of rules for ``llama-quantize --tensor-type-file``."""

from collections.abc import Callable

from torch import nn

from fragility_exports.libraries import EXPORTS, Export, export, layers_of
from fragility_exports.plan import Plan
from fragility_quantization.gguf_mixes import ends
from fragility_quantization.gguf_tensors import stored_types
from fragility_quantization.recipes import Operands, get_recipe


class Rules(Export):
    """Rules of llama-quantize: ``config`` has the type of each tensor by its name."""

    def text(self) -> str:
        """One rule a line, a regular expression and a type; the first that fits is in force."""
        return "\n".join(f"^{name.replace('.', chr(92) + '.')}$={kind}" for name, kind in self.config.items())


def is_gguf(plan: Plan) -> bool:
    """True if the plan has types of GGUF, for all layers or for some."""
    return any(get_recipe(name).gguf for name in (plan.format, *(name for _, name in plan.layers)))


def llama_quantize(plan: Plan, model: nn.Module) -> Export:
    """``plan`` as rules for ``llama-quantize --tensor-type-file FILE model-f32.gguf made.gguf Q8_0``.

    The last argument, any quantized type, is for tensors without a rule: there are none. Raises the errors of
    ``stored_types``.
    """
    layers = dict.fromkeys(ends(model), Operands()) | layers_of(plan, model)
    kernels, cache = plan.recipe.kernels.name, plan.recipe.cache
    parts = {f"kernels in {kernels}, it computes in fp32": kernels != "fp32"}
    parts["another KV cache than the fp16 that llama.cpp starts with"] = cache is not None and cache.name != "fp16"
    missing = [f"llama-quantize cannot express {part}" for part, asked in parts.items() if asked]
    made = export(stored_types(model, layers, plan.recipe.kernels), missing, plan)
    return Rules(made.config, made.missing, made.dtype)


LIBRARIES: dict[str, Callable[[Plan, nn.Module], Export]] = {**EXPORTS, "llama-quantize": llama_quantize}


def libraries_for(plan: Plan) -> list[str]:
    """The libraries for which files lie beside a page: llama-quantize only for a plan of GGUF's types."""
    return [name for name in LIBRARIES if name in EXPORTS or is_gguf(plan)]
