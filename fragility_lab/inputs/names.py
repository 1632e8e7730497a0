"""Names of models: embedded checkpoints, folders, files and repositories of a hub. Imports nothing heavy."""

import os
import re
import reprlib
from pathlib import Path

from fragility_lab.paths import CHECKPOINTS

PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"(\xb5/\xfd", b"BZh", b"\xfd7zXZ")  # how gzip, zip, zstd, bzip2, xz begin
EMBEDDED = "embedded"  # the default; "embedded-llama" is another family, with the same tokenizer and text
TITLES = {EMBEDDED: "the embedded GPT-2", "embedded-llama": "the embedded Llama"}
NEEDED = {
    "model": "a local copy of a decoder saved as safetensors (save_pretrained), or a GGUF file",
    "tokenizer": "a folder that holds the model's tokenizer too (tokenizer.save_pretrained)",
    "text": "a local copy",
}


class HubError(OSError):
    """The hub, or what it sent, cannot be used; the message says why."""


def shortened(text: str) -> str:
    """``text`` in quotes, without its middle where it is long."""
    brief = reprlib.Repr()
    brief.maxstring = 120
    return brief.repr(text)


def local(name: str, kind: str = "model") -> Path | None:
    """The folder or file of the model ``name`` on this machine: an embedded checkpoint's, or ``name`` itself.

    None for the name of a hub's repository. Raises OSError, which says how to go on, if a path leads nowhere.
    """
    known = embedded_checkpoints()
    if name in known:
        return CHECKPOINTS / name
    if os.path.exists(name):
        return Path(name)
    if is_local(name):
        said = f"there is no such folder or file, and the embedded checkpoints are {', '.join(known)}"
        raise not_found(kind, name, FileNotFoundError(said))
    return None


def named_as_path(name: str) -> bool:
    """True if ``name`` cannot be that of a hub's repository, "name" or "owner/name"."""
    return re.fullmatch(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?", name) is None or len(name) > 96


def is_local(name: str) -> bool:
    """True if ``name`` is that of a folder or file, which need not be there."""
    file = name.lower().endswith(".gguf")
    return os.path.exists(name) or name.startswith(EMBEDDED) or file or named_as_path(name)


def titled(name: str) -> str:
    """The model ``name`` as a title has it: a folder or file by its own name, without the way to it."""
    path = Path(os.path.abspath(name))
    if path.suffix.lower() == ".gguf":
        return f"{path.stem} (GGUF file)"
    return TITLES.get(name, path.name if is_local(name) else name)


def embedded_checkpoints() -> list[str]:
    """The names of the checkpoints that ship with the project."""
    return sorted(folder.name for folder in CHECKPOINTS.iterdir())


def not_found(kind: str, name: str, cause: Exception) -> OSError:
    """One error for all that keep a model or text from being loaded; its message says how to go on."""
    where = "the folder" if is_local(name) else "the model hub and this machine's cache"
    words = " ".join(str(cause).split()) or "no message"
    reason = words if isinstance(cause, HubError) else f"{type(cause).__name__}: {words}"
    variable = "DATA" if kind == "text" else "MODEL"
    return OSError(
        f"cannot load the {kind} {shortened(name)} from {where} ({reason}). "
        f"Point {variable}= at {NEEDED[kind]} ({variable}=path/to/copy after `make reproduce` or `make diagnose`), "
        f"or leave {variable} unset: both then run on the embedded default, without a network."
    )


class Wanted:
    """A context in which errors mean that the model or text ``name`` cannot be had: they become ``not_found``.

    By default all errors do, since damaged files make transformers and datasets raise a dozen unrelated types.
    """

    def __init__(self, kind: str, name: str, *errors: type[Exception]):
        self.kind, self.name, self.errors = kind, name, errors or Exception

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type, cause, _trace) -> None:
        if isinstance(cause, self.errors):
            raise not_found(self.kind, self.name, cause) from cause
