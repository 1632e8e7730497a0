"""Models and texts of a hub: fetched before they are loaded, with a reason for every failure.

``except Exception`` here catches any failure of a library: errors of huggingface_hub, httpx, hf_xet and datasets have
no narrower class in common.
"""

import re
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from fragility_lab.inputs.names import HubError
from fragility_lab.inputs.stored import sha256

T = TypeVar("T")
TIMEOUT = 10  # seconds that the hub may be silent
TRIES = 3  # where the hub answers with an error of its own
WEIGHTS = ["*.safetensors"]  # no pickles
OTHERS = ["*.json", "*.model", "*.txt", "*.jinja"]  # no code
CHECKSUM = re.compile(r"[0-9a-f]{64}")  # the cache calls large files by theirs
MEANINGS = {
    401: "which means that it does not know you or the name: check the name, or log in with `hf auth login`",
    403: "which means that access is restricted: accept the terms on the model's page, then `hf auth login`",
    404: "which means that there is no such repository",
    429: "which means too many requests: wait some minutes, or log in with `hf auth login`",
}


@cache
def snapshot(name: str, weights: bool) -> str:
    """The folder in this machine's cache with the model ``name`` of the hub. Missing files are downloaded.

    Without ``weights`` it has only configuration and tokenizer. If the hub does not answer, the copy in the cache is
    taken as it is, and stderr says so. Raises HubError if there is no copy, and for a download that broke off or has a
    wrong checksum.
    """
    error, started = trouble(name, "model"), time.time()
    wanted: dict[str, Any] = {"allow_patterns": OTHERS + WEIGHTS * weights, "ignore_patterns": ["*/*"]}
    wanted |= {"local_files_only": True} if error else {"etag_timeout": TIMEOUT}
    try:
        folder = retried(lambda: snapshot_download(name, **wanted))
    except Exception as cause:
        broken = f"the download broke off, and the same command goes on from there; {reason(cause)}"
        raise error or HubError(broken) from cause
    if error:
        print(f"{error}: taking {name} from this machine's cache", file=sys.stderr)
    else:
        require_checksums(Path(folder), started)
    return folder


def trouble(name: str, kind: Literal["model", "dataset"]) -> HubError | None:
    """The reason why the hub does not give the repository ``name``; None if it does."""
    ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
    try:
        retried(lambda: ask(name, timeout=TIMEOUT))
    except Exception as cause:
        return HubError(reason(cause))
    return None


def retried(ask: Callable[[], T]) -> T:
    """The result of ``ask``, called up to three times, with pauses, while the hub has an error of its own (5xx)."""
    for attempt in range(1, TRIES):
        try:
            return ask()
        except Exception as cause:
            if (status(cause) or 0) < 500:
                raise
            print(f"{reason(cause)}: trying again ({attempt + 1} of {TRIES})", file=sys.stderr)
            time.sleep(attempt)
    return ask()


def status(cause: BaseException | None) -> int | None:
    """The HTTP status in ``cause``, or in an error from which it was raised; None without one."""
    while cause is not None:
        if code := getattr(getattr(cause, "response", None), "status_code", None):
            return code
        cause = cause.__cause__
    return None


def reason(cause: Exception) -> str:
    """The reason why the hub's answer cannot be used, in one line."""
    if isinstance(cause, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if code := status(cause):
        return f"the hub answers {code}" + (f", {MEANINGS[code]}" if code in MEANINGS else "")
    if "Timeout" in type(cause).__name__:
        return f"the hub did not answer within {TIMEOUT} s"
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def require_checksums(folder: Path, since: float) -> None:
    """Raises HubError if a file downloaded after the time ``since`` has a wrong checksum, or if none was downloaded.

    The file is removed, so that the same command downloads it again.
    """
    if not folder.is_dir():
        raise HubError(
            f"the repository holds none of the files that a model is loaded from, {', '.join(OTHERS + WEIGHTS)}"
        )
    for path in folder.iterdir():
        stored = path.resolve()
        if not CHECKSUM.fullmatch(stored.name) or stored.stat().st_mtime < since:
            continue
        if (found := sha256(stored)) != stored.name:
            stored.unlink()
            path.unlink()
            raise HubError(
                f"{path.name} must have the checksum that the hub says, {stored.name[:12]}…, got {found[:12]}…: it was "
                "removed, and the same command downloads it again"
            )
