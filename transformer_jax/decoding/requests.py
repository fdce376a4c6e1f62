"""Lines of a file → requests: plain text, or JSON lines, an object for each translation that is asked for."""

import dataclasses
import enum
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from transformer_jax.data.corpus import read_lines
from transformer_jax.data.tokenizer import is_unicode
from transformer_jax.decoding.chunks import Arriving
from transformer_jax.decoding.translator import Request
from transformer_jax.errors import UserError

STANDARD = "-"  # standard input or output
OF_THE_OUTPUT = ("line", "translations")  # names of fields which its objects have
DEEPEST = 100  # objects and lists in one another: Python can't write what is too deep for it
EXAMPLE = '{"source": "a sentence"}'


class InputFormat(enum.StrEnum):
    """What a line of the input is.

    text: a sentence.
    json: an object with `source`, and if wanted `prefix` (text with which each translation begins), `constraints` (a
    list of texts which each translation has), `n_best`, and any other fields, which the JSON output repeats.
    """

    TEXT = "text"
    JSON = "json"


class Entry(NamedTuple):
    """One line of the input."""

    request: Request
    fields: dict[str, Any]  # of its object as it was given
    target: str | None = None  # a translation to score


class Entries(NamedTuple):
    entries: Iterator[Entry]
    more: Callable[[], bool]  # whether another one need not be waited for


@dataclasses.dataclass(frozen=True)
class Input:
    """Where requests come from. `prefixes` and `targets` are files whose lines belong to those of `path`."""

    path: str = STANDARD
    format: InputFormat = InputFormat.TEXT
    prefixes: str | None = None
    targets: str | None = None
    stream: bool = False  # standard input is answered as it arrives; at a terminal it always is

    def open(self) -> Entries:
        """The entries, read as they are taken.

        Raises:
          UserError: here or at any entry, if a file can't be read or a line is not what it has to be.
        """
        source, more = self.path, lambda: True
        if self.path == STANDARD:
            source = sys.stdin.buffer
            if self.stream or sys.stdin.isatty():
                source = Arriving(sys.stdin.fileno(), "<stdin>")
                more = source.waiting
        entries = read_entries(read_lines(source), format=self.format, name=self.path)
        if self.prefixes:
            entries = with_prefixes(entries, read_lines(self.prefixes), names=(self.path, self.prefixes))
        if self.targets:
            entries = with_targets(entries, read_lines(self.targets), names=(self.path, self.targets))
        return Entries(entries, more)

    def count(self) -> int | None:
        """How many lines there are, each of which is looked at, so that a bad one is found before any work is done.

        None if that can't be known before: of standard input and pipes.

        Raises:
          UserError: if a file can't be read or a line is not what it has to be.
        """
        paths = [path for path in (self.path, self.prefixes, self.targets) if path is not None]
        if any(
            path == STANDARD or (pathlib.Path(path).exists() and not pathlib.Path(path).is_file()) for path in paths
        ):
            return None
        return sum(1 for _ in self.open().entries)


def read_entries(lines: Iterable[str], *, format: InputFormat, name: str) -> Iterator[Entry]:
    """An entry for each line; a line without text is a source without text. `name` is the input's, for messages.

    Raises:
      UserError: for a line that is not what the format says.
    """
    for number, line in enumerate(lines, start=1):
        if format == InputFormat.JSON and line.strip():
            yield _from_json(line, where=f"{name} line {number:,}")
        else:
            yield Entry(Request(line), {"source": line})


def with_prefixes(entries: Iterable[Entry], prefixes: Iterable[str], *, names: tuple[str, str]) -> Iterator[Entry]:
    """The entries, each with the prefix on the same line of another file. `names` are the two files'.

    Raises:
      UserError: if one has more lines than the other.
    """
    for entry, prefix in _line_by_line(entries, prefixes, names):
        yield entry._replace(
            request=entry.request._replace(prefix=prefix), fields=entry.fields | ({"prefix": prefix} if prefix else {})
        )


def with_targets(entries: Iterable[Entry], targets: Iterable[str], *, names: tuple[str, str]) -> Iterator[Entry]:
    """The entries, each with the translation on the same line of another file. `names` are the two files'.

    Raises:
      UserError: if one has more lines than the other.
    """
    for entry, target in _line_by_line(entries, targets, names):
        yield entry._replace(target=target)


def _line_by_line(one: Iterable[Entry], other: Iterable[str], names: tuple[str, str]) -> Iterator[tuple[Entry, str]]:
    for number, (entry, line) in enumerate(itertools.zip_longest(one, other), start=1):
        if entry is None or line is None:
            shorter, longer = names if entry is None else names[::-1]
            raise UserError(
                f"line counts differ: {shorter} has {number - 1:,} lines, {longer} has more. "
                "Give files whose lines belong together one by one."
            )
        yield entry, line


def _from_json(text: str, *, where: str) -> Entry:
    try:
        fields = json.loads(text)
        written = json.dumps(fields, ensure_ascii=False, allow_nan=False)  # as the output will
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}). Expected an object such as {EXAMPLE}.") from error
    if not isinstance(fields, dict):
        raise UserError(f"{where}: found {text:.60}; expected an object such as {EXAMPLE}.")
    if taken := [field for field in OF_THE_OUTPUT if field in fields]:
        raise UserError(f"{where}: the field {taken[0]!r} is one which the output has itself. Give it another name.")
    if "source" not in fields:
        raise UserError(f"{where}: the field 'source' is missing. Expected an object such as {EXAMPLE}.")

    def field(name: str, default: Any, holds: Callable[[Any], bool], expected: str) -> Any:
        value = fields.get(name, default)
        if not holds(value):
            raise UserError(f"{where}: the field {name!r} is {value!r:.60}; expected {expected}.")
        return value

    request = Request(
        field("source", None, _is_text, "a text"),
        field("prefix", "", _is_text, "a text"),
        tuple(field("constraints", [], _are_texts, 'a list of texts, such as ["one", "another"]')),
        field("n_best", None, lambda value: value is None or (type(value) is int and value > 0), "1 or more"),
    )
    if not _is_shallow(fields, levels=DEEPEST):
        raise UserError(f"{where}: objects or lists in one another, more than {DEEPEST} deep. Give them another form.")
    if not is_unicode(written):
        raise UserError(
            f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is no character. Give both or neither."
        )
    return Entry(request, fields)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_unicode(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_shallow(value: object, *, levels: int) -> bool:
    """Whether no more than so many objects and lists are in one another."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_shallow(one, levels=levels - 1) for one in inner)
