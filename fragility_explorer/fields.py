"""The fields of the form: each has controls, a value for its option, and a line for what is wrong."""

import html
import os
from collections.abc import Callable, Sequence
from dataclasses import Field as Declared
from pathlib import Path
from typing import Any

import numpy as np
from ipywidgets import HTML, Checkbox, Combobox, Dropdown, IntText, Text, ValueWidget, VBox

from fragility_adjoint.mixed_precision.budget import parse_budget
from fragility_explorer.recipes_in_words import groups
from fragility_lab.inputs.local import EMBEDDED_TEXTS
from fragility_lab.inputs.names import EMBEDDED, embedded_checkpoints
from fragility_lab.paths import PROJECT

STYLE, WIDE = {"description_width": "8.5em"}, {"width": "min(98%, 36em)"}
LABELS = {
    "model": "model", "data": "text", "format": "recipe", "budget": "budget", "windows": "windows",
    "length": "tokens each", "probes": "probes", "seed": "seed", "attention": "attention", "reference": "fp32 passes",
    "weights_only": "round weights alone", "target": "error in", "keep": "also keep",
    "reference_model": "reference model", "form": "form in memory",
}  # fmt: skip
TARGETS = {
    "relative error of the final hidden state (hidden)": "hidden",
    "KL divergence of the next token (kl)": "kl",
    "log-probability of the text (logprob)": "logprob",
    "most probable tokens that change (flips)": "flips",
}
SUGGESTED = {"model": embedded_checkpoints(), "data": [*EMBEDDED_TEXTS], "reference_model": embedded_checkpoints()}
HINTS = {
    "model": "path, hub name or shipped checkpoint",
    "data": "path, hub name or shipped text",
    "reference_model": "the original of a model that is already rounded",
    "keep": "residual scores norms head",
}
OTHER = "another, by its name"
USUAL = "w4a16-g128"  # with which its group begins
UNITS = {
    "blocks in fp32": "blocks", "sites in fp32": "sites", "modules in fp32": "modules", "MB": "MB",
    "bits a weight": "bits", "nats of KL at most": "KL",
}  # fmt: skip


def described(label: str, told: str = "") -> dict[str, Any]:
    """The arguments that every control has."""
    return {"description": label, "tooltip": told, "style": STYLE, "layout": WIDE}


class Field:
    """The field of one option: the ``controls``, of which the last holds the value, and ``told`` below them."""

    def __init__(self, *controls: ValueWidget):
        self.controls = controls
        self.told = HTML().add_class("fdf-told")
        self.box = VBox([*controls, self.told])

    @property
    def value(self) -> Any:
        """The value of the option."""
        value = self.controls[-1].value
        return value.strip() if isinstance(value, str) else value

    def tell(self, refusal: str, note: str = "") -> None:
        """Show what is wrong, or else a ``note``."""
        kind = ' class="fdf-refused" role="alert"' if refusal else ""
        text = html.escape(refusal or note)
        self.told.value = f"<p{kind}>{text}</p>" if text else ""

    def observe(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after every change."""
        for control in self.controls:
            control.observe(lambda _: changed(), names="value")

    def enable(self, enabled: bool) -> None:
        """Let the user change the value, or not."""
        for control in self.controls:
            control.disabled = not enabled


class NamedField(Field):
    """A path, a name of the hub, or one of a few known names. A path that exists becomes absolute."""

    @property
    def value(self) -> str:
        name = super().value
        if name.startswith(EMBEDDED) or not name:
            return name
        places = (Path(folder, name) for folder in (os.getcwd(), PROJECT))
        return next((str(place.resolve()) for place in places if place.exists()), name)


class RecipeField(Field):
    """A recipe: a menu of what is rounded, a menu of the recipes that round it, and a field for any other name."""

    def __init__(self, name: str):
        self.groups = groups()
        kind = Dropdown(options=[*self.groups, OTHER], **described("round"))
        self.menu = Dropdown(**described(LABELS["format"]))
        self.text = Text(name, placeholder="fp8-dynamic+kv-fp8", **described("its name"))
        kind.value = next((group for group, known in self.groups.items() if name in known.values()), OTHER)
        self.kind = kind
        super().__init__(kind, self.menu, self.text)
        self.list(name)
        kind.observe(lambda _: self.list(), names="value")

    def list(self, name: str | None = None) -> None:
        """List the recipes of the group, and choose ``name`` if it is given."""
        known = self.groups.get(self.kind.value, {})
        self.menu.options = [*known.items()]
        for wanted in (USUAL, name):
            if wanted in known.values():
                self.menu.value = wanted
        self.menu.layout.display, self.text.layout.display = (None, "none") if known else ("none", None)

    @property
    def value(self) -> str:
        return self.menu.value if self.kind.value in self.groups else self.text.value.strip()


class BudgetField(Field):
    """A budget: a number, and what it counts."""

    def __init__(self, budget: str):
        amount, unit = parse_budget(budget)
        unit, amount = {"bytes": ("MB", amount / 1e6), "kl": ("KL", amount)}.get(unit, (unit, amount))
        self.number = Text(np.format_float_positional(amount, trim="-"), **described(LABELS["budget"]))
        self.unit = Dropdown(options=[*UNITS.items()], value=unit, **described("counts"))
        super().__init__(self.number, self.unit)

    @property
    def value(self) -> str:
        number, unit = self.number.value.strip(), self.unit.value
        if unit == "KL":
            return f"KL {number}"
        return f"{number} {unit.removesuffix('s') if number == '1' else unit}"


def field_of(option: Declared, value: Any) -> Field:
    """The field of an ``option`` of ``diagnosis.options``, which shows ``value``."""
    name, told = option.name, option.metadata["told"].replace("`", "")
    if name == "format":
        return RecipeField(value)
    if name == "budget":
        return BudgetField(value)
    shape = described(LABELS[name], told)
    if name in SUGGESTED:
        hint = {"placeholder": HINTS[name], "continuous_update": False}
        return NamedField(Combobox(value=value, options=SUGGESTED[name], **hint, **shape))
    choices: Sequence = [*TARGETS.items()] if name == "target" else option.metadata["choices"]
    if choices:
        return Field(Dropdown(options=choices, value=value, **shape))
    if isinstance(value, bool):
        return Field(Checkbox(value, indent=True, **shape))
    if isinstance(value, int):
        return Field(IntText(value, **shape))
    return Field(Text(value, placeholder=HINTS.get(name, ""), **shape))
