"""Logs of engines: every form gives the same sequence, and what is no log is refused by line."""

import gzip
import json
import math
import os

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fragility_engines.logs.sequences import READERS, Scored, of_answer, read, write

TOKENS, VALUES = [3, 7, 7, 1], [None, -0.5, -2.25, -0.125]
FORMS = {
    "plain": {"tokens": TOKENS, "logprobs": VALUES},
    "without the first entry": {"tokens": TOKENS, "logprobs": VALUES[1:]},
    "vLLM, prompt": {
        "choices": [
            {
                "prompt_token_ids": TOKENS,
                "prompt_logprobs": [
                    None,
                    *({str(t): {"logprob": v}, "99": {"logprob": -3.0}} for t, v in zip(TOKENS[1:], VALUES[1:])),
                ],
            }
        ]
    },
    "vLLM, prompt and answer": {
        "choices": [
            {
                "prompt_token_ids": TOKENS[:2],
                "prompt_logprobs": [None, {"7": {"logprob": -0.5}}],
                "token_ids": TOKENS[2:],
                "logprobs": {"token_logprobs": VALUES[2:]},
            }
        ]
    },
    "vLLM, a number for each token": {
        "choices": [
            {
                "prompt_token_ids": TOKENS,
                "prompt_logprobs": [None, *({str(t): v, "99": -3.0} for t, v in zip(TOKENS[1:], VALUES[1:]))],
            }
        ]
    },
    "vLLM, a line of a batch": {
        "custom_id": "1",
        "response": {"body": {"choices": [{"prompt_token_ids": TOKENS, "logprobs": None, "prompt_logprobs": [
            None, *({str(t): {"logprob": v}} for t, v in zip(TOKENS[1:], VALUES[1:])),
        ]}]}},
        "error": None,
    },
    "vLLM, its Python interface": {
        "prompt_token_ids": TOKENS[:2],
        "prompt_logprobs": [None, {"7": {"logprob": -0.5, "rank": 1}}],
        "outputs": [
            {
                "token_ids": TOKENS[2:],
                "logprobs": [{str(t): {"logprob": v, "rank": 1}} for t, v in zip(TOKENS[2:], VALUES[2:])],
            }
        ],
    },
    "SGLang": {"meta_info": {"input_token_logprobs": [[v, t, None] for t, v in zip(TOKENS, VALUES)]}},
    "SGLang, answer": {
        "meta_info": {
            "input_token_logprobs": [[None, 3, "a"], [-0.5, 7, "b"]],
            "output_token_logprobs": [[-2.25, 7, "b"], [-0.125, 1, "c"]],
        }
    },
}  # fmt: skip


def written(folder, *lines):
    path = folder / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_sequence(tmp_path, form):
    (found,) = read(written(tmp_path, "", FORMS[form]))
    assert found.tokens.tolist() == TOKENS
    assert math.isnan(found.logprobs[0]) and found.logprobs[1:].tolist() == VALUES[1:]


def test_an_answer_of_llama_cpp_has_no_log_probabilities_of_its_prompt(tmp_path):
    after = [{"id": 7, "token": " b", "logprob": -2.25}, {"id": 1, "token": "c", "logprob": -0.125}]
    (found,) = read(written(tmp_path, {"prompt": [3, 7], "completion_probabilities": after}))
    assert found.tokens.tolist() == TOKENS
    assert np.isnan(found.logprobs[:2]).all() and found.logprobs[2:].tolist() == VALUES[2:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "one whole JSON object, got '{"),
        ("[1, 2]", "a line must be an object"),
        ({"text": "a"}, "one of logprobs, choices, meta_info, completion_probabilities"),
        ({"logprobs": VALUES}, "'tokens'"),
        ({"tokens": TOKENS, "logprobs": VALUES[:1]}, "got 4 tokens, 1 entries"),
        ({"tokens": TOKENS, "logprobs": [None] * 4}, "a token with a log-probability after the first"),
        ({"tokens": [3], "logprobs": [-1.0]}, "a token with a log-probability after the first"),
        ({"tokens": TOKENS, "logprobs": [None, 0.5, -1, -1]}, "at most 0, got 0.5 at token 1"),
        ({"tokens": [1.5, 2], "logprobs": [None, -1]}, "numbers of a vocabulary, got 1.5"),
        ({"tokens": [1, 2**63], "logprobs": [None, -1]}, "numbers of a vocabulary, got 9223372036854775808"),
        ('{"tokens": [' + "9" * 5000 + '], "logprobs": [-1]}', "one whole JSON object, got '{"),
        ("[" * 100_000, "one whole JSON object, got '["),
        ({"tokens": [True, 2], "logprobs": [None, -1]}, "numbers of a vocabulary, got True"),
        ({"tokens": "ab", "logprobs": [None, -1]}, "tokens must be a list"),
        ({"tokens": [1, 2], "logprobs": [None, "-1"]}, "numbers or null, got '-1'"),
        ({"tokens": [[1, 2]], "logprobs": [[None, -1]]}, "got [1, 2]: write one sequence a line"),
        (
            [{"tokens": [1, 2], "logprobs": [None, -1]}],
            "a line must be an object, one sequence or answer, got [{'tokens': [1, 2], 'logprobs': [",
        ),
        (
            {"meta_info": {"prompt_tokens": 32, "output_token_logprobs": [[-1.0, 3, None], [-2.0, 4, None]]}},
            'the tokens of its prompt, got 0 of 32: ask with "return_logprob": true and "logprob_start_len": 0',
        ),
        (
            {"meta_info": {"prompt_tokens": 3, "input_token_logprobs": [[None, 3, None], [-2.0, 4, None]]}},
            "the tokens of its prompt, got 2 of 3: ask with",  # "logprob_start_len": 1 leaves the first token out
        ),
        ({"choices": []}, "an answer must have a choice, got none: leave the line out"),
        (
            {"tokens": TOKENS, "logprobs": VALUES, "top_logprobs": [None, {"1": -0.5}, {"2": -1.0}]},
            "got 3 entries for 4 tokens",  # is the first one for token 0 or for token 1?
        ),
        (
            {"tokens": [1, 2, 3], "logprobs": [None, -1.0, -2.0], "top_logprobs": [None, {"3": -2.0}, {"3": -1.0}]},
            "the same distribution as logprobs, got -1 and -2 for token 3 at 2: are the entries one position off?",
        ),
        (
            {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]},
            "prompt_logprobs must have an entry for each token, got 2 for 3",
        ),
        ('{"tokens": [1, 2], "logprobs": [null, -Infinity]}', "from -1000 to 0, got -inf at token 1: write null"),
        ('{"tokens": [1, 2, 3], "logprobs": [null, -1, NaN]}', "from -1000 to 0, got nan at token 2: write null"),
        ({"tokens": TOKENS, "logprobs": [None, -1, -9999.0, -1]}, "from -1000 to 0, got -9999.0 at token 2"),
        ({"tokens": TOKENS, "logprobs": [None, -1, -1e300, -1]}, "got -1e+300 at token 2"),
        ({"tokens": TOKENS, "logprobs": [None, -1, -(10**400), -1]}, "from -1000 to 0"),
        ({"tokens": [*TOKENS, 5], "logprobs": VALUES}, "got 5 tokens, 4 entries"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "return_token_ids"),
        ({"choices": [{"prompt_token_ids": [1, 2], "prompt_logprobs": [None]}]}, "got 1 for 2"),
        (
            {"choices": [{"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"5": {"logprob": -1}}]}]},
            "its token, 2",
        ),
        ({"custom_id": "1", "response": None, "error": {"message": "no"}}, "got the error of a server: {'custom_id'"),
        ({"text": "a", "error": None}, "one of logprobs, choices, meta_info"),
        ({"choices": 3}, "an answer of vLLM must have another form, got {'choices': 3}"),
        ({"meta_info": {"input_token_logprobs": [[-1.0]]}}, "an answer of SGLang must have another form"),
        (
            {"prompt": [1], "completion_probabilities": [{"id": 5}]},
            "an answer of llama.cpp must have 'logprob', got none",
        ),
        ({"error": {"code": 404}}, "the error of a server: {'error': {'code': 404}}"),
        ({"object": "error", "message": "too long"}, "the error of a server"),
        ({"prompt": "once", "completion_probabilities": []}, "the tokens of its prompt"),
    ],
)
def test_a_line_that_is_no_log_is_refused_by_number(tmp_path, line, message):
    path = written(tmp_path, line)
    with pytest.raises(ValueError, match="line 1: ") as refused:
        read(path)
    assert message in str(refused.value)


def test_other_encodings_are_refused_and_a_byte_order_mark_is_not(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(json.dumps(FORMS["plain"]).encode("utf-16"))
    with pytest.raises(ValueError, match="line 1: a log must be UTF-8, got UTF-16"):
        read(path)
    path.write_bytes(json.dumps(FORMS["plain"]).encode("utf-16-le"))
    with pytest.raises(ValueError, match="line 1: a log must be UTF-8, got UTF-16"):
        read(path)
    path.write_bytes(gzip.compress(json.dumps(FORMS["plain"]).encode()))
    with pytest.raises(ValueError, match="line 1: a log must be UTF-8, got .* compressed: unpack it"):
        read(path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for other in (tmp_path, tmp_path / "pipe.jsonl"):
        with pytest.raises(ValueError, match="a log is read twice and must be a file, got the folder or pipe"):
            read(other)
    path.write_bytes(json.dumps(FORMS["plain"]).encode("utf-8-sig"))
    assert read(path)[0].tokens.tolist() == TOKENS


def test_a_log_without_sequences_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one sequence"):
        read(written(tmp_path, ""))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e3, 0) | st.none()), min_size=2, max_size=6).filter(
            lambda pairs: any(value is not None for _, value in pairs[1:])
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_what_is_written_is_read_as_it_was(tmp_path_factory, sequences):
    values = [value for pairs in sequences for _, value in pairs[1:] if value is not None]
    assume(len(values) < 8 or min(values) < max(values))  # values that do not vary are refused
    made = [
        Scored(np.array([t for t, _ in pairs]), np.array([math.nan if v is None else v for _, v in pairs]))
        for pairs in sequences
    ]
    write(path := tmp_path_factory.mktemp("logs") / "log.jsonl", made)
    for one, other in zip(made, read(path), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.logprobs, other.logprobs, equal_nan=True)


def test_the_forms_are_told_apart_by_one_key_each():
    assert len(READERS) == len({*READERS.values()}) == 5


TOPS = [None, {7: -0.5, 5: -1.5}, {7: -2.25, 2: -0.25}, {1: -0.125}]
WITH_TOPS = {
    "plain": FORMS["plain"] | {"top_logprobs": TOPS},
    "without the first entry": FORMS["plain"] | {"top_logprobs": TOPS[1:]},
    "vLLM": {
        "choices": [
            {
                "prompt_token_ids": TOKENS,
                "prompt_logprobs": [
                    None,
                    {"7": {"logprob": -0.5, "rank": 1}, "5": {"logprob": -1.5, "rank": 2}},
                    {"7": {"logprob": -2.25, "rank": 3}, "2": {"logprob": -0.25, "rank": 1}},
                    {"1": {"logprob": -0.125, "rank": 1}},
                ],
            }
        ]
    },
    "SGLang": {
        "meta_info": {
            **FORMS["SGLang"]["meta_info"],
            "input_top_logprobs": [None, *([[v, t, None] for t, v in top.items()] for top in TOPS[1:])],
        }
    },
}


@pytest.mark.parametrize("form", WITH_TOPS)
def test_the_most_probable_tokens_are_read(tmp_path, form):
    (found,) = read(written(tmp_path, WITH_TOPS[form]))
    assert [*found.tops] == TOPS
    write(path := tmp_path / "again.jsonl", [found])
    assert read(path)[0].tops == found.tops


def test_an_answer_of_llama_cpp_has_the_most_probable_tokens(tmp_path):
    after = [{"id": 7, "logprob": -2.0, "top_logprobs": [{"id": 2, "logprob": -0.25}, {"id": 7, "logprob": -2.0}]}]
    (found,) = read(written(tmp_path, {"prompt": [3, 7], "completion_probabilities": after}))
    assert found.tops == (None, None, {2: -0.25, 7: -2.0})


def test_entries_of_the_texts_own_tokens_are_not_the_most_probable_ones(tmp_path):
    """vLLM's "prompt_logprobs": 0 gives the rank of the text's token, which now and then is the first."""
    entries = [None, {"7": {"logprob": -0.5, "rank": 1}}, {"7": {"logprob": -2.25, "rank": 4}}]
    line = {"choices": [{"prompt_token_ids": TOKENS[:3], "prompt_logprobs": entries}]}
    assert read(written(tmp_path, line))[0].tops == ()


@pytest.mark.parametrize(
    ("tops", "message"),
    [
        ([None, {"7": -0.1, "5": -0.2}, None, None], "must add up to at most 1, got 1.724 in top_logprobs at token 1"),
        ([None, {"7": 0.5}, None, None], "must be at most 0"),
        ([None, {" the": -0.5}, None, None], "must have the numbers of tokens, got [' the']"),
        ([None, {"-5": -1.0}, None, None], "must have the numbers of tokens, got ['-5']"),
        ([None, {"1_0": -1.0}, None, None], "must have the numbers of tokens, got ['1_0']"),
        ([None, [1, 2], None, None], "must map tokens to log-probabilities"),
        ([None, {"7": "-1"}, None, None], "must map tokens to log-probabilities"),
        ([None, {"7": -1}], "got 2 entries for 4 tokens"),
    ],
)
def test_what_is_no_distribution_is_refused(tmp_path, tops, message):
    with pytest.raises(ValueError, match="line 1: ") as refused:
        read(written(tmp_path, FORMS["plain"] | {"top_logprobs": tops}))
    assert message in str(refused.value)


@pytest.mark.parametrize("value", [-2.5, 0.0])
def test_values_that_do_not_vary_are_no_log_probabilities(tmp_path, value):
    def written(tokens, logprobs, lines=2):
        line = json.dumps({"tokens": tokens, "logprobs": [None, *logprobs]})
        (path := tmp_path / "log.jsonl").write_text(lines * f"{line}\n")
        return path

    path = written([1, 2, 3, 4, 5, 6], 5 * [value])
    with pytest.raises(ValueError, match=f"log.jsonl: .* got {value:.4g} at all 10: the values do not vary"):
        read(path)
    assert read(written([1, 2, 3, 4, 5, 6], [*4 * [value], -1.0]))
    assert read(written([1, 2, 3, 4, 5, 6], 5 * [value], lines=1))  # so few may be alike
    assert read(written([7] * 6, 5 * [value]))  # a text that says one thing again and again


def test_running_sums_are_refused(tmp_path):
    """As of an engine's cumulative_logprob; log-probabilities of single tokens rise somewhere."""
    values = [-1.0, -2.5, -2.75, -4.0, -4.125, -9.0, -9.5, -11.0, -12.0]
    sums = {"tokens": [*range(1, 11)], "logprobs": [None, *values]}
    with pytest.raises(ValueError, match="got -1 and none above the one before it in any sequence: these are running"):
        read(written(tmp_path, sums, sums))
    assert len(read(written(tmp_path, sums))) == 1  # so few may fall by chance
    mixed = {"tokens": sums["tokens"], "logprobs": [None, *values[:-1], -10.0]}
    assert len(read(written(tmp_path, sums, mixed))) == 2
    again = {"tokens": [17] * 64, "logprobs": [None, *(-2.0 - 0.01 * at for at in range(63))]}
    assert len(read(written(tmp_path, again, again))) == 2  # one token again and again, a little less likely each time


def test_an_answer_of_the_chat_of_vllm_has_its_prompt_beside_the_choices():
    entries = [None, {"5": {"logprob": -1.5, "rank": 1}}, {"9": {"logprob": -2.5, "rank": 3}}]
    choice = {"message": {"content": "a"}, "token_ids": [7], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}
    (found,) = of_answer({"choices": [choice], "prompt_token_ids": [1, 5, 9], "prompt_logprobs": entries})
    assert [*found.tokens] == [1, 5, 9, 7] and [*found.logprobs[1:]] == [-1.5, -2.5, -0.5]
