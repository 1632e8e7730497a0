"""A model hub on this machine: one repository, "someone/tiny", in the hub's own layout, that can misbehave."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY, COMMIT = "someone/tiny", "0" * 39 + "1"
LARGE = ("model.safetensors", "train.jsonl")


class Hub(BaseHTTPRequestHandler):
    """Answers for the files of ``folder``; ``behaviour`` says how."""

    folder: Path
    behaviour = "good"
    asked: Counter

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.asked[name] += 1
        if self.refused(name):
            return
        if self.path.startswith((f"/api/models/{REPOSITORY}", f"/api/datasets/{REPOSITORY}")):
            self.describe()
            return
        file = self.folder / name
        if f"/{REPOSITORY}/resolve/" not in self.path or not file.is_file():
            self.error(404, "EntryNotFound" if REPOSITORY in self.path else "RepoNotFound", "not here")
            return
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        large = name in LARGE
        if large and self.behaviour == "wrong checksum":
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(200)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Length": len(content)}
        for header, value in headers.items():
            self.send_header(header, str(value))
        self.end_headers()
        if body:
            self.send(content, large)

    def describe(self) -> None:
        """The repository's commit and files, or none for the tree of a folder."""
        paths = sorted(self.folder.iterdir())
        files = [{"rfilename": path.name} for path in paths]
        known: object = {"id": REPOSITORY, "sha": COMMIT, "siblings": files}
        if "/tree/" in self.path:
            whole = self.path.partition("?")[0].endswith((COMMIT, "/main"))
            entries = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": COMMIT} for p in paths]
            known = entries if whole else []
        content = json.dumps(known).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send(self, content: bytes, large: bool) -> None:
        if large and self.behaviour == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            self.connection.shutdown(2)
            return
        if large and self.behaviour == "slow":
            for start in range(0, len(content), 1 << 14):
                self.wfile.write(content[start : start + (1 << 14)])
                time.sleep(0.05)
            return
        self.wfile.write(content)

    def refused(self, name: str) -> bool:
        behaviour = self.behaviour
        if behaviour == "flaky" and self.asked[name] == 1:
            self.error(503, "", "try again")
        elif behaviour == "silent":
            time.sleep(600)
        elif behaviour == "gated":
            self.error(403, "GatedRepo", "Access to model someone/tiny is restricted")
        elif behaviour.isdigit():
            self.error(int(behaviour), "RepoNotFound" if behaviour in ("401", "404") else "", f"answer {behaviour}")
        else:
            return False
        return True

    def error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, type[Hub]]]:
    """The address of a hub with the files of ``folder``, and its class, to set the ``behaviour`` of."""
    handler = type("Handler", (Hub,), {"folder": folder, "asked": Counter()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
