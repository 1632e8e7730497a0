"""A form for a diagnosis: values that are checked as they are typed, a button, the progress of the run, and its page.

The checks are those of the command line (``diagnosis.request``). The ``make diagnose`` that does the same is shown,
ready to copy. A notebook shows the form as the value of a cell.
"""

import html
import threading
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from ipywidgets import HTML, Button, HBox, Output, VBox

from fragility_explorer.fields import LABELS, field_of
from fragility_explorer.job import Job
from fragility_lab.diagnosis.options import text_of
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.sections import command
from fragility_lab.inputs.local import require_text
from fragility_lab.inputs.stored import require_readable
from fragility_lab.paths import ASSETS, CUSTOM
from fragility_lab.reporting.html import inline, template
from fragility_quantization.recipes import PREQUANTIZED

FIRST = ("model", "data", "format", "target", "budget", "windows", "length")
MORE = ("More options ▸", "Fewer options ▾")


def refusal(values: Mapping[str, Any]) -> str:
    """The error of ``values`` by the name of the option, as ``make diagnose`` words it; empty if there is none."""
    try:
        Request(**values)
    except ValueError as refused:
        return str(refused)
    return ""


def missing(name: str, value: str) -> str:
    """The reason that the model or text ``value`` of option ``name`` cannot be had, by a quick check; "" if none."""
    try:
        if name == "data":
            require_text(value)
        elif value:
            require_readable(value)
    except (ValueError, OSError) as refused:
        return str(refused)
    return ""


def refusals(values: Mapping[str, Any], last: str = "") -> dict[str, str]:
    """The errors in ``values``, by the option to blame.

    An option is to blame if its default mends the error. Of several such options, the one changed ``last`` is.
    """
    found = {name: told for name in ("model", "data", "reference_model") if (told := missing(name, values[name]))}
    left = dict(values)
    while told := refusal(left):
        free = [name for name in (last, *left) if name in left and name not in found]
        blamed = next(name for name in free if refusal(left | {name: getattr(Request, name)}) != told)
        found[blamed], left[blamed] = told, getattr(Request, blamed)
    return found


class Form:
    """A form that begins with the values of ``request``. Its pages go to the folder ``profile`` with CUSTOM."""

    def __init__(self, request: Request, profile: str):
        self.request: Request | None = request
        self.results = profile.removesuffix(CUSTOM) + CUSTOM
        self.fields = {option.name: field_of(option, getattr(request, option.name)) for option in fields(Request)}
        self.button = Button(description="Diagnose", button_style="primary", icon="play")
        self.stopping = Button(description="Stop", icon="stop", disabled=True)
        self.more = Button(description=MORE[0])
        self.command, self.status, self.shown = HTML(), HTML(), Output()
        self.rest = VBox([field.box for name, field in self.fields.items() if name not in FIRST])
        self.rest.layout.display = self.shown.layout.display = "none"  # an output without a page is an empty frame
        self.panel = self._assembled().add_class("diagnosis-form")
        self.job: Job | None = None
        self.following = threading.Lock()  # the job and the buttons call from threads of their own
        for name, field in self.fields.items():
            field.observe(partial(self.check, name))
        for button, act in ((self.button, self.start), (self.stopping, self.stop), (self.more, self.unfold)):
            button.on_click(lambda _, act=act: act())
        self.check()

    def _assembled(self) -> VBox:
        style = HTML(f"<style>{(ASSETS / 'form' / 'form.css').read_text('utf-8')}</style>")
        buttons = HBox([self.button, self.stopping, self.more], layout={"flex_flow": "row wrap"})
        first = [self.fields[name].box for name in FIRST]
        return VBox([style, *first, self.rest, buttons, self.command, self.status, self.shown])

    @property
    def values(self) -> dict[str, Any]:
        """The values of the fields by option. A reference model is for the format "given"."""
        found = {name: field.value for name, field in self.fields.items()}
        return found | ({"format": PREQUANTIZED} if found["reference_model"] else {})

    def check(self, last: str = "") -> None:
        """Show what is wrong beside each field, and the command. ``last`` is the option that was changed."""
        values = self.values
        found = refusals(values, last)
        self.request = None if found else Request(**values)
        notes = self.notes()
        for name, field in self.fields.items():
            field.tell(found.get(name, ""), notes.get(name, ""))
        self.fields["format"].enable(not values["reference_model"])
        self.command.value = self.command_html()
        self.enable()

    def notes(self) -> dict[str, str]:
        """The meaning of the values together, by option."""
        request = self.request
        if request is None:
            return {}
        found = {"format": "The weights are compared as they are."} if request.reference_model else {}
        if request.measured_in != request.target:
            found["target"] = "A budget of KL is measured in KL."
        if request.mixes:
            names = ", ".join(recipe.name for recipe in request.schemes)
            found["budget"] = f"The plan gives each layer one of these: {names}."
        else:
            found["budget"] = f"The plan keeps up to {request.budget}{' more' * ('B' in request.budget)} in fp32."
        return found

    def command_html(self) -> str:
        """The command that makes the form's diagnosis, ready to copy."""
        if self.request is None:
            return "<p>Mend the marked values first.</p>"
        text = html.escape(command(self.request, self.results))
        return f'<p>The same from a terminal:</p><pre tabindex="0" aria-label="command">{text}</pre>'

    def enable(self) -> None:
        """Let the user start what can be started, and stop what runs."""
        running = self.job is not None and self.job.running
        self.button.disabled = running or self.request is None
        self.stopping.disabled = not running

    def unfold(self) -> None:
        """Show or hide the options that few need."""
        hidden = self.more.description == MORE[0]
        self.more.description = MORE[hidden]
        self.rest.layout.display = None if hidden else "none"

    def start(self) -> None:
        """Start the diagnosis, unless one is running."""
        if self.request is None or (self.job is not None and self.job.running):
            return
        self.shown.outputs, self.shown.layout.display = (), "none"
        self.job = Job(self.request, self.results, self.follow)
        self.follow()

    def stop(self) -> None:
        """End the diagnosis that is running, if there is one."""
        if self.job is not None:
            self.job.stop()
            self.follow()

    def follow(self) -> None:
        """Bring status, buttons and page up to date with the job."""
        with self.following:
            if (job := self.job) is None:
                return
            self.status.value = template("form/status.html.jinja").render(job=job)
            self.enable()
            if not job.running and job.written is not None and not self.shown.outputs:
                data = {"text/html": inline(job.written, "The diagnosis").data}
                self.shown.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)
                self.shown.layout.display = None

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        values = [(LABELS[name], text_of(value) or "none") for name, value in self.values.items()]
        static = template("form/static.html.jinja").render(values=values, command=self.command_html())
        return {**self.panel._repr_mimebundle_(), "text/html": static, "text/plain": "a form for a diagnosis"}
