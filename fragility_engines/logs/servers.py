"""Servers of engines: which one it is, and how it is asked for the log-probabilities of given tokens.

What each must be sent is in its documentation: vLLM and SGLang score a prompt in one answer, llama.cpp's server only
what it generates, so that it is made to generate the text. Servers that only know OpenAI's ``echo`` say the tokens as
texts, which are compared with the text that was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fragility_engines.logs.sequences import Scored, of_answer, scored
from fragility_engines.logs.transport import Client, ServerError

REFUSED = (400, 404, 405, 415, 422)  # statuses of a server that does not know what it was asked
FORCED = 1e4  # added to a logit: no other token is sampled then
CERTAIN = -1e-6  # log-probability of a token that the bias itself made certain


@dataclass(frozen=True)
class Text:
    """A window as tokens and as the text behind its first ``opening`` tokens; ``again`` are the tokens of this text."""

    tokens: tuple[int, ...]
    text: str = ""
    again: tuple[int, ...] = ()
    opening: int = 0


@dataclass(frozen=True)
class Server:
    """A server that runs ``engine``, one of ENGINES, and calls its model ``name``; ``top`` tokens are asked for."""

    client: Client
    engine: str
    name: str = ""
    top: int = 5

    def score(self, window: Text) -> Scored:
        """The log-probabilities of ``window``. Raises ServerError, also if the answer scores other tokens or none."""
        try:
            return ENGINES[self.engine](self, window)
        except ValueError as error:
            raise ServerError(f"{self.client} must score what it was asked for, but {error}") from error


def detected(client: Client, engine: str = "", top: int = 5) -> Server:
    """The server of ``client``, which says itself what it runs unless an ``engine`` is given.

    Raises ServerError if nothing answers, and ValueError for another ``engine``.
    """
    if engine and engine not in ENGINES:
        raise ValueError(f"ENGINE must be one of {', '.join(ENGINES)}, got {engine!r}")
    models = (answer(client, "/v1/models") or {}).get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    owner, name = str(first.get("owned_by", "")).lower(), str(first.get("id", ""))
    if not engine:
        engine = OWNERS.get(owner) or next(
            (engine for path, engine in ASKED.items() if answer(client, path)), "openai" if first else ""
        )
    if not engine:
        raise ServerError(
            f"{client} must be a server of {', '.join(ENGINES)}, but it answers neither /v1/models nor "
            f"{', '.join(ASKED)}: check the URL, or name the engine (ENGINE=)"
        )
    return Server(client, engine, name, top)


def answer(client: Client, path: str) -> dict[str, Any] | None:
    """The answer of ``client`` at ``path``; None if the server does not know the path."""
    try:
        return client.ask(path)
    except ServerError as error:
        if error.status in REFUSED or error.status == 200:
            return None
        raise


def checked(found: Scored, tokens: Sequence[int], unscored: int = 1) -> Scored:
    """The part of ``found`` for the asked ``tokens``, without generated tokens; the first ``unscored`` have no number.

    Raises ValueError for other tokens, and for tokens that were not scored.
    """
    length = len(tokens)
    if (given := found.tokens[:length].tolist()) != [*tokens]:
        at = next((i for i, (one, other) in enumerate(zip(given, tokens)) if one != other), len(given))
        raise ValueError(
            f"the answer must be of the tokens that were sent, got {given[at] if at < len(given) else 'none'} for "
            f"{tokens[at]} at token {at}"
        )
    if (missing := np.flatnonzero(np.isnan(found.logprobs[unscored:length]))).size:
        raise ValueError(f"every token must have a log-probability, got none at token {missing[0] + unscored}")
    return Scored(found.tokens[:length], found.logprobs[:length], found.tops[:length])


def only(answered: dict[str, Any]) -> Scored:
    """The sequence of an answer. Raises ValueError if it has none or several."""
    found = of_answer(answered)
    if len(found) != 1:
        raise ValueError(f"the answer must be of one sequence, got {len(found)}")
    return found[0]


def choice_of(answered: dict[str, Any]) -> dict[str, Any]:
    """The one choice of an answer of completions. Raises ValueError for another number."""
    choices = answered.get("choices")
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise ValueError(f"the answer must have one choice, got {choices!r:.100}")
    return choices[0]


def vllm(server: Server, window: Text) -> Scored:
    """The scores of a ``window`` by vLLM, which must generate a token after it."""
    answered = server.client.ask(
        "/v1/completions",
        {
            "model": server.name, "prompt": [*window.tokens], "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": server.top, "return_token_ids": True,
        },
    )  # fmt: skip
    choice = choice_of(answered)
    # Versions before return_token_ids say the tokens in the entries alone.
    given = choice.get("prompt_logprobs")
    if choice.get("prompt_token_ids") is None and isinstance(given, list) and len(given) == len(window.tokens):
        choice["prompt_token_ids"] = [*window.tokens]
    return checked(only(answered), window.tokens)


def sglang(server: Server, window: Text) -> Scored:
    """The scores of a ``window`` by SGLang."""
    answered = server.client.ask(
        "/generate",
        {
            "input_ids": [*window.tokens], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": server.top,
        },
    )  # fmt: skip
    return checked(only(answered), window.tokens)


def llama_cpp(server: Server, window: Text) -> Scored:
    """The scores of a ``window`` by llama.cpp's server, in as many answers as it has tokens.

    The server gives log-probabilities of what it generates. A bias forces the next token of the text. Probabilities are
    those of the logits before it, as long as "post_sampling_probs" is not asked for.
    """
    values: list[float] = []
    tops: list[dict[str, float]] = []
    for at, token in enumerate(window.tokens[1:], 1):
        prompt = [*window.tokens[:at]]
        answered = server.client.ask(
            "/completion",
            {
                "prompt": prompt, "n_predict": 1, "n_probs": max(1, server.top), "temperature": 0.0,
                "logit_bias": [[token, FORCED]], "cache_prompt": True, "post_sampling_probs": False,
            },
        )  # fmt: skip
        found = checked(only(answered | {"prompt": prompt}), window.tokens[: at + 1], at)
        value = float(found.logprobs[at])
        values.append(value)
        top = found.tops[at] if found.tops else None
        tops.append({str(one): v for one, v in ((top or {}) | {token: value}).items()})
    if all(value > CERTAIN for value in values):
        raise ValueError(
            "log-probabilities must be those of the model, got 0 at every token: the server counts logit_bias in them"
        )
    return scored([*window.tokens], [None, *values], [None, *tops] if server.top else ())


def openai(server: Server, window: Text) -> Scored:
    """The scores of a ``window`` by a server that echoes prompts: its tokens, or its text if it takes none."""
    try:
        return echoed(server, window, [*window.tokens])
    except ServerError as error:
        if error.status not in (*REFUSED, 500) or not window.text:
            raise
        return openai_text(server, window)


def openai_text(server: Server, window: Text) -> Scored:
    """The scores of a ``window`` by a server that echoes texts, and begins them as the tokenizer does."""
    return echoed(server, window, window.text)


def echoed(server: Server, window: Text, prompt: str | list[int]) -> Scored:
    """The scores of a ``window``, sent as ``prompt``, in a completion that echoes it.

    A text comes back as the tokens that it has by itself, without the opening.
    """
    answered = server.client.ask(
        "/v1/completions",
        {
            "model": server.name, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "echo": True,
            "logprobs": max(1, server.top),
        },
    )  # fmt: skip
    tokens, hidden = (window.again, window.opening) if isinstance(prompt, str) else (window.tokens, 0)
    logprobs = choice_of(answered).get("logprobs")
    named = [logprobs.get(name) for name in ("token_logprobs", "tokens")] if isinstance(logprobs, dict) else [None]
    if not isinstance(named[0], list) or not isinstance(named[-1] or [], list):
        raise ValueError(f"the answer must have logprobs of the echoed prompt, got {logprobs!r:.100}")
    values, pieces, count = named[0], named[1] or [], len(tokens) - hidden
    if len(values) not in (count, count + 1):
        raise ValueError(f"the answer must score {count} tokens of the prompt, got {len(values)} log-probabilities")
    if window.text and not spelled(pieces[:count], window.text):
        raise ValueError(f"the answer must be of the text that was sent, got {pieces[:count]!r:.100}")
    return checked(scored([*tokens], [*([None] * hidden), *values[:count]]), tokens, hidden + 1)


def spelled(pieces: Sequence[Any], text: str) -> bool:
    """True if ``text`` has all ``pieces`` in this order, as far as they are printable ASCII.

    Servers spell spaces and parts of characters in several ways, and llama-cpp-python leaves out long tokens.
    """
    left = letters(text)
    for piece in map(letters, map(str, pieces)):
        if piece not in left:
            return False
        left = left.partition(piece)[2] if piece else left
    return True


def letters(text: str) -> str:
    """The printable ASCII of ``text``, without spaces."""
    return "".join(letter for letter in text if "!" <= letter <= "~")


ENGINES: dict[str, Callable[[Server, Text], Scored]] = {
    "vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp, "openai": openai, "openai-text": openai_text,
}  # fmt: skip
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "me": "openai-text"}  # by /v1/models
ASKED = {"/get_model_info": "sglang", "/props": "llama.cpp"}  # by the path that only this engine answers
