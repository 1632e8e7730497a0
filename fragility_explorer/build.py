"""The page of ``make explorer``: the embedded checkpoint in bf16, and under schemes for its layers."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_adjoint.mixed_precision import Contributions, Plan, apply
from fragility_adjoint.mixed_precision.bits import Choices, fused_layers, predictions
from fragility_adjoint.predictor import Adjoint
from fragility_lab import paths
from fragility_lab.experiments.x2 import Evaluator
from fragility_lab.explorer import terms
from fragility_lab.explorer.component import Component
from fragility_lab.explorer.sentence import Sentence
from fragility_lab.inputs.checkpoints import EMBEDDED, load_model, load_tokenizer
from fragility_lab.inputs.text import load_rows, select_windows, tokenize
from fragility_lab.reporting.html import template
from fragility_lab.running.files import write_whole
from fragility_quantization.quantized import lower

WINDOWS, LENGTH, PROBES = 8, 128, 2
SCHEMES = ("w4a16-g128", "w8a16-g128", "bf16")
GRADIENTS = {"hidden": "low", "kl": "both"}  # as the diagnosis takes them, by target
MEASURED_BITS = (4.5, 6.0, 8.5, 12.0)


def embedded(windows: int = WINDOWS, length: int = LENGTH) -> tuple[PreTrainedModel, Tensor]:
    """The embedded checkpoint in fp32, with attention whose scores and softmax are kernels, and windows (B, T)."""
    model = load_model(EMBEDDED, "cpu", AutoModelForCausalLM)
    model.set_attn_implementation("eager")
    stream = tokenize(load_rows(EMBEDDED), load_tokenizer(EMBEDDED))
    return model, select_windows(stream, length, windows, seed=0)[1]


def plans_of(known: Contributions) -> Iterable[Plan]:
    """A handful of plans: nothing, the best blocks, sites and layers, and the worst choice of two blocks."""
    gains = known.gains("blocks").gain.to_numpy()
    yield known.keep()
    yield from (known.plan(count, "blocks") for count in (2, 4))
    yield known.keep(blocks=sorted(gains.argsort()[:2].tolist()))
    yield from (known.plan(count, "sites") for count in (1, 2))
    yield known.plan(12, "modules")


def keeping(model: PreTrainedModel, windows: Tensor, recipe: str = "bf16") -> dict:
    """The view of parts in fp32 beside ``recipe``, in the mismatch and in KL, with measured plans."""
    low = lower(model, recipe)
    predicted = (Adjoint(low, model, PROBES, target=x, gradients=at)(windows) for x, at in GRADIENTS.items())
    known = [Contributions(model, prediction) for prediction in predicted]
    evaluator = Evaluator(model, windows)
    plans = [(plan, terms.measured_means(evaluator.measure(apply(model, plan)))) for plan in plans_of(known[0])]
    return terms.keeping(known, plans)


def choosing(model: PreTrainedModel, windows: Tensor, schemes: Sequence[str] = SCHEMES) -> dict:
    """The view of ``schemes`` for layers in KL, with measured plans."""
    known = predictions(model, schemes, windows, probes=PROBES)
    choices = Choices(model, known, fused_layers(model, windows[:1]))
    evaluator, best = Evaluator(model, windows), [choices.within_bits(bits) for bits in MEASURED_BITS]
    found = (terms.measured_means(evaluator.measure(apply(model, choices.plan(choice)))) for choice in best)
    return terms.choosing(choices, [*zip(best, found)])


def page(component: Component, windows: int = WINDOWS, length: int = LENGTH) -> str:
    """The page with ``component`` as HTML."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return template("explorer/page.html.jinja").render(
        component=component.html,
        sentence=Sentence.shipped().html,
        windows=windows,
        length=length,
        made=f"Made by make explorer with {versions}.",
    )


def main() -> Path:
    """Write ``outputs/embedded/explorer.html`` and return its path."""
    paths.require_project()
    model, windows = embedded()
    path = paths.output_folder(EMBEDDED) / "explorer.html"
    write_whole(path, page(Component(keeping(model, windows), choosing(model, windows))))
    print(f"page: {path.relative_to(paths.PROJECT)}, {path.stat().st_size / 1e6:.2f} MB")
    return path


if __name__ == "__main__":
    main()
