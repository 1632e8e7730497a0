"""How each kind of bad input of ``data/bad_inputs.yaml`` reaches the code that must refuse it, without a kernel."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fragility_adjoint import mixed_precision
from fragility_core import bgss
from fragility_lab import paths
from fragility_lab.diagnosis import __main__ as make_diagnose
from fragility_lab.experiments import e1, e2, e3, e5, outcomes, verify, x1, x1_plans
from fragility_lab.inputs import loading, text
from fragility_lab.paths import CHECKPOINTS
from fragility_lab.reporting import reruns
from fragility_lab.running import execute
from fragility_numerics import formats
from fragility_peers import rivals
from fragility_pretraining import train
from fragility_quantization import recipes, schemes

GRID = {"model": "embedded", "data": "embedded", "precisions": ("bf16",), "lengths": (64,), "seeds": (0,), "windows": 4}
NAMES = {
    "bgss": bgss, "mixed_precision": mixed_precision, "formats": formats, "recipes": recipes, "schemes": schemes,
    "e1": e1, "e2": e2, "e3": e3, "e5": e5, "outcomes": outcomes, "x1": x1, "x1_plans": x1_plans, "reruns": reruns,
    "execute": execute, "rivals": rivals, "train": train, "verify": verify,
    "run": e2.RunSpec("m", "d", "bf16", 64, 0, 4, 1, "cpu", "native"),
}  # fmt: skip


def diagnose(folder: Path, **values: str) -> None:
    """``make diagnose NAME=value``."""
    make_diagnose.main(["--check", *(f"{name.upper()}={value}" for name, value in values.items())])


def parameters(folder: Path, notebook: str = "e2_predictor", profile: str = "smoke", given: tuple[str, ...] = ()):
    """``python -m fragility_lab.running.execute NOTEBOOK --profile PROFILE -p GIVEN``."""
    execute.parameters(notebook, profile, given)


def profile(folder: Path, content: str) -> None:
    """A profile of one's own whose file for E2 has this ``content``."""
    (folder / "mine").mkdir()
    (folder / "mine" / "e2_predictor.yaml").write_text(content)
    before, paths.PROFILES = paths.PROFILES, folder
    try:
        execute.parameters("e2_predictor", "mine", ())
    finally:
        paths.PROFILES = before


def grid(folder: Path, **changed) -> None:
    """E2's notebook with other parameters."""
    chosen = e2.Grid(**GRID | {name: tuple(v) if isinstance(v, list) else v for name, v in changed.items()})
    e2.specifications(chosen, e2.load_inputs(chosen))


def file(folder: Path, name: str, content: str = "", encoding: str = "utf-8", nested: int = 0) -> None:
    """A text file of one's own as DATA=; "…" in ``content`` stands for ``nested`` lists, one in the other."""
    content = content.replace("…", "[" * nested + "]" * nested)
    (folder / name).write_bytes(content.encode(encoding))
    text.load_rows(str(folder / name))


def data(folder: Path, name: str) -> None:
    """DATA= as it is given."""
    text.load_rows(name)


def model(folder: Path, name: str) -> None:
    """MODEL= as it is given."""
    loading.load(name, "embedded", [64], 4)


def config(folder: Path, **changed) -> None:
    """A copy of the embedded checkpoint whose configuration was ``changed``; None removes an entry."""
    path = _copied(folder) / "config.json"
    entries = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))
    loading.load(str(path.parent), "embedded", [64], 4)


def damaged(folder: Path, how: str) -> None:
    """A copy of the embedded checkpoint, damaged by the function ``how`` of ``DAMAGES``."""
    copy = _copied(folder)
    DAMAGES[how](copy)
    loading.load(str(copy), "embedded", [64], 4)


def call(folder: Path, code: str) -> None:
    """A call of the library, with the modules of ``NAMES``."""
    eval(code, NAMES)


def _copied(folder: Path) -> Path:
    copy = folder / "model"
    copy.mkdir()
    for source in (CHECKPOINTS / "embedded").iterdir():
        if source.suffix == ".safetensors":
            (copy / source.name).symlink_to(source)  # 12 MB; whoever changes it makes a file of its own
        else:
            shutil.copy(source, copy)
    return copy


def _weights(copy: Path) -> Path:
    return copy / "model.safetensors"


def _rewritten(change: Callable) -> Callable[[Path], None]:
    """A damage that changes the dictionary of weights."""

    def damage(copy: Path) -> None:
        tensors = load_file(_weights(copy))
        change(tensors)
        _weights(copy).unlink()
        save_file(tensors, _weights(copy), {"format": "pt"})

    return damage


def _replaced(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(copy: Path) -> None:
        (copy / name).unlink(missing_ok=True)
        (copy / name).write_bytes(content)

    return damage


def _sharded(index: dict) -> Callable[[Path], None]:
    def damage(copy: Path) -> None:
        _weights(copy).unlink()
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def _without(*names: str) -> Callable[[Path], None]:
    return lambda copy: [(copy / name).unlink() for name in names]


def _first_half(copy: Path) -> None:
    content = _weights(copy).read_bytes()
    _replaced("model.safetensors", content[: len(content) // 2])(copy)


def _pickled(copy: Path) -> None:
    _weights(copy).unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _adapter_alone(copy: Path) -> None:
    _without("config.json")(copy)
    _weights(copy).rename(copy / "adapter_model.safetensors")


SCALED = "transformer.h.0.mlp.c_fc"  # the first linear layer that widens


def _stored_in(dtype: torch.dtype) -> Callable[[Path], None]:
    return _rewritten(lambda tensors: tensors.update({f"{SCALED}.weight": tensors[f"{SCALED}.weight"].to(dtype)}))


def _beside(name: str) -> Callable[[Path], None]:
    return _rewritten(lambda tensors: tensors.update({f"{SCALED}.{name}": torch.ones(1)}))


def _cut_shard(copy: Path) -> None:
    tensors = load_file(_weights(copy))
    _weights(copy).unlink()
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for part, name in enumerate(names):
        save_file(dict(sorted(tensors.items())[part::2]), copy / name, {"format": "pt"})
    (copy / names[1]).write_bytes((copy / names[1]).read_bytes()[:-100])
    index = {key: names[number % 2] for number, key in enumerate(sorted(tensors))}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _only_gguf(copy: Path) -> None:
    (copy / "config.json").unlink()
    (copy / "small.gguf").write_bytes(b"GGUF")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "weights cut in half": _first_half,
    "weights of no bytes": _replaced("model.safetensors", b""),
    "weights that are text": _replaced("model.safetensors", b"these are no weights"),
    "weights in a pickle": _pickled,
    "no weights": _without("model.safetensors"),
    "no configuration": _without("config.json"),
    "a configuration that is no JSON": _replaced("config.json", b"{"),
    "a configuration that is a list": _replaced("config.json", b"[]"),
    "an empty configuration": _replaced("config.json", b""),
    "no tokenizer": _without("tokenizer.json", "tokenizer_config.json"),
    "a tokenizer that is no JSON": _replaced("tokenizer.json", b"{"),
    "an index that names files elsewhere": _sharded(
        {"metadata": {}, "weight_map": {"transformer.wte.weight": "../../../../etc/passwd"}}
    ),
    "an index that names a missing file": _sharded(
        {"metadata": {}, "weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    ),
    "an index without a map": _sharded({"metadata": {}}),
    "weights in fp8": _stored_in(torch.float8_e4m3fn),
    "weights in int8": _stored_in(torch.int8),
    "weights packed in uint8": _stored_in(torch.uint8),
    "weights packed in int32": _stored_in(torch.int32),
    "a scale that nothing reads": _beside("weight_scale"),
    "a scale of blocks that nothing reads": _beside("weight_scale_inv"),
    "a zero point that nothing reads": _beside("weight_zero_point"),
    "scales of groups that nothing reads": _beside("scales"),
    "the range of inputs that nothing reads": _beside("input_scale"),
    "a tensor of an unknown name beside a weight": _beside("multiplier"),
    "a shard that is cut off": _cut_shard,
    "a header that is damaged": _replaced("model.safetensors", (8).to_bytes(8, "little") + b"{broken}"),
    "a GGUF file in a folder": _only_gguf,
    "an adapter alone": _adapter_alone,
    "an adapter beside the model": _replaced("adapter_model.safetensors", b""),
    "a weight that is not finite": _rewritten(lambda tensors: next(iter(tensors.values())).fill_(float("nan"))),
    "a missing weight": _rewritten(lambda tensors: tensors.pop("transformer.h.0.mlp.c_fc.weight", None)),
    "a weight of another shape": _rewritten(
        lambda tensors: tensors.update(
            {"transformer.h.0.ln_1.weight": tensors["transformer.h.0.ln_1.weight"][:-1].clone()}
        )
    ),
}
KINDS = {
    function.__name__: function
    for function in (diagnose, parameters, profile, grid, file, data, model, config, damaged, call)
}
