"""A check that the weights in files are those of the model that a configuration describes."""

from collections.abc import Iterable

from transformers import PreTrainedModel

from fragility_lab.inputs.stored import BUFFERS


def require_described_weights(model: PreTrainedModel, name: str, info: dict) -> None:
    """Raises OSError if the checkpoint's weights are not those of ``model``; ``info`` is the report of loading it."""

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
    if extra := unread(model, info["unexpected_keys"]):
        raise OSError(
            f"all weights of a checkpoint must be read, but the model that the configuration of {name!r} describes "
            f"leaves out {some(extra)}: take the configuration that was saved with them"
        )


def unread(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The tensors among ``names`` that lie within a part of ``model``, such as a block, but do not belong to the model.

    Tensors beside these parts, such as the head of a model that is loaded without one, do not count.
    """
    modules, prefix = {path for path, _ in model.named_modules()}, model.base_model_prefix
    outer = {"", prefix}

    def inside(name: str) -> bool:
        paths = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
        around = (".".join(path.split(".")[:depth]) for path in paths for depth in range(1, path.count(".") + 1))
        return any(module in modules - outer for module in around)

    return sorted(name for name in names if inside(name) and not BUFFERS.fullmatch(name))
