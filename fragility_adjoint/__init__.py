"""Beyond the paper: what every rounding of a pass contributes to its error, as a number, and plans made from that.

The names that most people need, for a Hugging Face ``model`` in fp32 and ``tokens`` (B, T) of token ids::

    from fragility_adjoint import predict
    errors = predict(model, tokens, "w4a16-g128", target="kl")  # errors.by("layer"), .by("site"), .plot()
    plan = errors.plan("5 bits")
    five = plan.apply()  # and plan.export("compressed-tensors", path)

    from fragility_adjoint import RECIPES, Adjoint, lower
    low = lower(model, "w8a8-int8")  # any recipe of RECIPES; formats of fragility_core are recipes, too
    known = Adjoint(low, model, probes=2)(tokens)  # known.windows.predicted, known.contributions

    from fragility_adjoint import Contributions, Plan, apply
    plan = Contributions(model, Adjoint(lower(model, "bf16"))(tokens)).plan(1, "blocks")  # which block to keep in fp32
    protected = apply(model, plan)
    wide = apply(model, Plan("bf16", residual=True))  # a plan of one's own: an fp32 residual stream

    from fragility_adjoint import Choices, fused_layers, predictions
    recipes = ["w4a16-g128", "w8a16-g128", "bf16"]
    choices = Choices(model, predictions(model, recipes, tokens), fused_layers(model, tokens))
    quantized = apply(model, choices.plan(choices.within_bits(6.0)))  # the least KL at 6 bits a weight on average

``predictor`` estimates; ``explain`` says why errors add up and what they change; ``mixed_precision`` makes plans, and
writes them for other libraries. ``fragility_quantization`` has recipes, ``fragility_offload`` is for models larger than
memory. The package imports fragility_core, never the other way round. Each name is looked up when it is first used.
"""

from fragility_core import lazily

_NAMES = {
    "fragility_quantization.recipes": ("RECIPES",),
    "fragility_quantization.quantized": ("lower",),
    "fragility_adjoint.predictor": ("Adjoint",),
    "fragility_adjoint.mixed_precision": ("Contributions", "Plan", "apply"),
    "fragility_adjoint.mixed_precision.errors": ("predict",),
    "fragility_adjoint.mixed_precision.bits": ("Choices", "fused_layers", "predictions"),
}
__all__, __getattr__, __dir__ = lazily(__name__, _NAMES)
