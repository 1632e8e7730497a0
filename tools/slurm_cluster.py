"""Ask SLURM for workers and keep them until all is done: ``python tools/slurm_cluster.py cluster.json --workers 50``.

Then, in another shell, ``make reproduce SCHEDULER=cluster.json``. Each worker is a job of its own, so lost nodes are
replaced one by one. Ctrl-C or SIGTERM ends all jobs. Further options of ``sbatch`` follow ``--``.
"""

import argparse
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

from dask_jobqueue import SLURMCluster

from fragility_lab.paths import PROJECT


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write how the scheduler is reached, on a shared disk")
    parser.add_argument("--workers", type=int, default=1, help="jobs, each with one worker")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a worker")
    parser.add_argument("--memory", default="16GB", help="memory of a worker")
    parser.add_argument("--walltime", default="04:00:00", help="longest time of a job")
    parser.add_argument("--gpu", action="store_true", help="give each worker one GPU")
    parser.add_argument("options", nargs="*", help="further options of sbatch, after --")
    given = parser.parse_args(arguments)
    extra = [*given.options, *(["--gres=gpu:1"] if given.gpu else [])]
    path = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cluster = SLURMCluster(
        cores=given.threads,
        processes=1,
        memory=given.memory,
        walltime=given.walltime,
        job_extra_directives=extra,
        job_script_prologue=[f"export PYTHONPATH={shlex.quote(path)}"],
        python=sys.executable,
        scheduler_options={"scheduler_file": str(given.file)},
    )
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with cluster:
        cluster.scale(jobs=given.workers)
        print(f"SCHEDULER={given.file}, dashboard: {cluster.dashboard_link}", flush=True)
        done.wait()


if __name__ == "__main__":
    main()
