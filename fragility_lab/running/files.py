"""Files that appear whole or not at all, with checksums that show damage."""

import errno
import hashlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

FULL = errno.ENOSPC
LIMITS = {errno.EDQUOT: "a quota is used up", errno.EFBIG: "files may not be as large here (ulimit -f)"}
ROOM = 2**20  # bytes that a folder must take before work starts


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write ``content`` (text as UTF-8) to ``path``: the file appears complete, or stays as it was.

    Raises OSError if that is not possible; if the disk is full, the message says how much room is missing.
    """
    data = memoryview(content.encode() if isinstance(content, str) else content).cast("B")
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        try:
            partial.write_bytes(data)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != FULL:
            reason = LIMITS.get(error.errno or 0, str(error))
            how = f"must be a file that can be written, but that is not possible ({reason}): mend that, and go on"
            raise OSError(f"{path} {how}") from error
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"{path} must fit on the disk, but the disk is full: the file has {len(data):,} bytes, {free:,} are free, "
            f"{max(len(data) - free, 1):,} are missing: free them, then the same command goes on"
        ) from error


def require_room(folder: Path, what: str, mend: str, make: bool = True) -> None:
    """Raises OSError unless a file of ROOM bytes can be written to ``folder``.

    A missing folder is made, or else (``make``) the one that is to hold it is tried. The message says ``what`` the
    folder is for, and ends with the ``mend``.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder if make else there, prefix=".room-") as file:
            file.write(bytes(ROOM))
    except OSError as error:
        full = f"is full ({shutil.disk_usage(there).free:,} bytes are free)"
        reason = full if error.errno == FULL else f"cannot be written to ({LIMITS.get(error.errno or 0, str(error))})"
        raise OSError(f"{what} must take files of {ROOM:,} bytes, but {folder} {reason}: {mend}") from error


def write_sealed(path: Path, content: bytes) -> None:
    """Write a checksum and ``content`` to ``path``, complete or not at all, as ``write_whole`` does."""
    write_whole(path, hashlib.sha256(content).digest() + content)


def read_sealed(path: Path) -> bytes:
    """Return the content that ``write_sealed`` wrote to ``path``; raises ValueError if a byte has changed since."""
    written = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(written[size:]).digest() != written[:size]:
        raise ValueError("its bytes are not those that were written")
    return written[size:]
