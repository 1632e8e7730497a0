"""Questions to a server over HTTP: JSON in, JSON out, bounded in time and size, and nowhere but where the user said."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from fragility_engines.logs.sequences import shortened

LONGEST = 120.0  # seconds that one answer may take
MOST = 2**26  # bytes of an answer
PIECE = 2**16  # bytes read at once
WAITS = (1.0, 3.0)  # seconds before an answer is asked for again
PASSING = (429, 500, 502, 503, 504)  # statuses of a server that may answer later


class ServerError(OSError):
    """A server that gave no answer, or not one that can be used; ``status`` is that of HTTP, 0 without one.

    ``passing`` is True if a later request may succeed.
    """

    def __init__(self, message: str, status: int = 0, passing: bool = False):
        super().__init__(message)
        self.status, self.passing = status, passing


class Client:
    """Asks the server at ``url``, http or https, for at most ``seconds`` in all.

    An answer takes at most ``longest`` seconds and ``most`` bytes. An error that may pass is retried after each of
    ``WAITS``. A redirect is not followed, and no proxy is used. ``key`` is sent as the bearer's. Raises ValueError
    for a ``url`` that is none of a server, and for a ``key`` that is no word of ASCII.
    """

    def __init__(
        self, url: str, seconds: float = 3600.0, longest: float = LONGEST, most: int = MOST, key: str = "",
        sleep: Callable[[float], object] = time.sleep,
    ):  # fmt: skip
        self.kind, self.host, self.port, self.path = address(url)
        self.end, self.longest, self.most, self.sleep = time.monotonic() + seconds, longest, most, sleep
        self.headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
        if key:
            if not (key.isascii() and key.isprintable()):  # an error of http.client would show it
                raise ValueError("the key of a server (SCORE_KEY) must be one line of ASCII, got other characters")
            self.headers["Authorization"] = f"Bearer {key}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object that the server answers at ``path``, to a ``body`` that is posted if there is one.

        Raises ServerError, which says what came in its place.
        """
        waits = [*WAITS]
        while True:
            try:
                return self._once(path, body)
            except ServerError as error:
                if not (error.passing and waits) or time.monotonic() + waits[0] > self.end:
                    raise
                self.sleep(waits.pop(0))

    def _once(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The answer to one request. All of it has one deadline: a server may also send a byte now and then."""
        left = min(self.longest, self.end - time.monotonic())
        if left <= 0:
            raise ServerError(f"{self} must answer within the time for all, which is over: give it more (WITHIN=)")
        connection, late = self.kind(self.host, self.port, timeout=left), threading.Event()
        timer = threading.Timer(left, late.set)
        data = None if body is None else json.dumps(body).encode()
        headers = self.headers | ({} if data is None else {"Content-Type": "application/json"})
        try:
            connection.connect()
            timer = threading.Timer(left, stop, (connection.sock, late))
            timer.daemon = True
            timer.start()
            connection.request("GET" if data is None else "POST", self.path + path, data, headers)
            response = connection.getresponse()
            return self._answer(path, response, self._body(response))
        except (OSError, HTTPException) as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise ServerError(
                    f"{self} must answer {path} within {left:.3g} s, and did not: is it overloaded? Ask for shorter "
                    "windows (LENGTH=)", passing=True
                ) from error  # fmt: skip
            if isinstance(error, ServerError):
                raise
            name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ServerError(
                f"{self} must answer {path}, got {shortened(name, 200)}: is the server up, and is this its URL?",
                passing=not isinstance(error, (socket.gaierror, ssl.SSLError)),
            ) from error
        finally:
            timer.cancel()
            connection.close()

    def _body(self, response: HTTPResponse) -> bytes:
        """The body of a ``response``, which must be whole and not too large."""
        pieces, size = [], 0
        while piece := response.read(PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > self.most:
                raise ServerError(
                    f"{self} must answer with at most {self.most:,} bytes, got more: take shorter windows"
                )
        if response.length:
            raise ServerError(
                f"{self} must send all bytes that it announced, got {size:,} and not {response.length:,} more",
                passing=True,
            )
        return b"".join(pieces)

    def _answer(self, path: str, response: HTTPResponse, body: bytes) -> dict[str, Any]:
        """The object in the ``body`` of a ``response`` that is no error."""
        status = response.status
        if 300 <= status < 400:
            raise ServerError(
                f"{self} must answer {path} itself, got a redirect ({status}) to "
                f"{shortened(response.getheader('Location'))}: give that URL if it is the server you mean", status
            )  # fmt: skip
        found, trouble = parsed(body)
        message = error_in(found) if found is not None else ""
        if not 200 <= status < 300:
            told = message or shortened(body.decode(errors="replace"), 200)
            raise ServerError(
                f"{self} must answer {path}, got {status} {response.reason}: {told}", status, status in PASSING
            )
        if found is None:
            page = " (a page of HTML: is this the URL of the server itself?)" if body.lstrip()[:1] == b"<" else ""
            raise ServerError(
                f"{self} must answer {path} with a JSON object, got {trouble} in "
                f"{shortened(body.decode(errors='replace'))}{page}", status
            )  # fmt: skip
        if message:
            raise ServerError(f"{self} must answer {path}, got an error: {message}", status)
        return found


def stop(sock: socket.socket, late: threading.Event) -> None:
    """Set ``late`` and end all reading from ``sock``."""
    late.set()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def address(url: str) -> tuple[type[HTTPConnection], str, int, str]:
    """The kind of connection, host, port and path of ``url``, the last without "/v1". Raises ValueError for others."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        (parts.hostname or "").encode("idna"), parts.path.encode("ascii")
    except ValueError as error:
        raise ValueError(f"URL must be that of a server, as http://127.0.0.1:8000 is, got {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"URL must be that of a server, as http://127.0.0.1:8000 is, got {url!r}")
    if parts.username is not None:
        raise ValueError("URL must have no name and password in it: a key is read from the variable SCORE_KEY")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind, parts.hostname, port or kind.default_port, parts.path.rstrip("/").removesuffix("/v1")


def parsed(body: bytes) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in ``body``; or None, and what there is instead."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name}, which is no number of JSON,")

    try:
        found = json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        return None, "nothing" if not body else str(error)[:100]
    return (found, "") if isinstance(found, dict) else (None, f"a {type(found).__name__}")


def error_in(found: dict[str, Any]) -> str:
    """The message of an error in an answer, as the servers write them; "" if it is none."""
    told = found.get("error") or (found.get("message") if found.get("object") == "error" else found.get("detail"))
    if isinstance(told, dict):
        told = told.get("message") or told
    return shortened(told, 300) if told else ""
