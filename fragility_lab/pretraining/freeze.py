"""Freeze the two embedded texts: ``python -m fragility_lab.pretraining.freeze``.

The committed assets were made once, with the CPython named in assets/README.md. Another CPython gives other texts, so
rerun this only to make a new embedded default.
"""

from pydoc_data.topics import topics

from fragility_lab.paths import EVALUATION_TEXT, TRAINING_TEXT
from fragility_lab.pretraining.corpus import STANDARD_LIBRARY, Deduplicator, documents, order

TRAINING_CHARACTERS = 900_000  # more than 150,000 tokens of the embedded tokenizer


def evaluation_text() -> str:
    """The Python language reference as CPython ships it, topic after topic.

    Topics overlap ("compound" holds all of "if"), so some passages occur several times.
    """
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def training_text(evaluation: str) -> str:
    """Standard-library documentation that shares no passage with ``evaluation``."""
    keep = Deduplicator([evaluation])
    parts, size = [], 0
    for document in sorted(documents([STANDARD_LIBRARY]), key=order):
        if size >= TRAINING_CHARACTERS:
            break
        if "/test" in document.source:
            continue
        parts.append(keep(document).text)
        size += len(parts[-1])
    return "\n\n".join(parts) + "\n"


def main() -> None:
    evaluation = evaluation_text()
    EVALUATION_TEXT.write_text(evaluation, encoding="utf-8")
    TRAINING_TEXT.write_text(training_text(evaluation), encoding="utf-8")


if __name__ == "__main__":
    main()
