"""Documentation found in a Python environment, as text to train on and to evaluate on.

A *document* is the documentation of one source file, in source order. It consists of docstrings, long comments and long
string constants, which also hold the help of C extensions. No file is imported or executed.

``python -m fragility_pretraining.corpus`` freezes the two embedded texts. The committed ones were made once, with
the CPython named in assets/README.md. Another CPython gives other texts.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from fragility_lab.paths import EVALUATION_TEXT, TRAINING_TEXT
from fragility_lab.running.files import write_whole

TRAINING_CHARACTERS = 900_000  # of the frozen text: more than 150,000 tokens of the embedded tokenizer
STANDARD_LIBRARY = "stdlib"
SHORTEST_DOCSTRING = 40  # characters; a shorter docstring repeats the name it documents
SHORTEST_COMMENT = 200  # characters; a longer comment block is prose
SHINGLE = 20  # words; two texts that share a sequence of so many words share a passage


@dataclass(frozen=True)
class Document:
    """The documentation of one source file."""

    source: str
    text: str


def strings(tree: ast.AST) -> Iterator[str]:
    """Docstrings and multi-line string constants of a syntax tree, in source order."""
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in sorted(constants, key=lambda node: (node.lineno, node.col_offset)):
        text = str(node.value)
        if len(text) >= SHORTEST_DOCSTRING and (node in docstrings or text.count("\n") > 3):
            yield inspect.cleandoc(text)


def comments(source: str) -> Iterator[str]:
    """Long blocks of whole-line comments, without their ``#``."""
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            block.append(token.string.lstrip("#").strip())
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and block:
            text = "\n".join(block).strip()
            if len(text) >= SHORTEST_COMMENT and sum(c.isalpha() or c.isspace() for c in text) > 0.8 * len(text):
                yield text
            block = []


def read_document(path: Path, source: str) -> Document | None:
    """The documentation of the file at ``path``; None if there is none or the file is not Python 3."""
    try:
        code = path.read_text(encoding="utf-8")
        parts = [*strings(ast.parse(code)), *comments(code)]
    except (SyntaxError, UnicodeDecodeError, ValueError, tokenize.TokenError):
        return None  # test data of the standard library holds deliberately broken files
    return Document(source, "\n\n".join(parts)) if parts else None


def source_files(package: str) -> Iterator[tuple[Path, str]]:
    """Every Python file of an installed package, with its name relative to the package's root.

    Raises ModuleNotFoundError for a package that is not installed.
    """
    if package == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "pydoc_data", "idlelib", "lib2to3"}
    else:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"the corpus needs the package {package!r}, which is not installed here: "
                "install it, or leave it out of `packages`"
            )
        root, skipped = Path(spec.submodule_search_locations[0]), {"_vendor", "externals"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not skipped.intersection(relative.parts):
            yield path, f"{package}/{relative.as_posix()}"


def documents(packages: Iterable[str]) -> Iterator[Document]:
    """Documentation of every file of the named packages."""
    for package in packages:
        yield from filter(None, (read_document(*file) for file in source_files(package)))


def descriptions() -> Iterator[Document]:
    """The README texts of all installed distributions, prose from the package metadata."""
    for distribution in sorted(importlib.metadata.distributions(), key=lambda d: d.metadata["Name"].lower()):
        metadata: Any = distribution.metadata  # an email.message.Message
        text = metadata.get_payload()
        if isinstance(text, str) and len(text) >= SHORTEST_COMMENT:
            yield Document(f"metadata/{distribution.metadata['Name']}", text)


def shingles(text: str) -> set[int]:
    """Hashes of all sequences of SHINGLE words."""
    words = text.split()
    return {hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)}


class Deduplicator:
    """Drops paragraphs that came before or that share a passage with a protected text."""

    def __init__(self, protected: Iterable[str] = ()):
        self.seen: set[str] = set()
        self.protected: set[int] = set()
        for text in protected:
            self.protected |= shingles(text)
            self.seen.update(" ".join(p.split()) for p in text.split("\n\n"))

    def __call__(self, document: Document) -> Document:
        kept = []
        for paragraph in document.text.split("\n\n"):
            key = " ".join(paragraph.split())
            # Short paragraphs ("Parameters", "Returns") repeat in all documentation and stay.
            if len(key) >= 2 * SHORTEST_DOCSTRING:
                if key in self.seen or not self.protected.isdisjoint(shingles(paragraph)):
                    continue
                self.seen.add(key)
            kept.append(paragraph.rstrip())
        return Document(document.source, "\n\n".join(kept))


def order(document: Document) -> str:
    """A key that shuffles documents the same way on every machine."""
    return hashlib.sha256(document.source.encode()).hexdigest()


def training_documents(packages: Iterable[str], protected: Iterable[str]) -> list[Document]:
    """Shuffled, deduplicated documents of ``packages`` and of the package metadata.

    ``protected`` are texts that must not be learned (evaluation, validation). Paragraphs that share a passage of
    SHINGLE words with one of them are left out.
    """
    keep = Deduplicator(protected)
    found = [keep(document) for document in (*documents(packages), *descriptions())]
    return sorted((document for document in found if document.text.strip()), key=order)


def freeze() -> None:
    """Write the language reference for evaluation, and for training documentation that shares no passage with it.

    The topics of the reference overlap ("compound" holds all of "if"), so some passages occur several times.
    """
    evaluation = "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"
    write_whole(EVALUATION_TEXT, evaluation)
    keep, parts, size = Deduplicator([evaluation]), [], 0
    for document in sorted(documents([STANDARD_LIBRARY]), key=order):
        if "/test" in document.source:
            continue
        if size >= TRAINING_CHARACTERS:
            break
        parts.append(keep(document).text)
        size += len(parts[-1])
    write_whole(TRAINING_TEXT, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    freeze()
