"""A server of one's own: it answers as engines do, from a table of log-probabilities, and fails as they do."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 101


def row(before: list[int]) -> Tensor:
    """Log-probabilities (VOCABULARY,) of the token after those ``before``: any that depend on all of them."""
    generator = torch.Generator().manual_seed(sum((i + 1) * token for i, token in enumerate(before)) + 17)
    return torch.randn(VOCABULARY, generator=generator).double().log_softmax(-1)


def largest(before: list[int], count: int) -> list[tuple[int, float]]:
    """The most probable tokens after those ``before``, and their log-probabilities."""
    values, tokens = row(before).topk(count)
    return [*zip(tokens.tolist(), values.tolist())]


def scores(tokens: list[int]) -> list[float | None]:
    """The log-probability of each of the ``tokens`` after those before it."""
    return [None, *(row(tokens[:at])[token].item() for at, token in enumerate(tokens[1:], 1))]


def of_vllm(asked: dict[str, Any]) -> dict[str, Any]:
    tokens, entries = asked["prompt"], [None]
    for at, token in enumerate(tokens[1:], 1):
        top = largest(tokens[:at], asked["prompt_logprobs"])
        found = {str(t): {"logprob": v, "rank": i, "decoded_token": "x"} for i, (t, v) in enumerate(top, 1)}
        entries.append({str(token): {"logprob": scores(tokens)[at], "rank": 50}} | found)
    return {"choices": [{"prompt_token_ids": tokens, "prompt_logprobs": entries, "token_ids": [3], "text": "x"}]}


def of_sglang(asked: dict[str, Any]) -> dict[str, Any]:
    tokens = asked["input_ids"]
    tops = [[(v, t, None) for t, v in largest(tokens[:at], asked["top_logprobs_num"])] for at in range(1, len(tokens))]
    given = [[value, token, None] for value, token in zip(scores(tokens), tokens)]
    after = {"output_token_logprobs": [[-0.5, 3, None]], "output_top_logprobs": [[[-0.5, 3, None]]]}
    return {"text": "x", "meta_info": {"input_token_logprobs": given, "input_top_logprobs": [None, *tops], **after}}


def of_llama_cpp(asked: dict[str, Any]) -> dict[str, Any]:
    ((token, _),), tokens = asked["logit_bias"], asked["prompt"]
    top = [{"id": t, "token": "x", "logprob": v} for t, v in largest(tokens, asked["n_probs"])]
    return {"completion_probabilities": [{"id": token, "logprob": row(tokens)[token].item(), "top_logprobs": top}]}


def of_echo(asked: dict[str, Any]) -> dict[str, Any]:
    tokens = asked["prompt"]
    logprobs = {"tokens": ["x"] * (len(tokens) + 1), "token_logprobs": [*scores(tokens), -0.5]}
    return {"choices": [{"text": "x", "logprobs": logprobs}]}


def listed(owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "a/model", "object": "model", "owned_by": owner}]}


SERVERS: dict[str, dict[str, Callable[[dict[str, Any]], Any]]] = {  # by engine: what is answered at which path
    "vllm": {"/v1/models": lambda _: listed("vllm"), "/v1/completions": of_vllm},
    "sglang": {"/v1/models": lambda _: listed("sglang"), "/generate": of_sglang},
    "llama.cpp": {"/v1/models": lambda _: listed("llamacpp"), "/completion": of_llama_cpp},
    "openai": {"/v1/models": lambda _: listed("somebody"), "/v1/completions": of_echo},
}


class Handler(BaseHTTPRequestHandler):
    """Answers by ``server.paths``, unless the first of ``server.failing`` did: it is called with the handler."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked):
        self.server.seen.append((self.path, asked, dict(self.headers)))
        if self.command == "POST" and self.server.failing and self.server.failing[0](self, asked):
            if len(self.server.failing) > 1:
                self.server.failing.pop(0)
            return
        if self.path not in self.server.paths:
            self.send(b'{"error": {"message": "no such path"}}', 404)
            return
        self.send(json.dumps(self.server.paths[self.path](asked)).encode())

    def send(self, body: bytes, status: int = 200, length: int | None = None, **headers):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format, *args):
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        pass  # the client may have gone


@contextmanager
def running(engine: str, failing=None):
    """A server of ``engine`` on a port of its own; ``failing(handler, asked)`` may answer a POST in its place."""
    server = Quiet(("127.0.0.1", 0), Handler)
    server.paths, server.seen = SERVERS[engine], []
    server.failing = [failing] if callable(failing) else [*(failing or [])]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def url(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def changed(change: Callable[[Any], Any]):
    """A failure that answers with the right object after ``change``, which returns another object, bytes or None."""

    def fail(handler, asked):
        found = handler.server.paths[handler.path](asked)
        body = change(found)
        body = found if body is None else body
        handler.send(body if isinstance(body, bytes) else json.dumps(body).encode())
        return True

    return fail


def status(code: int, body: bytes = b'{"error": {"message": "the reason"}}', **headers):
    """A failure with a status."""

    def fail(handler, asked):
        handler.send(body, code, **headers)
        return True

    return fail


def passed(handler, asked):
    """No failure."""
    return False


def cut(handler, asked):
    """A body that ends before its announced length."""
    handler.send(b'{"choices": [', length=500)
    return True


def slow(handler, asked):
    """An answer that does not come."""
    time.sleep(1.0)
    return True


def dripping(handler, asked):
    """A byte now and then, each within any time-out of a socket."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    for _ in range(1200):
        time.sleep(0.05)
        handler.wfile.write(b" ")
        handler.wfile.flush()
    return True


def endless(handler, asked):
    """A body without an end."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for _ in range(10000):
        handler.wfile.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
    return True


def chunked(handler, asked):
    """The right answer, in chunks of seven bytes."""
    body = json.dumps(handler.server.paths[handler.path](asked)).encode()
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for at in range(0, len(body), 7):
        piece = body[at : at + 7]
        handler.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    handler.wfile.write(b"0\r\n\r\n")
    return True


def cut_chunks(handler, asked):
    """Chunks without the last one."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b'5\r\n{"cho\r\n')
    handler.close_connection = True
    return True


def hung_up(handler, asked):
    """A connection that is closed without a word."""
    handler.close_connection = True
    return True
