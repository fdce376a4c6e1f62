"""Lines in chunks: the same lines in the same order, none waited for that need not be."""

import itertools
import os

import pytest

from transformer_jax.decoding.chunks import Arriving, chunks
from transformer_jax.errors import UserError


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_chunks_hold_every_item_once_in_order(size):
    found = list(chunks(range(7), size))
    assert list(itertools.chain(*found)) == list(range(7))
    assert {len(chunk) for chunk in found[:-1]} <= {size}
    assert all(found)


def test_no_more_is_read_than_a_chunk():
    read = []
    items = (read.append(item) or item for item in range(100))
    assert next(chunks(items, 4)) == [0, 1, 2, 3]
    assert read == [0, 1, 2, 3]


def test_a_chunk_ends_where_nothing_more_is_there():
    assert list(chunks("abcdef", 4, more=iter([False, True, False, True, True, True]).__next__)) == [
        ["a"],
        ["b", "c"],
        ["d", "e", "f"],
    ]


def test_what_comes_before_an_error_is_given_first():
    def items():
        yield from "abc"
        raise UserError("d is bad")

    found = chunks(items(), 2)
    assert [next(found), next(found)] == [["a", "b"], ["c"]]
    with pytest.raises(UserError, match="d is bad"):
        next(found)


@pytest.fixture
def pipe():
    """A pipe's end to write to, and the lines that arrive at its other end."""
    reading, writing = os.pipe()
    ends = [writing]
    yield ends, Arriving(reading, "pipe")
    os.close(reading)
    for end in ends:
        os.close(end)


def test_lines_that_have_arrived_are_waiting_and_begun_ones_are_not(pipe):
    (writing, *_), lines = pipe
    assert not lines.waiting()
    os.write(writing, b"one\ntw")
    assert lines.waiting()
    assert next(lines) == b"one\n"
    assert not lines.waiting()
    os.write(writing, b"o\nthree\n")
    assert lines.waiting()
    assert [next(lines), next(lines)] == [b"two\n", b"three\n"]
    assert not lines.waiting()


def test_a_lone_line_is_a_chunk_at_once_and_many_waiting_ones_are_one_chunk(pipe):
    (writing, *_), lines = pipe
    found = chunks(lines, 1000, more=lines.waiting)
    os.write(writing, b"alone\n")
    assert next(found) == [b"alone\n"]  # this would hang if more were waited for
    os.write(writing, b"a\n" * 300)
    assert next(found) == [b"a\n"] * 300


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_end_as_those_of_a_file_do(tmp_path, end):
    (tmp_path / "lines").write_bytes(b"a\r\n\n\n" + b"b" * 100_000 + b"\x0cc\n" + b"d" + end)
    with (tmp_path / "lines").open("rb") as stream:
        expected = list(stream)
        stream.seek(0)
        lines = Arriving(stream.fileno(), "lines")
        assert lines.waiting()
        assert list(lines) == expected
        assert not lines.waiting()


def test_an_empty_pipe_that_is_closed_has_no_lines(pipe):
    ends, lines = pipe
    os.close(ends.pop())
    assert not lines.waiting()
    assert list(chunks(lines, 10, more=lines.waiting)) == []
