"""Memory that is free on a device, within the limits of the process."""

import re
import sys
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on ``device``, within the limits of this process; None if the system does not say."""
    if device.type == "cuda":  # torch keeps memory that it freed
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    table = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text()) if table.is_file() else None
    known = [int(found[1]) * 1024] if found else []
    return min(known + within_limits(), default=None)


def require_room(what: str, takes: int, device: str = "cpu", mend: str = "a smaller model") -> None:
    """Raises ValueError if the bytes that ``what`` takes are not free on ``device``."""
    free = free_memory(torch.device(device))
    if free is not None and takes > free:
        raise ValueError(
            f"{what} must fit into memory and takes {takes / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free: close "
            f"other programs, or take {mend} or a larger machine"
        )


def within_limits() -> list[int]:
    """Bytes that this process may still take by its limit of data (``ulimit -d``) and by that of its control group."""
    status = Path("/proc/self/status")
    if sys.platform != "linux" or not status.is_file():
        return []
    import resource  # there is none on Windows

    def used(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", status.read_text())
        return int(found[1]) * 1024 if found else 0

    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    left = [] if limit == resource.RLIM_INFINITY else [limit - used("VmData")]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            file = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.max")
        elif "memory" in controllers.split(","):
            file = Path("/sys/fs/cgroup/memory", group.lstrip("/"), "memory.limit_in_bytes")
        else:
            continue
        if file.is_file() and (text := file.read_text().strip()).isdecimal() and int(text) < 2**60:
            left.append(int(text) - used("RssAnon"))
    return [max(0, amount) for amount in left]
