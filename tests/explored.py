"""A small model under the explorer, for its tests: contributions, choices, and the views of both."""

from functools import cache

from tiny import TINY, random_gpt2, random_tokens

from fragility_adjoint.mixed_precision import Contributions
from fragility_adjoint.mixed_precision.bits import Choices, fused_layers, predictions
from fragility_adjoint.predictor import Adjoint
from fragility_lab.explorer import terms
from fragility_quantization.quantized import lower


@cache
def model_and_windows():
    model = random_gpt2(TINY)
    model.set_attn_implementation("eager")
    return model, random_tokens(3, 40)


@cache
def contributions() -> tuple[Contributions, Contributions]:
    """In the mismatch and in KL, in bf16."""
    model, windows = model_and_windows()
    low = lower(model, "bf16")
    hidden = Adjoint(low, model, 2, gradients="low")(windows)
    kl = Adjoint(low, model, 2, target="kl", gradients="both")(windows)
    return Contributions(model, hidden), Contributions(model, kl)


@cache
def choices() -> Choices:
    """Among three schemes, in KL."""
    model, windows = model_and_windows()
    return Choices(model, predictions(model, ["w4a16-g32", "w8a16-g32", "bf16"], windows), fused_layers(model, windows))


@cache
def views() -> tuple[dict, dict]:
    """Of parts in fp32, and of schemes, each with measured plans (of made-up values)."""
    known, some = contributions(), choices()
    plans = [(known[0].plan(count, "blocks"), {"hidden": 0.01 * (1 + count), "kl": 1e-3}) for count in (0, 1)]
    return terms.keeping(known, plans), terms.choosing(some, [(some.within_bits(6.0), {"kl": 0.01})])
