"""The options of a diagnosis, each declared once, as a field of ``Options``. Imports nothing heavy.

The name in capitals is the variable of ``make diagnose``. The default is that of the profile "smoke". Parsing, checks,
help and the table in docs/protocol.md come from the fields.
"""

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from fragility_lab.inputs.names import EMBEDDED, shortened

SWITCH = {"yes": True, "true": True, "no": False, "false": False}


def option(
    default: str | int | bool,
    told: str,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    alias: str = "",
    implies: Mapping[str, str] | None = None,
) -> Any:
    """Make a field of the type of ``default``; ``told`` is its line of help.

    The value must be one of ``choices`` if there are any, and at least ``least``. ``alias`` is another variable for it.
    If it is given, the texts of other fields that it ``implies`` take the place of their defaults.
    """
    known = {"told": told, "choices": choices, "least": least, "alias": alias, "implies": implies or {}}
    return field(default=default, metadata=known)


@dataclass(frozen=True)
class Options:
    """The options of one diagnosis. Raises ValueError for a value of another type or out of range."""

    model: str = option(EMBEDDED, "hub name or local path, which may be a `.gguf` file")
    data: str = option(
        EMBEDDED,
        "text: a local `.txt`, `.jsonl`, `.json`, `.csv` or `.parquet`, or a hub dataset `name[:config[:split]]`",
    )
    format: str = option(
        "bf16", "a format of protocol section 1 that rounds results, or a recipe of section 12", alias="RECIPE"
    )
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
    attention: str = option(
        "auto", "the implementation; `auto` is `sdpa` if the model has it", choices=("auto", "sdpa", "eager")
    )
    reference: str = option(
        "auto",
        "measure fp32 passes beside the prediction; `auto` does if memory allows",
        choices=("auto", "yes", "no"),
    )
    weights_only: bool = option(False, "round the weights alone and compute in fp32, as a quantized checkpoint does")
    target: str = option(
        "hidden",
        "what the error is measured in (protocol section 12); a budget of KL takes `kl`",
        choices=("hidden", "kl", "logprob", "flips"),
    )
    keep: str = option(
        "", 'sites of which a mix of schemes may also keep parts in fp32, such as `"residual scores norms head"`'
    )
    reference_model: str = option(
        "",
        "the fp32 original of a `MODEL` whose weights somebody else has rounded: its weights are compared as they are, "
        "computing is in fp32",
        implies={"format": "given"},
    )
    form: str = option(
        "auto",
        "memory holds the whole model, or one block of it at a time; `auto` streams a model that does not fit",
        choices=("auto", "whole", "streamed"),
    )

    def __post_init__(self):
        for known in fields(self):
            name, value, least = known.name, getattr(self, known.name), known.metadata["least"]
            if not isinstance(value, kind := type(known.default)):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
            if (choices := known.metadata["choices"]) and value not in choices:
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
    def named(cls, words: Iterable[str]) -> dict[str, str]:
        """Return the texts by field that ``words`` VARIABLE=VALUE give.

        Raises ValueError for an unknown variable, and for two values of one field.
        """
        variables, found = cls.variables(), {}
        for word in words:
            variable, equals, text = word.partition("=")
            if not equals or variable not in variables:
                alike = get_close_matches(variable.upper(), variables, 1)
                hint = f" (do you mean {alike[0]}=?)" if alike else ""
                raise ValueError(
                    f"an option must be NAME=VALUE with one of {', '.join(variables)}, got {shortened(word)}{hint}"
                )
            before, other = found.setdefault(name := variables[variable], (text, variable))
            if text != before:
                raise ValueError(
                    f"{name} must be given once, got {other}={shortened(before)} and {variable}={shortened(text)}: "
                    "leave one out"
                )
        implied = [known.metadata["implies"] for known in fields(cls) if known.name in found]
        return {name: text for pairs in implied for name, text in pairs.items()} | {
            name: text for name, (text, _) in found.items()
        }

    @classmethod
    def typed(cls, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return ``texts`` by field as values of the fields' types. Raises ValueError for text of another type."""
        return {name: _typed(name, text, type(getattr(cls, name))) for name, text in texts.items()}

    @classmethod
    def help(cls) -> str:
        """Return the options with their defaults, as a terminal shows them."""
        lines = ["options of a diagnosis, with the defaults of the profile smoke; other profiles have their own sizes:"]
        for known in fields(cls):
            name, *others = _variables(known)
            default = shlex.quote(text_of(known.default)) if known.default != "" else ""
            start = f"  {name}={default}" + "".join(f" (or {other}=)" for other in others)
            told = _told(known).replace("`", "")
            lines += textwrap.wrap(told, 110, initial_indent=start.ljust(30) + " ", subsequent_indent=" " * 31)
        return "\n".join(lines)

    @classmethod
    def table(cls) -> str:
        """Return the options as the Markdown table of docs/protocol.md."""
        rows = []
        for known in fields(cls):
            name, *others = (f"`{variable}`" for variable in _variables(known))
            default = f"`{text_of(known.default)}`" if known.default != "" else ""
            rows.append(f"| {name}{''.join(f' (or {other})' for other in others)} | {_told(known)} | {default} |")
        return "\n".join(["| option | meaning | default in `smoke` |", "|---|---|---|", *rows])


def text_of(value: str | int | bool) -> str:
    """Write ``value`` as an option takes it."""
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _variables(known: Field) -> list[str]:
    """Name the variables of a field, the one to show first."""
    return [*([known.metadata["alias"]] if known.metadata["alias"] else []), known.name.upper()]


def _told(known: Field) -> str:
    """Return the line of help of a field, with its choices before it."""
    *most, last = (f"`{choice}`" for choice in known.metadata["choices"] or [""])
    return (f"{', '.join(most)} or {last}: " if most else "") + known.metadata["told"]


def _typed(name: str, text: str, kind: type) -> str | int | bool:
    if kind is bool:
        if text.lower() not in SWITCH:
            raise ValueError(f"{name} must be one of {', '.join(SWITCH)}, got {shortened(text)}")
        return SWITCH[text.lower()]
    if kind is int:
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise ValueError(f"{name} must be a whole number, got {shortened(text)}")
        return int(text)
    return text


if __name__ == "__main__":
    print(Options.help())
