"""Time the work of a diagnosis alone and beside other programs: ``python tools/busy.py MODEL DATA``.

The work is the prediction and the measurement of some windows in bf16. Each WAY of sharing the cores is timed in fresh
processes, alone and beside one busy loop per core. The ways take turns, and the fastest of several repetitions counts,
so other programs of the machine disturb the comparison little. A way is "project" (what this project sets), "default"
(what PyTorch does by itself), or settings such as "threads=1", "spin=1000" or "threads=2,spin=0": the number of
threads, and how often a thread that waits looks before it sleeps (GOMP_SPINCOUNT). Seconds of the clock and of the
processor are listed, and the ratio to the fastest way alone.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
WAYS = ("project", "default", "spin=0", "spin=1000", "spin=10000", "spin=100000", "threads=1")
SPINS = "10000"  # as in the Makefile


def environment(way: str) -> dict[str, str]:
    """The variables of a process that works in ``way``; raises ValueError for a way that is not known."""
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    if way == "default":
        return kept
    if way == "project":
        return kept | {"GOMP_SPINCOUNT": SPINS}
    names = {"spin": "GOMP_SPINCOUNT", "threads": "OMP_NUM_THREADS"}
    for setting in way.split(","):
        name, _, value = setting.partition("=")
        if name not in names or not value.isdecimal():
            raise ValueError(f'a way is "project", "default" or such as "threads=2,spin=1000", got {way!r}')
        kept[names[name]] = value
    return kept


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def seconds(arguments: list[str], way: str) -> tuple[float, float, int]:
    """Seconds of the clock, seconds of the processor and threads of one work, done in a fresh process."""
    own = ["--own-threads"] if way == "project" else []
    command = [sys.executable, __file__, *arguments, "--once", *own]
    done = subprocess.run(command, env=environment(way), text=True, stdout=subprocess.PIPE, check=True)
    clock, processor, threads = done.stdout.split()[-3:]
    return float(clock), float(processor), int(threads)


def work_once(model: str, data: str, windows: int, length: int, own_threads: bool) -> None:
    """Predict and measure, and print the seconds of the clock, those of the processor, and the threads."""
    import torch

    from fragility_lab.diagnosis import Diagnosis, Request, load
    from fragility_lab.diagnosis.needs import Forecast, timed
    from fragility_lab.diagnosis.run import Work, measure_windows, predict_windows
    from fragility_lab.running.threads import on_free_cores

    request = Request(model, data, "bf16", "1 site", windows, length, reference="yes")
    loaded, tokens = load(request)
    for _ in range(2):
        timed(loaded.model, tokens[:1], loaded.device)  # the first passes take longer
    work = Work(request, loaded, tokens, Forecast(0.0, 0, None), Diagnosis(request))
    with on_free_cores() if own_threads else nullcontext():
        clock, processor = time.perf_counter(), time.process_time()
        predict_windows(work)
        measure_windows(work)
        print(time.perf_counter() - clock, time.process_time() - processor, torch.get_num_threads())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("data", nargs="?", default="embedded")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)), help="busy loops; one per core")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--own-threads", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.once:
        return work_once(given.model, given.data, given.windows, given.length, given.own_threads)
    passed = [given.model, given.data, "--windows", str(given.windows), "--length", str(given.length)]
    best: dict[tuple[str, int], tuple[float, float, int]] = {}
    for repetition in range(given.repetitions):
        for way in given.ways:
            for loops in (0, given.loops):
                with busy_loops(loops):
                    found = seconds(passed, way)
                best[way, loops] = min(found, best.get((way, loops), found))
                told = f"{way}, {loops} loops: {found[0]:.2f} s, {found[1]:.2f} s of the processor"
                print(f"{repetition + 1}/{given.repetitions} {told}", file=sys.stderr, flush=True)
    fastest = min(clock for (_, loops), (clock, _, _) in best.items() if not loops)
    print(f"{given.model}, {given.windows} windows of {given.length} tokens; load now {os.getloadavg()[0]:.1f}")
    print(f"{'way':<20} threads  alone (processor, ratio)   beside {given.loops} loops (processor, ratio)")
    for way in given.ways:
        cells = [best[way, loops] for loops in (0, given.loops)]
        said = "   ".join(f"{clock:7.2f} s ({used:.2f} s, {clock / fastest:.2f})" for clock, used, _ in cells)
        print(f"{way:<20} {cells[0][2]:>7}  {said}")
    return None


if __name__ == "__main__":
    main()
