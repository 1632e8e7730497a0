"""The options of a diagnosis, each declared once, as a field of ``Options``. Imports nothing heavy.

The name in capitals is the variable of ``make diagnose``. The default is that of the profile "smoke". Parsing, checks
and help come from the fields; tests hold the notebook and the table in docs/protocol.md to them.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from fragility_lab.inputs.names import EMBEDDED, shortened

SWITCH = {"yes": True, "true": True, "no": False, "false": False}


def option(default: str | int | bool, told: str, choices: str = "", least: int | None = None, alias: str = "") -> Any:
    """Make a field of the type of ``default``, with its line of help and an ``alias`` of its variable.

    The value must be one of ``choices``, words of one string, if there are any, and at least ``least``.
    """
    return field(default=default, metadata={"told": told, "choices": choices.split(), "least": least, "alias": alias})


@dataclass(frozen=True)
class Options:
    """The options of a diagnosis. Raises ValueError for a value of another type or out of range."""

    model: str = option(EMBEDDED, "hub name or local path, which may be a `.gguf` file")
    data: str = option(EMBEDDED, "`.txt`, `.jsonl`, `.json`, `.csv`, `.parquet` or hub dataset `name[:config[:split]]`")
    format: str = option("bf16", "format of section 1 that rounds results, or recipe of section 12", alias="RECIPE")
    budget: str = option(
        "1 site",
        'to keep in fp32: `"2 blocks"`, `"1 site"`, `"6 modules"`, `"40 MB"` more; schemes for layers: `"5 bits"` a '
        'weight, `"KL 0.01"` at most, and for a recipe with schemes for weights `"12 MB"` for the whole stored model',
    )
    windows: int = option(4, "number of windows", least=1)
    length: int = option(64, "tokens of a window", least=2)
    _: KW_ONLY
    probes: int = option(2, "sign vectors that the prediction averages over", least=1)
    seed: int = option(0, "draws the windows", least=0)
    attention: str = option("auto", "how it is computed; `auto` is `sdpa` if the model has it", "auto sdpa eager")
    reference: str = option("auto", "measure fp32 passes, too; `auto` does if memory allows", "auto yes no")
    weights_only: bool = option(False, "round the weights alone and compute in fp32, as a quantized checkpoint does")
    target: str = option(
        "hidden", "what the error is measured in (section 12); a budget of KL takes `kl`", "hidden kl logprob flips"
    )
    keep: str = option("", 'sites that a mix of schemes may also keep in fp32, such as `"residual scores norms head"`')
    reference_model: str = option("", "fp32 original of a `MODEL` of rounded weights, which are compared as they are")
    form: str = option("auto", "`streamed` holds one block in memory; `auto` does if it must", "auto whole streamed")

    def __post_init__(self):
        for known in fields(self):
            name, value = known.name, getattr(self, known.name)
            choices, least = known.metadata["choices"], known.metadata["least"]
            if not isinstance(value, kind := type(known.default)):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
            if choices and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
            if least is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Take the options by name from ``values``, such as a notebook's ``globals()``; others are left alone."""
        return cls(**{known.name: values[known.name] for known in fields(cls) if known.name in values})

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Return the field of every variable of ``make diagnose``."""
        return {variable: known.name for known in fields(cls) for variable in _variables(known)}

    @classmethod
    def parsed(cls, words: Iterable[str]) -> dict[str, Any]:
        """Return the values by field that ``words`` VARIABLE=VALUE give; a reference model is for the format "given".

        Raises ValueError for an unknown variable, a text of another type, and two values of one field.
        """
        variables = cls.variables()
        texts: dict[str, str] = {}
        for word in words:
            variable, equals, text = word.partition("=")
            if not equals or variable not in variables:
                known, alike = ", ".join(variables), get_close_matches(variable.upper(), variables, 1)
                hint = f" (do you mean {alike[0]}=?)" if alike else ""
                raise ValueError(f"an option must be NAME=VALUE with one of {known}, got {shortened(word)}{hint}")
            if (before := texts.setdefault(name := variables[variable], text)) != text:
                two = f"{shortened(before)} and {variable}={shortened(text)}"
                raise ValueError(f"{name} must be given once, got {two}: leave one out")
        values = {name: _typed(name, text, type(getattr(cls, name))) for name, text in texts.items()}
        return {"format": "given"} | values if "reference_model" in values else values

    @classmethod
    def rows(cls) -> Iterator[tuple[str, str, str]]:
        """Yield variables, meaning and default of every option in Markdown: the rows of a table in docs/protocol.md."""
        for known in fields(cls):
            choices = ", ".join(f"`{choice}`" for choice in known.metadata["choices"])
            told = f"{choices}: {known.metadata['told']}" if choices else known.metadata["told"]
            default = f"`{text_of(getattr(cls, known.name))}`" if known.default != "" else "none"
            yield " or ".join(f"`{name}`" for name in _variables(known)), told, default

    @classmethod
    def help(cls) -> str:
        """Return the options as a terminal shows them."""
        lines = ["options of a diagnosis, NAME=VALUE, as in profile smoke; sections are those of docs/protocol.md:"]
        for names, told, default in cls.rows():
            text = f"{names.replace('`', ''):<17} {told} ({default})".replace("`", "")
            lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent=" " * 20)
        return "\n".join(lines)


def text_of(value: str | int | bool) -> str:
    """Write ``value`` as an option takes it."""
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _variables(known: Field) -> list[str]:
    return [name for name in (known.metadata["alias"], known.name.upper()) if name]


def _typed(name: str, text: str, kind: type) -> str | int | bool:
    if kind is bool and text.lower() not in SWITCH:
        raise ValueError(f"{name} must be one of {', '.join(SWITCH)}, got {shortened(text)}")
    if kind is int and not re.fullmatch(r"-?\d{1,9}", text):
        raise ValueError(f"{name} must be a whole number, got {shortened(text)}")
    return SWITCH[text.lower()] if kind is bool else kind(text)


if __name__ == "__main__":
    print(Options.help())
