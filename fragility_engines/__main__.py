"""Say whether rounding explains an engine's log-probabilities. ``make compare`` calls this."""

import argparse
import os
import sys

from fragility_lab import paths
from fragility_lab.inputs.names import EMBEDDED
from fragility_lab.running.files import require_room, write_whole


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fragility_engines", description=__doc__)
    parser.add_argument("--log", default="", help="JSON lines of tokens and log-probabilities (docs/engines.md)")
    parser.add_argument("--model", default=EMBEDDED, help="hub name or local path of the fp32 model, or a .gguf file")
    parser.add_argument("--recipe", default="bf16", help="format or recipe that the engine is said to run")
    parser.add_argument("--against", default="", help="log of another engine, which stands in the place of fp32")
    parser.add_argument("--checkpoint", default="", help="other weights of the model, which an engine may have")
    parser.add_argument("--results", default="engines", help="folder in outputs for the page")
    parser.add_argument("--seed", type=int, default=0, help="draws the sign vectors")
    asked = parser.parse_args(arguments)
    if not asked.log:
        sys.exit("make compare: an engine's log is compared, got none: give LOG=log.jsonl (docs/engines.md)")
    try:
        paths.require_folder_name(asked.results)
        from fragility_engines.logs.sequences import read  # here: it takes a second, and may be interrupted

        for path in filter(None, (asked.log, asked.against)):
            read(path)
        require_room(paths.OUTPUTS / asked.results, "results", "free some, or mend the folder's rights", make=False)
        from fragility_engines.comparison.compare import compare
        from fragility_engines.comparison.page import page

        found = compare(asked.log, asked.model, asked.recipe, asked.against, asked.seed, asked.checkpoint)
        path = paths.output_folder(asked.results) / "comparison.html"
        write_whole(path, page(found))
    except (ValueError, OSError) as refused:
        sys.exit(f"make compare: {refused}")
    except KeyboardInterrupt:
        sys.exit("make compare: interrupted before the page was written")
    # at once, as a reader such as head may close the pipe after the first line
    print("\n".join([found.verdict.line, *found.signs, "", f"page: {os.path.relpath(path)}"]))


if __name__ == "__main__":
    main()
