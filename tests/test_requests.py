"""Requests from text and from JSON lines, and what is said of bad lines."""

import json
import os

import pytest

from transformer_jax.decoding.requests import Entry, Input, InputFormat, read_entries
from transformer_jax.decoding.translator import Request
from transformer_jax.errors import UserError


def entries(*lines, format=InputFormat.JSON):
    return list(read_entries(lines, format=format, name="in.jsonl"))


def test_a_line_of_text_is_a_source_whatever_it_looks_like():
    lines = ("a cat", "", " ", '{"source": "a"}')
    assert entries(*lines, format=InputFormat.TEXT) == [Entry(Request(line), {"source": line}) for line in lines]


def test_json_fields_are_those_of_the_request_and_all_are_kept():
    line = {
        "source": "a cat",
        "prefix": "eine",
        "constraints": ["Katze", "die"],
        "n_best": 3,
        "id": 7,
        "x": {"y": [None]},
    }
    (entry,) = entries(json.dumps(line))
    assert entry == Entry(Request("a cat", "eine", ("Katze", "die"), 3), line)
    assert entries('{"source": "a"}') == [Entry(Request("a"), {"source": "a"})]


def test_a_blank_line_among_json_lines_is_a_blank_source():
    assert entries("", '{"source": ""}', " \t") == [
        Entry(Request(""), {"source": ""}),
        Entry(Request(""), {"source": ""}),
        Entry(Request(" \t"), {"source": " \t"}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a cat", "not JSON"),
        ('{"source": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', "expected an object"),
        ("{}", "'source' is missing"),
        ('{"source": 1}', "'source' is 1; expected a text"),
        ('{"source": null}', "'source' is None; expected a text"),
        ('{"source": "a", "prefix": ["b"]}', r"'prefix' is \['b'\]; expected a text"),
        ('{"source": "a", "constraints": "b"}', "'constraints' is 'b'; expected a list"),
        ('{"source": "a", "constraints": [1]}', r"'constraints' is \[1\]; expected a list"),
        ('{"source": "a", "n_best": 0}', "'n_best' is 0; expected 1 or more"),
        ('{"source": "a", "n_best": true}', "'n_best' is True; expected 1 or more"),
        ('{"source": "a", "n_best": 1.5}', "'n_best' is 1.5; expected 1 or more"),
        ('{"source": "a", "translations": []}', "'translations' is one which the output has itself"),
        ('{"source": "a", "line": 3}', "'line' is one which the output has itself"),
        ('{"source": "\\ud800"}', "'source' is .*; expected a text"),
        ('{"source": "a", "id": "\\udfff"}', "surrogate"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_field(line, message):
    with pytest.raises(UserError, match=f"^in.jsonl line 2: .*{message}"):
        entries('{"source": "a"}', line)


def test_prefixes_and_targets_belong_to_lines_one_by_one(tmp_path):
    for name, text in (("in", "a\n\nc\n"), ("prefixes", "x\n\nz z\n"), ("targets", "1\n\n3\n")):
        (tmp_path / name).write_text(text)
    source, prefixes, targets = (str(tmp_path / name) for name in ("in", "prefixes", "targets"))
    assert list(Input(source, prefixes=prefixes).open().entries) == [
        Entry(Request("a", "x"), {"source": "a", "prefix": "x"}),
        Entry(Request(""), {"source": ""}),
        Entry(Request("c", "z z"), {"source": "c", "prefix": "z z"}),
    ]
    assert [entry.target for entry in Input(source, targets=targets).open().entries] == ["1", "", "3"]
    assert Input(source, prefixes=prefixes, targets=targets).count() == 3


@pytest.mark.parametrize("content", ["1\n", "1\n2\n3\n"])
def test_files_of_different_length_are_named(tmp_path, content):
    (tmp_path / "in").write_text("a\nb\n")
    (tmp_path / "other").write_text(content)
    shorter, longer = sorted(("in", "other"), key=lambda name: len((tmp_path / name).read_text()))
    lines = (tmp_path / shorter).read_text().count("\n")
    for files in ({"prefixes": str(tmp_path / "other")}, {"targets": str(tmp_path / "other")}):
        with pytest.raises(UserError, match=f"{shorter} has {lines} lines, {tmp_path / longer} has more"):
            Input(str(tmp_path / "in"), **files).count()


def test_a_pipe_is_not_read_to_count_its_lines(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert Input(str(pipe)).count() is None  # this would hang if it were opened
    (tmp_path / "in").write_text("a\n")
    assert Input(str(tmp_path / "in"), targets=str(pipe)).count() is None
    assert Input().count() is None
