"""Have a running server score windows of a text, and write the log for ``make compare``. ``make score`` calls this."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from fragility_engines.logs.sequences import Scored, line_of, of_line, shortened
from fragility_engines.logs.servers import ENGINES, Server, Text, detected
from fragility_engines.logs.transport import Client
from fragility_lab import paths

MOST_WINDOWS, LONGEST_WINDOW, MOST_TOP = 1024, 2**17, 100
KEY = "SCORE_KEY"  # the variable of the environment that has the server's key, if it wants one


def require_log(path: Path) -> None:
    """Raises ValueError if ``path`` is something other than a file: a log replaces what is there."""
    if not path.name or (path.exists() and not path.is_file()):
        raise ValueError(f"LOG must be a file to write, got the folder, pipe or device {path}: name a file")


def windows_of(model: str, data: str, length: int, count: int, seed: int = 0) -> list[Text]:
    """Windows of ``length`` tokens of the text ``data``, by the tokenizer of ``model``, whose weights are not read.

    They are those of ``make diagnose``. Raises the errors of ``checkpoints`` and ``text``, and ValueError for windows
    beyond the model's context and for a tokenizer of another model.
    """
    from fragility_core.models.padding import context_length
    from fragility_engines.comparison.measuring import require_fitting
    from fragility_lab.inputs import checkpoints
    from fragility_lab.inputs.text import load_rows, opening, select_windows, tokenize

    config, tokenizer = checkpoints.load_config(model), checkpoints.load_tokenizer(model)
    begins, stream = opening(tokenizer), tokenize(load_rows(data), tokenizer)
    if length > (context := context_length(config)):
        raise ValueError(f"a window must fit the context of {model}, {context} tokens, got {length} (LENGTH=)")
    found = []
    for window in select_windows(stream, length, count, seed, opening=begins)[1].tolist():
        text = str(tokenizer.decode(window[len(begins.ids) :]))
        again = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(Text((*window,), text, (*begins.ids, *again), len(begins.ids)))
    require_fitting(config, [Scored(np.array(each.tokens), np.zeros(len(each.tokens))) for each in found])
    return found


def identity(server: Server, window: Text) -> dict[str, object]:
    """The origin that a line of a log states; an unfinished log is only continued with an equal origin."""
    asked = {"top": server.top, "sent": [*window.tokens]}
    return {"engine": server.engine, "server": str(server.client), "model": server.name, **asked}


def lines_kept(path: Path, server: Server, windows: list[Text]) -> list[str]:
    """The first lines of the unfinished log at ``path`` that have the scores of ``windows`` by ``server``.

    The last line may be cut where a process was killed.
    """
    kept: list[str] = []
    try:
        for line, window in zip(path.read_text(encoding="utf-8").splitlines(keepends=True), windows):
            of_line(line)
            if not line.endswith("\n") or (found := json.loads(line)) != found | identity(server, window):
                break
            kept.append(line)
    except (OSError, ValueError):
        pass
    return kept


def scored_lines(server: Server, windows: list[Text]) -> Iterator[str]:
    """The line of each window, as ``server`` scores it."""
    for window in windows:
        yield line_of(server.score(window), **identity(server, window))


def write_log(server: Server, windows: list[Text], path: Path) -> int:
    """Write the scores of ``windows`` to ``path``, and return the number that an interrupted run had written.

    Until all are there, the finished scores lie in a file beside it that ends in ".unfinished", also after an error or
    an interrupt.
    """
    from fragility_lab.running.files import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    lines = lines_kept(unfinished, server, windows)
    kept, start = len(lines), time.monotonic()
    if kept:
        print(f"{kept} of {len(windows)} windows are in {unfinished} (delete it to ask again)", file=sys.stderr)
    try:
        write_whole(unfinished, "".join(lines))
        with open(unfinished, "a", encoding="utf-8") as file:
            for line in scored_lines(server, windows[kept:]):
                file.write(line)
                file.flush()
                lines.append(line)
                took = time.monotonic() - start
                print(f"window {len(lines)} of {len(windows)} scored, {took:.0f} s", file=sys.stderr)
    except BaseException:
        if len(lines):
            there = f"{len(lines)} of {len(windows)} windows are in {unfinished}"
            print(f"{there}: the same command goes on", file=sys.stderr)
        raise
    os.replace(unfinished, path)
    return kept


def bounded(least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers from ``least`` to ``most``, which argparse calls."""

    def read(word: str) -> int:
        if not (word.isdecimal() and least <= int(word) <= most):
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {shortened(word)}")
        return int(word)

    return read


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fragility_engines.logs.score", description=__doc__)
    parser.add_argument("--url", default="", help="the server, as http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="hub name, path or .gguf file of the model that it serves")
    parser.add_argument("--data", default="embedded", help="text: a file, a data set of the hub, or an embedded one")
    parser.add_argument("--windows", type=bounded(1, MOST_WINDOWS), default=4, help="windows of the text (4)")
    parser.add_argument("--length", type=bounded(2, LONGEST_WINDOW), default=256, help="tokens of a window (256)")
    parser.add_argument("--seed", type=bounded(0, 10**9), default=0, help="draws the windows")
    parser.add_argument("--top", type=bounded(0, MOST_TOP), default=5, help="most probable tokens to ask for (5)")
    parser.add_argument("--engine", default="", help=f"one of {', '.join(ENGINES)}; the server says it unless given")
    parser.add_argument("--within", type=bounded(1, 10**6), default=3600, help="seconds for all (3600)")
    parser.add_argument("--log", default="", help="file to write (outputs/engines/log.jsonl)")
    asked = parser.parse_args(arguments)
    try:
        for name, value in (("URL", asked.url), ("MODEL", asked.model)):
            if not value:
                raise ValueError(f"a server scores the text of a model, got no {name}: give URL= and MODEL=")
        if asked.log:
            require_log(Path(asked.log))
        client = Client(asked.url, asked.within, key=os.environ.get(KEY, "").strip())
        server = detected(client, asked.engine, asked.top)  # takes no time, unlike the tokenizer
        windows = windows_of(asked.model, asked.data, asked.length, asked.windows, asked.seed)
        path = Path(asked.log) if asked.log else paths.output_folder("engines") / "log.jsonl"
        kept = write_log(server, windows, path)
    except (ValueError, OSError) as refused:
        sys.exit(f"make score: {refused}")
    except KeyboardInterrupt:
        sys.exit("make score: interrupted")
    again = f", {kept} of them in an earlier run" if kept else ""
    count = f"{len(windows)} window{'s' * (len(windows) > 1)}"
    print(f"{count} scored by {server.engine} ({server.name or 'no name'}){again}\nlog: {path}")


if __name__ == "__main__":
    main()
