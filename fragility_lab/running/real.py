"""``make real``: real, trained models through E2, E3, X1, X2, the diagnosis and the report, one after another.

Each model's results are in a folder of its own. If a notebook stops, the others go on, and the command exits
non-zero at the end. After an interrupt, the same command continues after the last finished run.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fragility_lab import paths
from fragility_lab.inputs.fetched import MODELS, fetched
from fragility_lab.inputs.names import EMBEDDED
from fragility_lab.running import execute

PROFILE = "real"
STEPS = (
    "e2_predictor", "e3_patching", "x1_adjoint_predictor", "x2_recipes", "diagnose_my_model", "report",
)  # fmt: skip


def results_folder(model: str, profile: str, given: str = "") -> str:
    """The name of the folder for results of ``model``: the ``given`` one, or the model's.

    It ends in ``profile`` if that is another one, or if the project has committed results of other profiles there.
    """
    path = Path(os.path.abspath(model))
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    committed = name.startswith((EMBEDDED, "independent", "realisation"))
    return given or name + (f"-{profile}" if profile != PROFILE or committed else "")


def run(models: list[str], profile: str, data: str = "", results: str = "", main: Callable = execute.main) -> list[str]:
    """Take ``models`` through all STEPS. Returns the steps that stopped, in words; none if all went well.

    Raises SystemExit if somebody interrupts it.
    """
    stopped = []
    for model in models:
        place = os.path.relpath(fetched(model)) if model in MODELS else model
        given = ["--if-present", f"model={place}"] + (["--if-present", f"data={data}"] if data else [])
        for step in STEPS:
            folder = results_folder(model, profile, results)
            try:
                main([step, "--profile", profile, "-p", f"profile={folder}", *given])
            except SystemExit as end:
                if isinstance(end.code, int):  # interrupted or terminated
                    raise
                print(f"{end.code}", file=sys.stderr, flush=True)
                stopped.append(f"{step} of {model}")
    return stopped


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.running.real", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--model", default="", help=f"a hub name or a path in place of {' and '.join(MODELS)}")
    parser.add_argument("--data", default="", help="the text in place of the profile's")
    parser.add_argument("--results", default="", help="the folder of results, for one model")
    given = parser.parse_args(arguments)
    paths.require_project()
    models = [given.model] if given.model else [*MODELS]
    if given.results and len(models) > 1:
        sys.exit(f"RESULTS= names the folder of one model, got {' and '.join(models)}: give MODEL=, too")
    data = given.data or execute.profile_values(given.profile, STEPS[0]).get("data", "embedded")
    from fragility_lab.inputs.text import load_rows  # takes seconds

    try:
        load_rows(data)  # raises if there is no such text, before models are fetched
        stopped = run(models, given.profile, given.data, given.results)
    except (ValueError, OSError) as refused:
        sys.exit(f"make real: {refused}")
    if stopped:
        sys.exit(f"make real: stopped in {', '.join(stopped)}; mend that, and the same command goes on")


if __name__ == "__main__":
    main()
