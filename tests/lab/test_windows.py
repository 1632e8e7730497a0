"""Windows as protocol section 2 defines them, from every source a user may name."""

import bz2
import gzip
import lzma
import os
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fragility_lab.inputs.checkpoints import load_tokenizer
from fragility_lab.inputs.text import PLAIN, load_rows, opening, select_windows, tokenize

STREAM = torch.arange(1000)


def test_windows_are_consecutive_slices_and_drop_the_tail():
    starts, windows = select_windows(STREAM, length=300, count=3, seed=0)
    assert starts == [0, 300, 600]
    assert torch.equal(windows.flatten(), STREAM[:900])


def test_more_windows_than_asked_are_sampled_by_the_seed_and_kept_in_text_order():
    starts, windows = select_windows(STREAM, length=10, count=7, seed=5)
    expected = sorted(random.Random(5).sample(range(100), 7))  # the protocol's own words
    assert starts == [10 * index for index in expected]
    assert torch.equal(windows[:, 0], torch.tensor(starts))


def test_disjoint_seeds_share_no_window_and_leave_none_out():
    chosen = [select_windows(STREAM, 10, 25, seed, disjoint=True)[0] for seed in range(4)]
    assert sorted(start for starts in chosen for start in starts) == list(range(0, 1000, 10))
    assert all(starts == sorted(starts) for starts in chosen)
    assert chosen[0] != [10 * index for index in range(25)], "a seed has windows of the whole text, not of one part"
    with pytest.raises(
        ValueError, match="hold 125 windows of 10 tokens for seeds 0 to 4, which share none, but .* make 100"
    ):
        select_windows(STREAM, 10, 25, seed=4, disjoint=True)


def test_fewer_windows_than_asked_is_an_error_that_says_what_there_is():
    with pytest.raises(ValueError, match="must hold 11 windows of 100 tokens, but its 1000 tokens make 10"):
        select_windows(STREAM, length=100, count=11, seed=0)


def test_text_file_rows_join_with_blank_lines(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("one line\n\n   \nanother line\n")
    rows = load_rows(str(file))
    tokenizer = load_tokenizer("embedded")
    assert tokenizer.decode(tokenize(rows, tokenizer)) == "one line\n\nanother line"


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_tabular_files_need_a_text_column(tmp_path, suffix):
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    good.write_text('{"text": "hello"}\n' if suffix == "jsonl" else "text\nhello\n")
    bad.write_text('{"words": "hello"}\n' if suffix == "jsonl" else "words\nhello\n")
    assert load_rows(str(good)) == ["hello"]
    with pytest.raises(ValueError, match='must have a column "text".*words'):
        load_rows(str(bad))


def test_cells_without_text_are_dropped(tmp_path):
    file = tmp_path / "holes.csv"
    file.write_text("text,number\nhello,1\n,2\nworld,3\n")
    assert load_rows(str(file)) == ["hello", "world"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.md", "words", r"must end in one of \.txt, \.jsonl, \.json, \.csv, \.parquet, got .*text\.md"),
        ("bad.jsonl", "{broken", r"bad\.jsonl must be readable as \.jsonl, got"),
        ("bad.parquet", "no", r"bad\.parquet must be readable as \.parquet, got"),
        ("numbers.csv", "text\n1\n2\n", 'column "text" .* must hold strings, got int'),
    ],
)
def test_files_that_hold_no_text(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_rows(str(tmp_path / name))


@pytest.mark.parametrize(("name", "other"), [("run[1].txt", "run1.txt"), ("a*.txt", "ab.txt"), ("a?.txt", "ab.txt")])
def test_a_path_is_no_pattern(tmp_path, name, other):
    (tmp_path / name).write_text("right")
    assert load_rows(str(tmp_path / name)) == ["right"]
    (tmp_path / other).write_text("wrong")
    assert load_rows(str(tmp_path / name)) == ["right"]


def test_a_hub_name_has_three_parts_at_most():
    with pytest.raises(ValueError, match=r"name\[:config\[:split\]\], got 'a:b:c:d'"):
        load_rows("a:b:c:d")


def test_missing_file_names_it_and_the_ways_out(tmp_path):
    with pytest.raises(OSError, match=r"text .*nothing\.txt.*DATA=.*embedded default"):
        load_rows(str(tmp_path / "nothing.txt"))


def test_empty_file_is_named(tmp_path):
    file = tmp_path / "empty.txt"
    file.touch()
    with pytest.raises(ValueError, match=r"must hold text, but .*empty\.txt is empty"):
        load_rows(str(file))


def test_absent_hub_gives_the_same_message():
    with pytest.raises(OSError, match=r"text 'someone/some-corpus'.*DATA=.*embedded default"):
        load_rows("someone/some-corpus:config:validation")


def test_embedded_text_makes_the_windows_of_the_full_protocol():
    stream = tokenize(load_rows("embedded"), load_tokenizer("embedded"))
    starts, windows = select_windows(stream, length=1024, count=96, seed=0)
    assert windows.shape == (96, 1024)
    assert all(start % 1024 == 0 for start in starts)


def test_held_back_text_is_both_texts():
    tokenizer = load_tokenizer("embedded")
    both = [len(tokenize(load_rows(name), tokenizer)) for name in ("embedded", "embedded:training")]
    assert abs(len(tokenize(load_rows("embedded:held-back"), tokenizer)) - sum(both)) < 5


def test_two_seeds_choose_different_windows():
    first, second = (select_windows(STREAM, 10, 20, seed)[0] for seed in (0, 1))
    assert first != second


def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of words that puts special tokens around a text by ``template``."""
    words = {"<s>": 0, "</s>": 1, "<u>": 2, "text": 3, "a": 4, "b": 5}
    backend = Tokenizer(models.WordLevel(words, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [("<s>", 0), ("</s>", 1)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<u>")


@pytest.mark.parametrize(
    ("template", "ids"), [(None, ()), ("<s> $A", (0,)), ("<s> $A </s>", (0,)), ("$A </s>", ()), ("<s> <s> $A", (0, 0))]
)
def test_windows_begin_as_the_tokenizer_begins_a_text(template, ids):
    found = opening(tokenizer_with(template))
    assert found.ids == ids and found.spelled == ("<s>",) * len(ids)
    stream = torch.arange(100, 130)
    starts, windows = select_windows(stream, 5, 4, seed=0, opening=found)
    assert windows.shape == (4, 5)
    for start, window in zip(starts, windows):
        text = stream[start : start + 5 - len(ids)]
        assert window.tolist() == [*ids, *text.tolist()]
    steps = 5 - len(ids)
    assert all(start % steps == 0 for start in starts) and starts == sorted({*starts})
    if not ids:
        plain = select_windows(stream, 5, 4, seed=0)
        assert plain[0] == starts and torch.equal(plain[1], windows)


def test_a_window_holds_more_than_its_opening():
    with pytest.raises(
        ValueError, match=r"behind the 2 with which the tokenizer begins it \(<s> <s>\), got windows of 2"
    ):
        select_windows(torch.arange(9), 2, 1, seed=0, opening=opening(tokenizer_with("<s> <s> $A")))


@pytest.mark.parametrize("name", ["a::b", "simplecache::c", "q*[1]?", "~", "%41", "file:", "-p x=1", "ü"])
def test_a_files_name_is_its_name(tmp_path, name):
    """No part of it is an address, a chain of file systems or a pattern."""
    for suffix, content in ((".txt", "words"), (".jsonl", '{"text": "words"}'), (".csv", "text\nwords")):
        (tmp_path / f"{name}{suffix}").write_text(content)
        assert load_rows(str(tmp_path / f"{name}{suffix}")) == ["words"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '[{"text": "a"}, {"n": 1}, {"text": "b"}]'),
        ("a.json", '{"text": ["a", null, "b"]}'),
        ("a.json", '{"text": "a"}\n{"text": "b", "n": [1]}\n'),
        ("a.jsonl", '{"text": "a"}\n\n{"text": null}\n{"text": "b"}'),
        ("a.csv", 'n,text\n1,a\n2,\n3,"b"\n'),
        ("a.txt", "a\r\nb\r\n"),
    ],
)
def test_rows_of_local_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert load_rows(str(tmp_path / name)) == ["a", "b"]


def test_the_embedded_tokenizer_puts_nothing_in_front():
    assert opening(load_tokenizer("embedded")) == PLAIN


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_texts_that_are_packed_or_in_another_encoding_are_refused(tmp_path, suffix):
    file = tmp_path / f"text{suffix}"
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        file.write_bytes(pack(b'{"text": "hello"}\n'))
        with pytest.raises(ValueError, match=r"^a text must be in UTF-8, but .* is compressed: unpack it$"):
            load_rows(str(file))
    file.write_bytes('{"text": "Größe"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^a text must be in UTF-8, but .* is not \(.*\): convert it, .* LATIN1"):
        load_rows(str(file))


def test_a_pipe_is_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(OSError, match="it is a folder"):
        load_rows(str(tmp_path / "folder.txt"))
    with pytest.raises(OSError, match="it is no file: a pipe cannot be read twice"):
        load_rows(str(tmp_path / "pipe.txt"))


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
@pytest.mark.parametrize(("encoding", "name"), [("utf-8-sig", "UTF-8 with a mark"), ("utf-16", "UTF-16")])
def test_texts_that_begin_with_the_mark_of_an_encoding_are_refused(tmp_path, suffix, encoding, name):
    file = tmp_path / f"text{suffix}"
    file.write_text('{"text": "hello"}\n', encoding=encoding)
    with pytest.raises(ValueError, match=f"in UTF-8 without a byte order mark, but .* is in {name}: convert it"):
        load_rows(str(file))
