"""Translations → lines of a file. Lines are numbered from 1."""

import contextlib
import enum
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

from transformer_jax.decoding.translator import Translation
from transformer_jax.errors import UserError

STANDARD = "-"


class Format(enum.StrEnum):
    """How n-best lists are written.

    text: the best translation, a line for each line of the input. With n > 1, `line ||| text ||| score`, as Moses.
    tsv: line, rank, score, log-probability, `finished` or `unfinished`, text.
    json: an object for each line of the input.
    """

    TEXT = "text"
    TSV = "tsv"
    JSON = "json"


def formatted(
    sources: Sequence[str], n_bests: Sequence[Sequence[Translation]], *, format: Format, n: int = 1
) -> Iterator[str]:
    """The lines of the output, without their ends."""
    for line, (source, n_best) in enumerate(zip(sources, n_bests, strict=True), start=1):
        match format:
            case Format.TEXT if n == 1:
                yield n_best[0].text if n_best else ""
            case Format.TEXT:
                yield from (f"{line} ||| {one.text} ||| {one.score:.6f}" for one in n_best)
            case Format.TSV:
                yield from _tsv(line, n_best)
            case Format.JSON:
                yield _json(line, source, n_best)


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is whole; `-` is standard output.

    What is there and is no file, a pipe or a device such as /dev/null, is written to as it is.

    Raises:
      UserError: if it can't be written.
    """
    if path in (STANDARD, "/dev/stdout"):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = pathlib.Path(path)
    if target.exists() and not target.is_file():
        with _writing(path), target.open("wb") as stream:
            yield stream
        return
    target = target.resolve()  # through a link, which stays one
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.unfinished")
    try:
        with _writing(path):
            with unfinished.open("wb") as stream:
                yield stream
            unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Errors of writing → a UserError that names the path."""
    try:
        yield
    except BrokenPipeError:
        raise  # who reads from a pipe may leave
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror}). Give --output another path.") from error


def write_lines(stream: BinaryIO, lines: Iterable[str]) -> None:
    """UTF-8, with a line feed after each line."""
    for line in lines:
        stream.write(line.encode() + b"\n")


def _tsv(line: int, n_best: Sequence[Translation]) -> Iterator[str]:
    for rank, one in enumerate(n_best, start=1):
        state = "finished" if one.finished else "unfinished"
        yield f"{line}\t{rank}\t{one.score:.6f}\t{one.log_prob:.6f}\t{state}\t{one.text}"


def _json(line: int, source: str, n_best: Sequence[Translation]) -> str:
    translations = [one._asdict() for one in n_best]
    return json.dumps({"line": line, "source": source, "translations": translations}, ensure_ascii=False)
