"""One text, continued in fp32 and in low precision: which words change, by what errors, and what would keep them.

Low-precision passes are emulated, which rounds as the estimator does. So causes add up to the error of the same pass.

``make sentence`` computes the committed data of SmolLM2, which a browser shows without the model.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fragility_adjoint.mixed_precision import Contributions, apply
from fragility_adjoint.predictor import Adjoint, Prediction
from fragility_explorer.sentence import DATA, Sentence
from fragility_lab import paths
from fragility_lab.explorer.component import SITES
from fragility_lab.inputs.checkpoints import load_model, load_tokenizer
from fragility_lab.inputs.fetched import MODELS, fetched
from fragility_lab.inputs.names import EMBEDDED
from fragility_lab.reporting.html import template
from fragility_lab.running.environment import progress
from fragility_lab.running.files import write_whole
from fragility_numerics.lowering import LowPrecision
from fragility_quantization.quantized import lower
from fragility_quantization.recipes import get_recipe

PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived an old",
    "The best way to learn a language is to",
)
RECIPES = ("bf16", "fp8-dynamic", "w4a16-g128")
SHIPPED = "smollm2-135m"
COUNT = 40  # tokens that are written
EXPLAINED = 4  # changed tokens of a recipe
TRIED = 4  # blocks that are kept, one at a time
KINDS = {"embedding": "embedding", "head": "head"} | SITES
KEPT = {
    "norms": "all norms", "residual": "the residual stream", "mlp": "all MLPs", "attention": "all attentions",
    "scores": "all attention scores", "head": "the head",
}  # fmt: skip


@torch.no_grad()
def next_token(model: PreTrainedModel, text: Tensor, low: LowPrecision | None = None) -> int:
    """The most probable token after ``text`` (1, T); in ``low`` if given.

    The whole text is computed each time. A cache would make other sums of the same numbers, which round otherwise.
    """
    with nullcontext() if low is None else low.running():
        return int((model if low is None else low.model)(text, use_cache=False).logits[0, -1].argmax())


def written(model: PreTrainedModel, prompt: Tensor, count: int, low: LowPrecision | None = None) -> Tensor:
    """The ``prompt`` (1, T) and ``count`` tokens after it, each the most probable one."""
    text = prompt
    for _ in progress(range(count), desc="tokens"):
        text = torch.cat([text, text.new_tensor([[next_token(model, text, low)]])], 1)
    return text


class Lead:
    """The lead of token ``first`` over token ``second`` after the last token: the difference of their logits."""

    def __init__(self, first: int, second: int):
        self.pair = [first, second]

    def __call__(self, model: nn.Module, text: Tensor) -> Tensor:
        """The lead (1, 1, 1)."""
        logits = model(text, use_cache=False).logits[:, -1:, :].float()
        first, second = (logits[..., token] for token in self.pair)
        return (first - second)[..., None]


def shares(prediction: Prediction, error: float) -> dict[str, list[dict[str, Any]]]:
    """What each block and each kind of kernel adds to the ``error`` of a lead, signed, in logits.

    With secant slopes the contributions add up to the error, up to the sign of the one probe.
    """
    rows = prediction.contributions
    sign = 1.0 if rows.signed.sum() * error >= 0 else -1.0
    row = rows.layer.astype("string").fillna(rows.site.where(rows.site.isin(["embedding", "norm"]), "head"))
    parts = {"blocks": rows.assign(part=row.replace("norm", "head")), "kinds": rows.assign(part=rows.site.map(KINDS))}
    return {
        name: [
            {"name": str(part), "adds": round(sign * float(value), 5)}
            for part, value in table.groupby("part", sort=False).signed.sum().items()
        ]
        for name, table in parts.items()
    }


def savers(model: PreTrainedModel, known: Contributions, text: Tensor, wanted: int, blocks: Iterable[int]) -> list[str]:
    """Parts that are enough to keep in fp32, one at a time, for the token ``wanted`` after ``text``: each was run."""
    sites = [site for site in known.structure.sites if site not in ("embedding", "router")]
    plans = [(f"block {number}", known.keep(blocks=[number])) for number in blocks]
    plans += [(KEPT.get(site, site), known.keep(sites=[site])) for site in sites]
    return [name for name, plan in plans if next_token(model, text, apply(model, plan, "emulated")) == wanted]


def explained(model: PreTrainedModel, low: LowPrecision, text: Tensor, wanted: int, said: int) -> dict[str, Any]:
    """Why ``low`` says the token ``said`` after ``text`` (1, T) where fp32 says ``wanted``."""
    lead = Lead(wanted, said)
    with torch.no_grad():
        exact = float(lead(model, text))
        with low.running():
            left = float(lead(low.model, text))
    prediction = Adjoint(low, model, target=lead, gradients="secant")(text)
    found = shares(prediction, exact - left)
    against = sorted((row for row in found["blocks"] if row["name"].isdigit()), key=lambda row: -row["adds"])
    blocks = [int(row["name"]) for row in against[:TRIED]]
    saved = savers(model, Contributions(model, prediction), text, wanted, blocks)
    return {"fp32": round(exact, 4), "low": round(left, 4), **found, "saved": saved}


def continued(
    model: PreTrainedModel, spell: PreTrainedTokenizerBase, prompt: Tensor, recipes: Sequence[str], count: int = COUNT,
    most: int = EXPLAINED,
) -> dict[str, Any]:  # fmt: skip
    """The text that ``model`` writes after ``prompt`` (1, T) in fp32 and by each of ``recipes``, as plain data.

    ``changed`` has every word of the fp32 text in whose place a recipe would have said another one, the first ``most``
    of them with their causes.
    """
    start = prompt.shape[1]

    def words(text: Tensor) -> list[str]:
        return [str(spell.decode([token])) for token in text[0, start:].tolist()]

    exact = written(model, prompt, count)
    told = []
    for name in recipes:
        low = lower(model, get_recipe(name), "emulated")
        said = [next_token(model, exact[:, :end], low) for end in range(start, start + count)]
        changed = [place for place, token in enumerate(said) if token != exact[0, start + place]]
        rows: list[dict[str, Any]] = [{"word": place, "said": spell.decode([said[place]])} for place in changed]
        for row in progress(rows[:most], desc=f"changed words in {name}"):
            end = start + row["word"]
            row |= explained(model, low, exact[:, :end], int(exact[0, end]), said[row["word"]])
        told.append({"name": name, "words": words(written(model, prompt, count, low)), "changed": rows})
    return {"prompt": spell.decode(prompt[0], skip_special_tokens=True), "words": words(exact), "recipes": told}


def page(texts: Sequence[dict[str, Any]], model: str) -> str:
    """The page of ``texts`` by ``model`` as HTML."""
    return template("sentence/page.html.jinja").render(component=Sentence(texts, model).html, model=model)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Continue a text by a model in fp32 and in low precision, and write a page; or the shipped data again."""
    parser = argparse.ArgumentParser(prog="python -m fragility_explorer.continued", description=main.__doc__)
    parser.add_argument("--model", default=SHIPPED, help="one that make real fetches, a hub name or a path")
    parser.add_argument("--prompt", help="how the text begins")
    given = parser.parse_args(arguments)
    name = given.model if given.model in (*MODELS, EMBEDDED) else Path(given.model).stem
    try:
        source = str(fetched(name)) if given.model in MODELS else given.model
        model, spell = load_model(source, "cpu", AutoModelForCausalLM), load_tokenizer(source)
        prompts = [
            spell(prompt, return_tensors="pt").input_ids for prompt in ([given.prompt] if given.prompt else PROMPTS)
        ]
    except (ValueError, OSError) as refused:
        sys.exit(f"make sentence: {refused}")
    texts = [continued(model, spell, prompt, RECIPES) for prompt in prompts]
    if given.model == SHIPPED and not given.prompt:
        path, text = DATA, json.dumps({"model": name, "texts": texts}, ensure_ascii=False, indent=1) + "\n"
    else:
        path, text = paths.OUTPUTS / "sentence.html", page(texts, name)
    write_whole(path, text)
    print(f"written: {os.path.relpath(path)}")
    return path


if __name__ == "__main__":
    main()
