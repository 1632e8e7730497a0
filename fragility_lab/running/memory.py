"""The memory of this process at its peak."""

import ctypes
import gc
from pathlib import Path


def forget_peak() -> None:
    """Forget the peak of this process's memory so far, and give back what is free; on Linux alone."""
    gc.collect()
    if (clear := Path("/proc/self/clear_refs")).exists():
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")


def peak() -> float:
    """MiB of memory of this process at its peak; NaN on systems other than Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM")), float("nan"))
