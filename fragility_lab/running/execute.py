"""Run one notebook with the parameters of a profile.

``python -m fragility_lab.running.execute e2_predictor --profile embedded -p windows=24`` executes
``notebooks/e2_predictor.ipynb`` with ``notebooks/profiles/embedded/e2_predictor.yaml`` and the given values. The
executed copy is kept in ``outputs/embedded/notebooks/``. The profile "smoke" is the notebook as committed. A wrong
request is reported before any work starts.
"""

import argparse
import ast
import glob
import io
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import papermill
import yaml
from IPython.paths import get_ipython_dir
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.paths import jupyter_runtime_dir
from nbclient.exceptions import DeadKernelError
from papermill.iorw import LocalHandler, papermill_io

from fragility_lab import paths
from fragility_lab.running.environment import TERMINAL
from fragility_lab.running.files import require_room, write_whole
from fragility_lab.running.provenance import ASKED

SMOKE = "smoke"
# errors that say what to do
REFUSALS = ("ValueError", "OSError", "TypeError", "FileNotFoundError", "LostWorkersError", "IncompleteError")


class Values(yaml.SafeLoader):
    """Reads numbers as people write them. To YAML, 012 is 10; 0x10, 1_0 and 1:30 are numbers; 1e-3 is a string."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}


for _tag, _pattern in (
    ("null", r"~|null|"),
    ("bool", r"(?i:true|false|yes|no)"),
    ("int", r"[-+]?[0-9]+"),
    ("float", r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"),
):
    Values.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None)
Values.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
Values.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(loader.construct_scalar(node)))


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM comes: everything ends as after an interrupt."""


class WholeFiles(LocalHandler):
    """Papermill's handler of files, except that files appear whole."""

    def write(self, buf: str, path: str) -> None:
        write_whole(Path(path), buf)


class OwnInterpreter(AsyncKernelManager):
    """Starts kernels of this interpreter, even if the user has registered another one as "python3"."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def notebook_names() -> list[str]:
    """Every notebook by its path in the folder of notebooks, without suffix: "e2_predictor", "theory/..."."""
    found = glob.glob("**/*.ipynb", root_dir=paths.NOTEBOOKS, recursive=True)  # leaves out hidden folders
    return sorted(Path(path).with_suffix("").as_posix() for path in found)


def notebook_path(name: str) -> Path:
    """The notebook called ``name``."""
    paths.require_project()
    known = notebook_names()
    if name not in known:
        raise SystemExit(f"unknown notebook {name!r}: choose one of {', '.join(known)}")
    return paths.NOTEBOOKS / f"{name}.ipynb"


def profile_names() -> list[str]:
    """All profiles, the committed defaults first."""
    return [SMOKE, *sorted(path.name for path in paths.PROFILES.iterdir() if path.is_dir())]


def profile_values(profile: str, name: str) -> dict[str, Any]:
    """The values that ``profile`` sets in the notebook ``name``; none for "smoke", the committed defaults."""
    known = profile_names()
    if profile not in known:
        raise SystemExit(f"unknown profile {profile!r}: choose one of {', '.join(known)}")
    if profile == SMOKE:
        return {}
    file = paths.PROFILES / profile / f"{name}.yaml"
    if not file.is_file():
        having = [SMOKE, *(folder for folder in known if (paths.PROFILES / folder / file.name).is_file())]
        raise SystemExit(
            f"profile {profile!r} has no parameters for notebook {name!r} ({file.name} is not in {file.parent}): "
            f"choose one of {', '.join(having)}"
        )
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Values) or {}
        problem = "" if isinstance(values, dict) else f"a {type(values).__name__}"
    except (yaml.YAMLError, ValueError, RecursionError) as cause:
        problem = " ".join(str(cause).split())
    if problem:
        raise SystemExit(f"a profile's file must hold lines such as `windows: 24`, but {file} is none: got {problem}")
    return values


def defaults(notebook: Path) -> dict[str, Any]:
    """Names and values assigned in the cell tagged "parameters", which holds literals only."""
    return {name: ast.literal_eval(found["default"]) for name, found in papermill.inspect_notebook(notebook).items()}


def checked(notebook: str, known: dict[str, Any], name: str, value: Any) -> Any:
    """``value`` as the notebook's parameter ``name`` takes it: of the type of the committed default."""
    if name not in known:
        raise SystemExit(
            f"unknown parameter {name!r} of notebook {notebook!r}: choose one of {', '.join(known) or '(it has none)'}"
        )
    default = known[name]
    if not _fits(value, default):
        raise SystemExit(
            f"parameter {name!r} of notebook {notebook!r} takes a value of type {type(default).__name__}, "
            f"such as {default!r}, got {value!r}"
        )
    return float(value) if type(default) is float else value


def _fits(value: Any, default: Any) -> bool:
    if type(default) is float:
        return type(value) in (int, float)  # not bool, which is an int to isinstance
    if type(value) is not type(default):
        return False
    return not isinstance(value, list) or all(_fits(item, default[0]) for item in value if default)


def parsed(text: str, default: Any) -> Any:
    """The YAML scalar or list ``text``. If the default is a str, it is the text as written: model=1e3 is a name."""
    if isinstance(default, str):
        return text
    try:
        return yaml.load(text, Values)
    except (ValueError, RecursionError, yaml.YAMLError):
        return text


def parameters(name: str, profile: str, overrides: Sequence[str], if_present: Sequence[str] = ()) -> dict[str, Any]:
    """Values for the notebook ``name``: those of the profile, overridden by the strings ``name=value``.

    Values of ``if_present`` are left out if the notebook has no such parameter.
    """
    known = defaults(notebook_path(name))
    values = dict(profile_values(profile, name))
    given: dict[str, str] = {}
    for override in [*if_present, *overrides]:
        key, equals, text = override.partition("=")
        if not equals:
            raise SystemExit(f"a parameter is given as name=value, got {override!r}")
        if given.setdefault(key, text) != text:
            raise SystemExit(f"a parameter is given once, got {key}={given[key]} and {override}: leave one out")
        if key in known or override in overrides:
            values[key] = parsed(text, known.get(key))
    return {key: checked(name, known, key, value) for key, value in values.items()}


def require_places(profile: str) -> None:
    """Exits with one line if results, settings or temporary files cannot be written."""
    try:
        paths.require_folder_name(profile)
        require_room(paths.OUTPUTS / profile, "results", "free some, or mend the folder's rights")
        for folder in {Path(jupyter_runtime_dir()), Path(get_ipython_dir())}:
            require_room(folder, "files of the notebook's kernel", "free some, or set HOME= to another folder")
        # Not tempfile's own choice, which is the working directory where no other can be written to.
        folder = Path(os.environ.get("TMPDIR") or "/tmp" if os.name == "posix" else tempfile.gettempdir())
        require_room(folder, "temporary files", "free some, or set TMPDIR to another folder")
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from error


def execute(name: str, profile: str, values: dict[str, Any]) -> Path:
    """Run the notebook ``name`` with ``values``; returns the path of the executed copy.

    Results go to the folder ``profile`` of outputs. If the notebook fails, this exits and prints the error last.
    """
    require_places(profile)
    executed = paths.output_folder(profile, "notebooks") / f"{name}.ipynb"
    executed.parent.mkdir(parents=True, exist_ok=True)
    os.environ[TERMINAL] = "1"  # the kernel inherits it, and its progress bars come to our stderr
    papermill_io.register(str(executed), WholeFiles())
    print(f"{name}, profile {profile}", flush=True)
    try:
        # The working directory stays the caller's, so that relative paths given as MODEL= and DATA= hold.
        papermill.execute_notebook(
            notebook_path(name),
            executed,
            values,
            kernel_name="python3",
            kernel_manager_class=OwnInterpreter,
            extra_arguments=["--log-level=CRITICAL"],  # of the kernel's own log; a cell's errors come as outputs
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
            coalesce_streams=True,  # what one cell prints is one output, however it was timed
        )
    except papermill.PapermillExecutionError as error:
        told = "" if error.ename in REFUSALS else f"{error}\n"  # the message says what to do; a traceback would hide it
        print(f"{told}{name} stopped; executed so far: {executed}", file=sys.stderr)
        raise SystemExit(f"{error.ename}: {error.evalue}") from error
    except OSError as error:  # the executed copy cannot be written
        raise SystemExit(str(error)) from error
    except DeadKernelError as error:
        print(f"{name} stopped; executed so far: {executed}", file=sys.stderr)
        raise SystemExit(f"{type(error).__name__}: {error} (out of memory?)") from error
    except RuntimeError as error:  # a kernel that did not start
        raise SystemExit(
            f"the notebook's kernel must start, but did not ({error}): {sys.executable} -m ipykernel_launcher says why"
        ) from error
    return executed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fragility_lab.running.execute", description=__doc__.splitlines()[0]
    )
    parser.add_argument("notebook", help="name of a notebook, without .ipynb")
    parser.add_argument("--profile", default=SMOKE, help="folder of notebooks/profiles, or smoke (default)")
    several: dict[str, Any] = {"metavar": "NAME=VALUE", "action": "append", "default": []}
    parser.add_argument("-p", dest="overrides", help="set a value", **several)
    parser.add_argument("--if-present", help="set a value if the notebook has this parameter", **several)
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where it is ASCII, what a notebook prints shall not end the run
            stream.reconfigure(errors="replace")
    values = parameters(given.notebook, given.profile, given.overrides, given.if_present)
    os.environ[ASKED] = json.dumps({"notebook": given.notebook, "profile": given.profile, "parameters": values})
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        # Another model or text makes another set of results: -p profile=NAME.
        print(f"executed notebook: {execute(given.notebook, values.get('profile', given.profile), values)}")
    except KeyboardInterrupt as stop:
        logging.getLogger("asyncio").disabled = True  # it would tell of every task that the stop has ended
        goes_on = "starts again" if given.notebook == "diagnose_my_model" else "goes on from the last finished run"
        what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"\n{what}: the same command {goes_on}", file=sys.stderr)
        raise SystemExit(status) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(*_) -> None:
    raise Terminated


if __name__ == "__main__":
    main()
