"""A page of one text, continued by any model in fp32 and in low precision (``make sentence``).

Low-precision passes are emulated, which rounds as the estimator does. So causes add up to the error of the same pass.
Without a model and a text, it computes the committed data of SmolLM2, which a browser shows without the model.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from fragility_adjoint.mixed_precision import apply
from fragility_core.models.padding import context_length
from fragility_lab import paths
from fragility_lab.explorer.continued import Version, continued
from fragility_lab.explorer.sentence import DATA, Sentence
from fragility_lab.inputs.checkpoints import load_model, load_tokenizer
from fragility_lab.inputs.fetched import MODELS, fetched
from fragility_lab.inputs.names import EMBEDDED
from fragility_lab.reporting.html import template
from fragility_lab.running.files import require_room, write_whole
from fragility_quantization.quantized import lower

PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived an old",
    "The best way to learn a language is to",
)
RECIPES = ("bf16", "fp8-dynamic", "w4a16-g128")
SHIPPED = "smollm2-135m"
COUNT = 40  # tokens that are written
EXPLAINED = 4  # changed tokens of a recipe
TRIED = 10  # parts that are kept, one at a time


def versions(model: PreTrainedModel, recipes: Sequence[str] = RECIPES, most: int = EXPLAINED) -> Iterator[Version]:
    """``model`` in each of ``recipes``, with causes for the first ``most`` words that it changes."""
    kept = partial(apply, model, execution="emulated")
    for name in recipes:
        yield Version(name, lower(model, name, "emulated"), kept, most, TRIED, apart=True)


def page(texts: Sequence[dict[str, Any]], model: str) -> str:
    """The page of ``texts`` by ``model`` as HTML."""
    return template("sentence/page.html.jinja").render(component=Sentence(texts, model).html, model=model)


def main(arguments: Sequence[str] | None = None) -> None:
    """Continue a text by a model in fp32 and in low precision, and write a page; or the shipped data again."""
    parser = argparse.ArgumentParser(prog="python -m fragility_explorer.continued", description=main.__doc__)
    parser.add_argument("--model", default=SHIPPED, help="one that make real fetches, a hub name or a path")
    parser.add_argument("--prompt", help="how the text begins")
    given = parser.parse_args(arguments)
    name = given.model if given.model in (*MODELS, EMBEDDED) else Path(given.model).name.removesuffix(".gguf")
    try:
        source = str(fetched(name)) if given.model in MODELS else given.model
        model, spell = load_model(source, "cpu", AutoModelForCausalLM), load_tokenizer(source)
        require_room(paths.OUTPUTS, "results", "free some, or mend the folder's rights", make=False)
        prompts = [given.prompt.encode().decode()] if given.prompt else PROMPTS  # no halves of characters
        tokens = [spell(prompt, return_tensors="pt").input_ids for prompt in prompts]
        longest, context = max(x.shape[1] for x in tokens) + COUNT, context_length(model.config)
        if longest > context:
            raise ValueError(f"prompt and {COUNT} tokens must fit the model's context, {context} tokens, got {longest}")
        texts = [
            {"prompt": prompt} | continued(model, lambda token: str(spell.decode([token])), ids, COUNT, versions(model))
            for prompt, ids in zip(prompts, tokens)
        ]
        if given.model == SHIPPED and not given.prompt:
            path, text = DATA, json.dumps({"model": name, "texts": texts}, ensure_ascii=False, indent=1) + "\n"
        else:
            path, text = paths.OUTPUTS / "sentence.html", page(texts, name)
        write_whole(path, text)
    except (ValueError, OSError) as refused:
        sys.exit(f"make sentence: {refused}")
    except KeyboardInterrupt:
        sys.exit("make sentence: interrupted before the page was written")
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
