"""Files that appear whole or not at all, and whose damage is noticed."""

import errno
import hashlib
import os
import shutil
import socket
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write ``content`` (text as UTF-8) to ``path``: the file appears complete, or stays as it was.

    Raises OSError where that is not possible; where the disk is full, the message says how much is missing.
    """
    data = memoryview(content.encode() if isinstance(content, str) else content).cast("B")
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    written = 0
    try:
        try:
            with partial.open("wb", buffering=0) as file:
                while written < len(data):
                    written += file.write(data[written : written + 2**24])
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(_explained(error, path, len(data))) from error


def write_sealed(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` behind its checksum, whole as ``write_whole`` does."""
    write_whole(path, hashlib.sha256(content).digest() + content)


def read_sealed(path: Path) -> bytes:
    """Return what ``write_sealed`` wrote to ``path``; raises ValueError where a byte of the file has changed."""
    written = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(written[size:]).digest() != written[:size]:
        raise ValueError("its bytes are not those that were written")
    return written[size:]


def _explained(error: OSError, path: Path, size: int) -> str:
    if error.errno not in FULL:
        return f"{path} must be a file that can be written, but that is not possible ({error}): mend that, and go on"
    free = shutil.disk_usage(path.parent).free
    return (
        f"{path} must fit on the disk, but the disk is full: the file has {size:,} bytes, {free:,} are free, "
        f"{max(size - free, 1):,} are missing: free them, then the same command goes on"
    )
