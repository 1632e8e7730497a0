"""A model whose weights somebody else has rounded, and the fp32 model that it was made from."""

import torch
from transformers import PreTrainedModel

from fragility_lab.inputs import checkpoints
from fragility_lab.inputs.offloaded import load_beside, on_meta
from fragility_numerics.presence import entries


def require_same_architecture(model: str, reference: str) -> None:
    """Raises ValueError unless the models of these names have the same parameters, and tokenizers with the same tokens.

    No weights are read. Raises the errors of ``inputs.checkpoints.load_config``.
    """
    models = [on_meta(name) for name in (model, reference)]
    shapes = [{path: tuple(p.shape) for path, p in made.named_parameters()} for made in models]
    if differing := sorted({*shapes[0].items()} ^ {*shapes[1].items()}):
        path = differing[0][0]
        found = " and ".join(str(known.get(path, "no such parameter")) for known in shapes)
        raise ValueError(
            "REFERENCE_MODEL= must be the model before its weights were rounded, of the same shapes, but "
            f"{path} has {found} in {model!r} and {reference!r}"
        )
    require_same_tokens(model, reference)


def require_same_tokens(model: str, reference: str) -> None:
    """Raises ValueError if a number means one token to the tokenizer of ``model`` and another to that of ``reference``.

    Special tokens are left aside, since a later training may name them. A model may come without a tokenizer: that of
    ``reference`` makes the windows.
    """
    theirs = checkpoints.load_tokenizer(reference)
    try:
        ours = checkpoints.load_tokenizer(model)
    except (OSError, ValueError):
        return
    tokens = [{number: token for token, number in made.get_vocab().items()} for made in (ours, theirs)]
    aside = {*ours.added_tokens_decoder, *theirs.added_tokens_decoder}
    shared = (tokens[0].keys() & tokens[1].keys()) - aside
    if differing := sorted(number for number in shared if tokens[0][number] != tokens[1][number]):
        first = differing[0]
        raise ValueError(
            "REFERENCE_MODEL= must have the tokenizer of MODEL=, but "
            f"token {first} is {tokens[0][first]!r} in {model!r} and {tokens[1][first]!r} in {reference!r}, and "
            f"{len(differing)} of {len(shared)} tokens differ: take the original that the model was made from"
        )


def load_rounded(name: str, original: PreTrainedModel) -> PreTrainedModel:
    """The model ``name`` by ``load_beside``; raises its errors, and ValueError for the weights of ``original``."""
    rounded = load_beside(original, name)
    own, others = (dict(model.named_parameters(remove_duplicate=False)) for model in (rounded, original))
    if all(torch.equal(entries(own[path]), entries(other)) for path, other in others.items()):  # one may be tied
        raise ValueError(
            f"MODEL= must have other weights than REFERENCE_MODEL=, got the same ones in {name!r}, bit for bit: "
            "nothing was rounded between them"
        )
    return rounded
