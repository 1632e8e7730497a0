"""Diagnose a model: check the options, then run the notebook ``diagnose_my_model``. ``make diagnose`` calls this."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from fragility_lab.diagnosis.options import Options, text_of
from fragility_lab.inputs.names import EMBEDDED, embedded_checkpoints, local
from fragility_lab.inputs.stored import require_readable
from fragility_lab.paths import CUSTOM, require_folder_name

GIVEN = "FRAGILITY_GIVEN"  # in the environment: names of the variables that make's command line sets


def words_of_make(environment: Mapping[str, str]) -> list[str]:
    """Return NAME=VALUE for the options that make's command line gives.

    Other variables there are left alone, except for those that look like an option, which is then refused.
    """
    names = environment.get(GIVEN, "").split()
    near = [name for name in names if get_close_matches(name.upper(), Options.variables(), cutoff=0.8)]
    return [f"{name}={environment[name]}" for name in near if environment.get(name)]


def require_possible(given: dict[str, Any]) -> None:
    """Raises ValueError or OSError for options ``given`` that no diagnosis can have. Imports PyTorch last."""
    names = [name for name in (given.get("model", Options.model), given.get("reference_model")) if name]
    for name in names:
        require_readable(name)  # takes no time
    from fragility_lab.inputs.local import SMALL, local_rows, require_text

    require_text(data := given.get("data", Options.data))
    if os.path.isfile(data) and os.path.getsize(data) < SMALL:
        local_rows(data)
    from fragility_lab.diagnosis.given import require_same_architecture
    from fragility_lab.diagnosis.loading import require_enough
    from fragility_lab.diagnosis.request import Request
    from fragility_lab.inputs.checkpoints import load_tokenizer
    from fragility_lab.inputs.offloaded import on_meta, require_fitting

    request = Request(**given)
    request.require_measured_in(given.get("target", request.measured_in))
    if len(names) > 1:
        require_same_architecture(*names)
    for name in names:
        require_fitting(name)
    if request.mixes:
        require_enough(request, on_meta(names[-1]))
    if (place := local(names[0])) is not None and place.is_dir():
        load_tokenizer(names[0])  # takes a fraction of a second; that of a GGUF file is converted, which takes longer


def results_of(profile: str, given: Mapping[str, Any]) -> str:
    """The folder of results of a ``profile`` with options ``given``; each embedded checkpoint has its own."""
    model = given.get("model", "")
    if profile == EMBEDDED and model in embedded_checkpoints():
        return model + CUSTOM * (len(given) > 1)
    return profile + CUSTOM * bool(given)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fragility_lab.diagnosis",
        description=__doc__,
        epilog=Options.help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="an option")
    parser.add_argument("--profile", default="smoke", help="folder of notebooks/profiles, or smoke (default)")
    parser.add_argument("--results", help=f"folder in outputs (default: the profile's; with options PROFILE{CUSTOM})")
    parser.add_argument("--check", action="store_true", help="check the options only")
    asked = parser.parse_args(arguments)
    words = [*asked.words, *words_of_make(os.environ)]
    try:
        given = Options.parsed(words)
        Options(**given)
        results = asked.results or results_of(asked.profile, given)
        require_folder_name(results)
        if asked.check:
            require_possible(given)
            return
        # In a process of its own, whose PyTorch would take memory from the model.
        check = [sys.executable, "-m", "fragility_lab.diagnosis", "--check", "--", *words]
        if status := subprocess.run(check).returncode:
            sys.exit(status)
    except (ValueError, OSError) as refused:
        sys.exit(f"make diagnose: {refused}")
    except KeyboardInterrupt:
        if not asked.check:
            print("\ninterrupted: the same command starts again", file=sys.stderr)
        sys.exit(130)
    from fragility_lab.running import execute  # takes a second

    values = {"profile": results} | {name: text_of(value) for name, value in given.items()}
    overrides = [word for item in values.items() for word in ("-p", "=".join(item))]
    execute.main(["diagnose_my_model", "--profile", asked.profile, *overrides])
    print(f"\npage: outputs/{results}/diagnosis.html")


if __name__ == "__main__":
    main()
