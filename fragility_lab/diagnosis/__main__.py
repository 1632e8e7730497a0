"""Check what ``make diagnose`` was asked for, before a notebook starts."""

import argparse
import re
import sys

from fragility_lab.inputs.names import EMBEDDED, shortened
from fragility_lab.inputs.stored import require_readable

SWITCH = {"yes": True, "true": True, "no": False, "false": False}


def typed(name: str, text: str) -> str | int | bool:
    """The value of the request's field ``name`` that ``text`` gives. Raises ValueError for text of another type."""
    if name == "weights_only":
        if text.lower() not in SWITCH:
            raise ValueError(f"weights_only must be one of {', '.join(SWITCH)}, got {shortened(text)}")
        return SWITCH[text.lower()]
    if name in ("windows", "length", "probes", "seed"):
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise ValueError(f"{name} must be a whole number, got {shortened(text)}")
        return int(text)
    return text


def require_request(request: dict, names: list[str]) -> None:
    """Raises ValueError or OSError for a ``request`` that its models, ``names``, cannot fulfil. Imports PyTorch."""
    from fragility_lab.diagnosis.given import require_same_architecture
    from fragility_lab.diagnosis.request import Request
    from fragility_lab.inputs.offloaded import require_fitting

    target = Request(**request).measured_in
    if request.get("target", target) != target:  # "hidden" stands for no target in a request
        raise ValueError(
            f"a budget of KL is measured in KL, got TARGET={request['target']} beside "
            f"BUDGET={shortened(request['budget'])}: leave TARGET= away"
        )
    if len(names) > 1:
        require_same_architecture(*names)
    for name in names:
        require_fitting(name)


def main(arguments: list[str] | None = None) -> None:
    """Check what ``make diagnose`` was asked for, ``-p name=value`` each, before a notebook starts."""
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.diagnosis")
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE")
    pairs = [tuple(text.split("=", 1)) for text in parser.parse_args(arguments).p]
    given = dict(pairs)
    try:
        for name, value in pairs:
            if value != given[name]:
                raise ValueError(
                    f"{name} must be given once, got {shortened(value)} and {shortened(given[name])}: name one of "
                    "FORMAT=, RECIPE= and REFERENCE_MODEL="
                )
        given = {name: typed(name, text) for name, text in given.items()}
        defaults = {"model": EMBEDDED, "data": "", "format": "bf16", "budget": "1 site", "windows": 1, "length": 2}
        request = defaults | given
        names = [name for name in (request["model"], request.get("reference_model")) if name]
        for name in names:
            require_readable(name)  # takes no time
        require_request(request, names)
    except (ValueError, OSError) as refused:
        sys.exit(f"make diagnose: {refused}")


if __name__ == "__main__":
    main()
