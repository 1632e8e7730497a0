"""The needs of a model in the streamed form, from its configuration alone: memory, bytes to read, and time."""

import argparse
import sys
from typing import Any

import torch

from fragility_lab.diagnosis.needs import BOTH_WAYS, LARGEST, ONCE, reads_a_batch, streamed_memory, whole
from fragility_lab.diagnosis.request import Request
from fragility_lab.diagnosis.timing import ends
from fragility_lab.inputs.checkpoints import load_config
from fragility_lab.inputs.offloaded import on_meta
from fragility_lab.reporting.tables import duration, quantity


def streaming(request: Request, name: str, disk: float, bus: float) -> str:
    """The needs of the model ``name`` in the streamed form, in words. Only the configuration is read.

    ``disk`` and ``bus`` are bytes a second. The dtype of the files is taken to be that of the configuration.
    """
    model = on_meta(name)
    dtype: Any = load_config(name).dtype or torch.float32
    parameters = sum(p.numel() for p in model.parameters())
    size, batch = parameters * dtype.itemsize, min(request.windows, LARGEST)
    memory, estimate = streamed_memory(request, model, batch), BOTH_WAYS * ends(request)
    rows = [
        f"{parameters / 1e9:.2f} B parameters, {quantity(size)} of files in {str(dtype).removeprefix('torch.')}",
        f"memory: {quantity(memory)} streamed, {quantity(whole(request, model))} whole",
    ]
    windows = "a window" if batch == 1 else f"{batch} windows together"
    for what, times in (("an estimate", estimate), ("a diagnosis", reads_a_batch(request, model))):
        speeds = f"{duration(times * size / disk)} from the disk, {duration(times * size / bus)} over the bus"
        rows.append(f"{what} of {windows}: {quantity(times * size)} read, {speeds}")
    rows.append(f"once: {quantity(ONCE * size)} read, {duration(ONCE * size / disk)} from the disk")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Say what a streamed diagnosis of a model needs, before its weights are there."""
    parser = argparse.ArgumentParser(prog="python -m fragility_lab.diagnosis.streaming", description=main.__doc__)
    parser.add_argument("model", help="hub name, or a folder with config.json")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=1, help="that share what is read")
    parser.add_argument("--probes", type=int, default=2, help="backward passes of a window")
    parser.add_argument("--recipe", default="bf16", help="as RECIPE= of make diagnose")
    parser.add_argument("--target", default="hidden", help="as TARGET= of make diagnose")
    parser.add_argument("--disk", type=float, default=3.0, help="GB a second from the disk")
    parser.add_argument("--bus", type=float, default=25.0, help="GB a second to the device")
    given = parser.parse_args(arguments)
    sizes = {"windows": given.windows, "length": given.length, "probes": given.probes, "target": given.target}
    try:
        request = Request(given.model, "embedded", given.recipe, "1 block", **sizes)
        print(streaming(request, given.model, given.disk * 1e9, given.bus * 1e9))
    except (ValueError, OSError) as refused:
        sys.exit(f"{parser.prog}: {refused}")


if __name__ == "__main__":
    main()
