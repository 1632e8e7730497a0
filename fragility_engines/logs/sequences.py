"""Log-probabilities by token, as engines write them: JSON Lines, one sequence or one answer of a server a line.

docs/engines.md shows each of the forms (``READERS``).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fragility_lab.inputs.names import PACKED

LARGEST = 1e-3  # a log-probability above 0 by no more than this is a rounded 0
LEAST = -1e3  # what is below stands for a token that was masked or not scored: -9999, -1e9, -inf
LARGEST_TOKEN = 2**32  # no vocabulary has as many
WIDE = (b"\xff\xfe", b"\xfe\xff")  # how UTF-16 and UTF-32 begin
FAR = -10.0  # nats, to which running sums fall
MANY = 8  # tokens, of which no model gives all the same log-probability
APART = 0.02  # nats between two numbers for one token, however rounded
WHOLE = 1.01  # probabilities that add up to more are those of no distribution, however rounded
Tops = tuple[dict[int, float] | None, ...]  # log-probabilities of the most probable tokens, by position


@dataclass(frozen=True, eq=False)
class Scored:
    """A sequence of ``tokens`` (T,) and the log-probability of each after those before it, in nats: ``logprobs`` (T,).

    NaN where the engine gave none: at the first token, and in a prompt that was not scored. ``tops`` has T entries, if
    any: the most probable tokens at that position, each with its log-probability; None where the engine gave none.
    Raises ValueError for numbers that no log-probabilities are.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    tops: Tops = ()

    def __post_init__(self):
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"every token must have an entry, got {len(self.tokens)} tokens, {len(self.logprobs)} entries"
            )
        if len(self.tokens) < 2 or np.isnan(self.logprobs[1:]).all():
            raise ValueError(f"a sequence must have a token with a log-probability after the first, got {self.given}")
        if (self.logprobs > LARGEST).any():
            at = int(np.nanargmax(self.logprobs))
            raise ValueError(
                f"a log-probability must be at most 0, got {self.logprobs[at]:.4g} at token {at}: are these "
                "probabilities, logits, or negative log-likelihoods?"
            )
        if self.tops and len(self.tops) != len(self.tokens):
            raise ValueError(
                f"every token must have an entry of most probable ones, got {len(self.tops)} entries for {self.given}"
            )
        for at, (top, token, value) in enumerate(zip(self.tops, self.tokens.tolist(), self.logprobs)):
            require_distribution(top or {}, at)
            if abs((own := (top or {}).get(token, value)) - value) > APART:
                raise ValueError(
                    f"top_logprobs must be of the same distribution as logprobs, got {own:.4g} and {value:.4g} for "
                    f"token {token} at {at}: are the entries one position off?"
                )

    @property
    def given(self) -> str:
        """The size of the sequence, in words."""
        return f"{len(self.tokens)} tokens and {int(np.isfinite(self.logprobs).sum())} log-probabilities"


def require_distribution(top: Mapping[int, float], at: int) -> None:
    """Raises ValueError if the log-probabilities ``top``, at token ``at``, can be those of no distribution."""
    if any(math.isnan(value) or value > LARGEST for value in top.values()):
        raise ValueError(f"top_logprobs must be at most 0, got {shortened(top)} at token {at}")
    if (total := sum(map(math.exp, top.values()))) > WHOLE:
        raise ValueError(f"probabilities must add up to at most 1, got {total:.4g} in top_logprobs at token {at}")


def scored(tokens: Sequence[Any], logprobs: Sequence[Any], tops: Sequence[Any] = ()) -> Scored:
    """The sequence of ``tokens``, ``logprobs`` and ``tops``, None where there is none.

    An entry of ``tops`` maps tokens, as numbers or as texts, to log-probabilities. Raises ValueError for other values.
    """
    for kind, values in (("tokens", tokens), ("logprobs", logprobs)):
        if not isinstance(values, list):
            raise ValueError(f"{kind} must be a list, got {shortened(values)}")
    if strange := [token for token in tokens if type(token) is not int or not 0 <= token < LARGEST_TOKEN]:
        nested = ": write one sequence a line" * isinstance(strange[0], list)
        raise ValueError(f"tokens must be whole numbers of a vocabulary, got {shortened(strange[0])}{nested}")
    if strange := [value for value in logprobs if value is not None and type(value) not in (int, float)]:
        raise ValueError(f"logprobs must be numbers or null, got {shortened(strange[0])}")
    if len(logprobs) == len(tokens) - 1 and logprobs[:1] != [None]:  # some leave the first entry out
        logprobs = [None, *logprobs]
    for at, value in enumerate(logprobs):
        if value is not None and not value >= LEAST:  # NaN, too
            given = f"got {shortened(value)} at token {at}: write null where the engine gave none"
            raise ValueError(f"a log-probability must be a number from {LEAST:g} to 0, {given}")
    if tops and len(tops) == len(tokens) - 1 and tops[0] is not None:
        tops = [None, *tops]
    found = np.array([math.nan if value is None else value for value in logprobs], dtype=np.float64)
    known = tuple(map(most_probable, tops)) if any(tops) else ()
    return Scored(np.array(tokens, dtype=np.int64), found, known)


def most_probable(entry: Any) -> dict[int, float] | None:
    """The log-probabilities by token of an ``entry`` of top_logprobs; tokens that it calls impossible are left out."""
    if not entry:
        return None
    if not isinstance(entry, Mapping) or not all(type(value) in (int, float) for value in entry.values()):
        raise ValueError(f"an entry of top_logprobs must map tokens to log-probabilities, got {shortened(entry)}")
    if not all(str(token).isdecimal() and len(str(token)) < 11 and int(token) < LARGEST_TOKEN for token in entry):
        raise ValueError(f"top_logprobs must have the numbers of tokens, got {shortened([*entry])}: not their texts")
    return {int(token): float(value) for token, value in entry.items() if value != -math.inf}


def plain(line: Mapping[str, Any]) -> Iterator[Scored]:
    """The sequence of a line with ``tokens``, ``logprobs`` and perhaps ``top_logprobs``."""
    yield scored(line["tokens"], line["logprobs"], line.get("top_logprobs") or ())


def vllm(line: Mapping[str, Any]) -> Iterator[Scored]:
    """The sequences of an answer of vLLM: prompt and, where there are some, tokens that followed."""
    if not line["choices"]:
        raise ValueError("an answer must have a choice, got none: leave the line out")
    for choice in line["choices"]:  # the answer of a chat has its prompt beside them
        choice = {name: line.get(name) for name in ("prompt_token_ids", "prompt_logprobs")} | choice
        prompt = choice.get("prompt_token_ids")
        if prompt is None:
            raise ValueError(
                "an answer of vLLM must have the tokens of the prompt, got no prompt_token_ids: ask with "
                '"return_token_ids": true and "prompt_logprobs": 0'
            )
        given = of_prompt(choice, prompt)
        values = [of_token(entry, token) for entry, token in zip(given, prompt)]
        after = choice.get("token_ids") or []
        own = choice.get("logprobs") or {}
        following = own.get("token_logprobs") or [each["logprob"] for each in own.get("content") or []]
        following = following or [None] * len(after)
        # Tokens that followed have texts as keys there.
        yield scored([*prompt, *after], [*values, *following], [*ranked(given), *([None] * len(after))])


def of_prompt(found: Mapping[str, Any], prompt: Sequence[int]) -> list[Any]:
    """The entries of prompt_logprobs that are ``found``, one for each token of the ``prompt``."""
    given = found.get("prompt_logprobs") or [None] * len(prompt)
    # Versions of 2023 have a number for each token.
    given = [each and {t: x if isinstance(x, dict) else {"logprob": x} for t, x in each.items()} for each in given]
    if len(given) != len(prompt):
        raise ValueError(f"prompt_logprobs must have an entry for each token, got {len(given)} for {len(prompt)}")
    return given


def offline(line: Mapping[str, Any]) -> Iterator[Scored]:
    """The sequences of a ``RequestOutput`` of vLLM's Python interface: prompt and, where there are some, what followed.

    Its log-probabilities are entries by token.
    """
    prompt = line["prompt_token_ids"]
    given = of_prompt(line, prompt)
    for output in line.get("outputs") or [{}]:
        after = output.get("token_ids") or []
        tokens, entries = [*prompt, *after], [*given, *(output.get("logprobs") or [None] * len(after))]
        yield scored(tokens, [*map(of_token, entries, tokens)], ranked(entries))


def ranked(entries: Sequence[Mapping[str, Any] | None]) -> list[dict[str, float] | None]:
    """Log-probabilities by token of ``entries`` of prompt_logprobs; None everywhere if some lack the most probable one.

    With ``"prompt_logprobs": 0`` an entry has the token of the text alone, whatever its rank.
    """
    known = [entry for entry in entries if entry]
    if not known or not all(any(one.get("rank", 1 + (len(e) < 2)) == 1 for one in e.values()) for e in known):
        return [None] * len(entries)
    return [{token: one["logprob"] for token, one in entry.items()} if entry else None for entry in entries]


def of_token(entry: Mapping[str, Any] | None, token: int) -> float | None:
    """The log-probability of ``token`` in an ``entry`` by token. Raises ValueError where it is not among them."""
    if entry is None:
        return None
    if str(token) not in entry:
        raise ValueError(f"an entry of prompt_logprobs must have its token, {token}, got {shortened(sorted(entry))}")
    return entry[str(token)]["logprob"]


def sglang(line: Mapping[str, Any]) -> Iterator[Scored]:
    """The sequence of an answer of SGLang: pairs of log-probability and token."""
    found = line["meta_info"]
    prompt = found.get("input_token_logprobs") or []
    if len(prompt) < (found.get("prompt_tokens") or 0):
        raise ValueError(
            f"an answer of SGLang must have the tokens of its prompt, got {len(prompt)} of {found['prompt_tokens']}: "
            'ask with "return_logprob": true and "logprob_start_len": 0'
        )
    pairs = [*prompt, *(found.get("output_token_logprobs") or [])]
    tops = [*aligned(found, "input"), *aligned(found, "output")]
    given = [{str(one[1]): one[0] for one in entry} if entry else None for entry in tops]
    yield scored([pair[1] for pair in pairs], [pair[0] for pair in pairs], given)


def aligned(found: Mapping[str, Any], side: str) -> list[Any]:
    """The entries of most probable tokens on a ``side`` of an answer of SGLang, as many as it has tokens there."""
    return found.get(f"{side}_top_logprobs") or [None] * len(found.get(f"{side}_token_logprobs") or [])


def llama_cpp(line: Mapping[str, Any]) -> Iterator[Scored]:
    """The sequence of an answer of llama.cpp's server. The prompt's tokens have no log-probability there."""
    if not isinstance(line.get("prompt"), list):
        raise ValueError(
            f"an answer of llama.cpp must have the tokens of its prompt, got {shortened(line.get('prompt'))}: write "
            'them into the line as "prompt": [...]'
        )
    following = line["completion_probabilities"]
    tokens, values = [each["id"] for each in following], [each["logprob"] for each in following]
    tops = [{str(one["id"]): one["logprob"] for one in each.get("top_logprobs") or []} for each in following]
    before = [None] * len(line["prompt"])
    yield scored([*line["prompt"], *tokens], [*before, *values], [*before, *tops])


READERS: dict[str, Callable[[Mapping[str, Any]], Iterator[Scored]]] = {  # by the key that tells the form
    "logprobs": plain,
    "choices": vllm,
    "meta_info": sglang,
    "completion_probabilities": llama_cpp,
    "prompt_token_ids": offline,
}

FORMS = {
    "plain": "a plain line", "vllm": "an answer of vLLM", "offline": "an output of vLLM",
    "sglang": "an answer of SGLang", "llama_cpp": "an answer of llama.cpp",
}  # fmt: skip


def read(path: str | Path) -> list[Scored]:
    """All sequences of the file at ``path``. Raises OSError, and ValueError with the line for what cannot be read."""
    found: list[Scored] = []
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"a log is read twice and must be a file, got the folder or pipe {path}: give a file")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if line.startswith(WIDE) or (b"\0" in line[:8] and not line.startswith(PACKED)):
                raise ValueError(f"{path}, line {number}: a log must be UTF-8, got UTF-16 or UTF-32: save it as UTF-8")
            try:
                found += of_line(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                packed = ", which is compressed: unpack it" * line.startswith(PACKED)
                raise ValueError(f"{path}, line {number}: a log must be UTF-8, got {shortened(line)}{packed}") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"a log must have at least one sequence, got {path} without any")
    require_varied(found, path)
    require_single(found, path)
    return found


def require_varied(sequences: Sequence[Scored], path: str | Path) -> None:
    """Raises ValueError if many tokens of the ``sequences`` of ``path``, not all alike, have one log-probability.

    The one value is that of all tokens, or the smallest one: an engine that clamps writes it for lower values.
    """
    values, tokens = (np.concatenate([getattr(s, name)[1:] for s in sequences]) for name in ("logprobs", "tokens"))
    tokens, values = tokens[np.isfinite(values)], values[np.isfinite(values)]
    if len(values) >= MANY and np.ptp(values) == 0 < np.ptp(tokens):
        raise ValueError(
            f"{path}: the log-probabilities must be those of the tokens, got {values[0]:.4g} at all "
            f"{len(values)}: the values do not vary, so these are not log-probabilities of these tokens"
        )
    lowest = values == values.min()
    if values.min() < 0 and lowest.sum() >= MANY and len({*tokens[lowest].tolist()}) >= MANY:
        raise ValueError(
            f"{path}: the log-probabilities must be those of the tokens, got {values.min():.4g}, the smallest, at "
            f"{lowest.sum()} tokens: an engine that clamps them writes it for what is below, so write null there"
        )


def require_single(sequences: Sequence[Scored], path: str | Path) -> None:
    """Raises ValueError if the log-probabilities of all ``sequences`` of ``path``, of some length, never rise.

    Only a large fall counts: the log-probabilities of one repeated token may fall a little each time.
    """
    known = [each.logprobs[np.isfinite(each.logprobs)] for each in sequences]
    falling = all((np.diff(values) <= 0).all() for values in known)
    if falling and sum(map(len, known)) >= MANY * max(2, len(known)) and min(map(np.min, known)) < FAR:
        raise ValueError(
            f"{path}: log-probabilities must be those of single tokens, got {known[0][0]:.4g} and none above the one "
            "before it in any sequence: these are running sums, so write their differences"
        )


def of_line(text: str) -> list[Scored]:
    """The sequences of one line."""
    try:
        line = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # numbers of too many digits and too deep lists are no JSONDecodeError
        raise ValueError(
            f"a line must be one whole JSON object, got {shortened(text)} ({told(error)}): write one a line"
        ) from None
    if not isinstance(line, dict):
        raise ValueError(f"a line must be an object, one sequence or answer, got {shortened(line)}: write one a line")
    return of_answer(line)


def told(error: Exception) -> str:
    """The message of a parser's ``error``, without its position in the text or Python's advice on limits."""
    return (error.msg if isinstance(error, json.JSONDecodeError) else str(error)).partition(";")[0]


def of_answer(line: Mapping[str, Any]) -> list[Scored]:
    """The sequences of the object of a line, which may be a server's answer. Raises ValueError for other objects."""
    body = line["response"].get("body") if isinstance(line.get("response"), dict) else None
    line = body if isinstance(body, dict) else line  # of a file that "vllm run-batch" wrote
    reader = next((reader for key, reader in READERS.items() if key in line), None)
    if reader is None and (line.get("error") or line.get("object") == "error"):
        raise ValueError(f"a line must be a sequence or an answer, got the error of a server: {shortened(line, 200)}")
    if reader is None:
        raise ValueError(f"a line must have one of {', '.join(READERS)}, got the keys {shortened([*line])}")
    try:
        return [*reader(line)]
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        how = f"have {error}, got none" if isinstance(error, KeyError) else f"have another form, got {shortened(line)}"
        raise ValueError(f"{FORMS[reader.__name__]} must {how} (docs/engines.md shows the forms)") from error


def line_of(each: Scored, **more: Any) -> str:
    """The line of the plain form that ``read`` gives back as ``each``; ``more`` entries stand in it unread."""
    values = [None if math.isnan(value) else value for value in each.logprobs.tolist()]
    tops = {"top_logprobs": each.tops} if each.tops else {}
    return json.dumps({"tokens": each.tokens.tolist(), "logprobs": values} | tops | more) + "\n"


def write(path: str | Path, sequences: Sequence[Scored]) -> None:
    """Write ``sequences`` in the plain form, which ``read`` gives back as they are."""
    Path(path).write_text("".join(map(line_of, sequences)), encoding="utf-8")


def shortened(value: Any, most: int = 60) -> str:
    """``value`` as text of at most ``most`` characters."""
    text = repr(value)
    return text if len(text) <= most else text[:most] + " ..."
