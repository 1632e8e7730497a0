"""Whether the weights in files are those of the model that a configuration describes."""

import re

from transformers import PreTrainedModel


def require_described_weights(model: PreTrainedModel, name: str, info: dict) -> None:
    """Raises OSError where the checkpoint's weights are not those of ``model``; ``info`` is what loading it said."""

    def some(entries: list[str]) -> str:
        return f"{', '.join(entries[:5])}{' and others' if len(entries) > 5 else ''}"

    if shapes := [
        f"{key} {tuple(given)} for {tuple(wanted)}" for key, given, wanted in sorted(info["mismatched_keys"])
    ]:
        raise OSError(
            f"weights must have the shapes that the configuration says, but {name!r} has {some(shapes)}: take the "
            "configuration that was saved with them"
        )
    if missing := sorted(info["missing_keys"]):
        raise OSError(
            f"a checkpoint must hold all weights of its model, but {name!r} lacks {some(missing)}, which would be "
            "drawn at random: save the whole model"
        )
    kinds = tuple({re.sub(r"\d+", "*", path) for path, _ in model.named_parameters() if re.search(r"\.\d+\.", path)})
    if kinds and (extra := sorted(key for key in info["unexpected_keys"] if re.sub(r"\d+", "*", key).endswith(kinds))):
        raise OSError(
            f"a model must have all blocks of its checkpoint, but the configuration of {name!r} leaves out "
            f"{some(extra)}: take the configuration that was saved with them"
        )
