"""Pairs of lines from wherever they are: text files, TSV, standard input, TFDS, the built-in phrasebook.

A corpus is named by one string, its spec:

    phrasebook, phrasebook:5000                   the built-in phrases, as many as told
    train.en,train.de                             two text files, line by line; the source first
    pairs.tsv                                     source, tab, target
    -                                             the same on standard input
    tfds:wmt14_translate/de-en:train[:1%]         a prepared TFDS dataset; no split: that of the field it stands in

Text files may be gzipped (`.gz`). A line ends at `\\n` and nowhere else; a `\\r` before it is dropped, and so is a
byte-order mark at the start of a file. Every pair is read, counted, and used or reported: see `Report`.
"""

import atexit
import collections
import contextlib
import dataclasses
import enum
import functools
import gzip
import hashlib
import importlib.metadata
import io
import itertools
import os
import pathlib
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

from transformer_jax.config import OnBadPair
from transformer_jax.data import phrasebook, tfds
from transformer_jax.errors import UserError

Split = Literal["train", "dev", "test"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Pair(NamedTuple):
    source: str
    target: str


class BadPair(enum.StrEnum):
    """Why a pair is not used."""

    EMPTY = "with an empty side"
    ENCODING = "not valid UTF-8"
    COLUMNS = "not of two columns"
    LENGTH = "too long"
    RATIO = "of too different lengths"


class Report:
    """Counts the pairs of one reading, and drops a bad one or raises, as `on_bad` says.

    `str(report)` is a line for the log.
    """

    def __init__(self, name: str, *, on_bad: OnBadPair):
        self.name = name
        self.on_bad = on_bad
        self.read = 0
        self.dropped: collections.Counter[BadPair] = collections.Counter()
        self.first: dict[BadPair, str] = {}  # where the first of each kind was found

    @property
    def kept(self) -> int:
        return self.read - self.dropped.total()

    def bad(self, kind: BadPair, where: str, detail: str) -> None:
        """Counts a bad pair.

        Raises:
          UserError: if bad pairs are errors.
        """
        if self.on_bad is OnBadPair.ERROR:
            raise UserError(
                f"{where}: a pair {kind} ({detail}). Mend it, or drop such pairs with --config.data.bad_pairs=drop."
            )
        self.dropped[kind] += 1
        self.first.setdefault(kind, where)

    def __str__(self) -> str:
        kinds = [f"{count:,} {kind} (first: {self.first[kind]})" for kind, count in sorted(self.dropped.items())]
        dropped = f"{self.dropped.total():,} dropped: {', '.join(kinds)}" if kinds else "none dropped"
        return f"{self.name}: {self.read:,} pairs, {dropped}"


@runtime_checkable
class Corpus(Protocol):
    """What one spec stands for. It can be read again and again."""

    def pairs(self, report: Report) -> Iterator[Pair]:
        """The pairs in their order, one in memory at a time.

        Raises:
          UserError: if the corpus cannot be read, and for a bad pair if the report says so.
        """
        ...

    def fingerprint(self) -> str:
        """Changes when the pairs may have changed."""
        ...


def parse(spec: str, *, source: str, target: str, split: Split, seed: int = 0) -> Corpus:
    """The corpus that `spec` names, from language `source` to language `target`.

    `split` is the field of the config that the spec stands in. Text files and TSV have no languages or splits.

    Raises:
      UserError: if `spec` is none of the forms in this file's docstring.
    """
    kind, _, rest = spec.partition(":")
    if kind == "phrasebook" and (rest.isdecimal() or ":" not in spec):
        return Phrasebook(source, target, split=split, seed=seed, size=int(rest) if rest else None)
    if kind == "tfds" and (match := _TFDS_SPEC.fullmatch(rest)):
        return Tfds(match["name"], match["split"] or _TFDS_SPLITS[split], source=source, target=target)
    if spec == "-" or spec.endswith((".tsv", ".tsv.gz")):
        return Tsv(spec)
    files = spec.split(",")
    if len(files) == 2 and all(files):
        return TextFiles(*files)
    raise UserError(
        f"config.data.{split}: {spec!r} is no corpus. Expected `source file,target file`, a .tsv file, `-`, "
        "`tfds:name/config:split`, `phrasebook` or `phrasebook:SIZE`."
    )


def read(
    spec: str, *, source: str, target: str, split: Split, seed: int = 0, report: Report | None = None
) -> Iterator[Pair]:
    """The pairs of one corpus, streamed; bad ones go to `report`, and are errors without one."""
    report = report or Report(spec, on_bad=OnBadPair.ERROR)
    return parse(spec, source=source, target=target, split=split, seed=seed).pairs(report)


def read_all(
    specs: Iterable[str], *, source: str, target: str, split: Split, seed: int = 0, report: Report | None = None
) -> Iterator[Pair]:
    """The pairs of several corpora, one after another."""
    for spec in specs:
        yield from read(spec, source=source, target=target, split=split, seed=seed, report=report)


def fingerprint(spec: str, *, source: str, target: str, split: Split, seed: int = 0) -> str:
    """A hex digest that changes when the corpus may have changed: another file, size, time or version."""
    corpus = parse(spec, source=source, target=target, split=split, seed=seed)
    return hashlib.sha256(corpus.fingerprint().encode()).hexdigest()


def within_limits(
    pairs: Iterable[tuple[list[int], list[int]]], *, max_length: int, max_ratio: float | None, report: Report
) -> Iterator[tuple[list[int], list[int]]]:
    """The pairs of token ids whose lengths, EOS counted, are at most `max_length` and within `max_ratio`."""
    for number, (source, target) in enumerate(pairs, start=1):
        shorter, longer = sorted((len(source), len(target)))
        where, detail = f"{report.name} pair {number:,}", f"{len(source):,} and {len(target):,} tokens"
        if longer > max_length:
            report.bad(BadPair.LENGTH, where, f"{detail}; config.data.max_length is {max_length:,}")
        elif max_ratio is not None and longer > max_ratio * shorter:
            report.bad(BadPair.RATIO, where, f"{detail}; config.data.max_ratio is {max_ratio:g}")
        else:
            yield source, target


def read_lines(file: str | os.PathLike | Iterable[bytes]) -> Iterator[str]:
    """The lines of a file (gzipped if it is named .gz) or of a binary stream, without their ends.

    Raises:
      UserError: if the file cannot be read or a line is not UTF-8.
    """
    named = isinstance(file, str | os.PathLike)
    name = str(file) if named else getattr(file, "name", "<stream>")
    with _open(file) if named else contextlib.nullcontext(file) as stream:
        for number, line in enumerate(_raw_lines(stream, str(name)), start=1):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{name} line {number:,}: not valid UTF-8 ({_bad_byte(error)}). Convert the file to UTF-8."
                ) from error


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Two files, whose lines of the same number are a pair."""

    source: str
    target: str

    def pairs(self, report: Report) -> Iterator[Pair]:
        names = (self.source, self.target)
        places = (f"{self.source} line", f"{self.target} line")
        suspect = None  # the first line where the two sides hardly belong together
        with _open(self.source) as source, _open(self.target) as target:
            sides = itertools.zip_longest(_raw_lines(source, names[0]), _raw_lines(target, names[1]))
            for number, (one, other) in enumerate(sides, start=1):
                if one is None or other is None:
                    longer = number + sum(1 for _ in sides)
                    counts = (number - 1, longer) if one is None else (longer, number - 1)
                    _unequal_lines(names, counts, suspect)
                if suspect is None and not _lengths_match(one, other):
                    suspect = number
                if pair := _pair(one, other, places, number, report):
                    yield pair

    def fingerprint(self) -> str:
        return f"{_file_state(self.source)} {_file_state(self.target)}"


@dataclasses.dataclass(frozen=True)
class Tsv:
    """A file, or `-` for standard input, with source, tab and target on each line."""

    path: str

    def pairs(self, report: Report) -> Iterator[Pair]:
        name = "<stdin>" if self.path == "-" else self.path
        with _open(_standard_input() if self.path == "-" else self.path) as stream:
            for number, line in enumerate(_raw_lines(stream, name), start=1):
                place = f"{name} line"
                columns = line.split(b"\t") if line.strip() else [b"", b""]
                if len(columns) == 2:
                    if pair := _pair(columns[0], columns[1], (place, place), number, report):
                        yield pair
                else:
                    report.read += 1
                    report.bad(BadPair.COLUMNS, f"{place} {number:,}", f"{len(columns)} columns")

    def fingerprint(self) -> str:
        if self.path != "-":
            return _file_state(self.path)
        with open(_standard_input(), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Phrasebook:
    """The built-in corpus. See `transformer_jax.data.phrasebook`."""

    source: str
    target: str
    _: dataclasses.KW_ONLY
    split: Split
    seed: int
    size: int | None

    def pairs(self, report: Report) -> Iterator[Pair]:
        for source, target in phrasebook.phrases(
            self.source, self.target, split=self.split, seed=self.seed, size=self.size
        ):
            report.read += 1
            yield Pair(source, target)

    def fingerprint(self) -> str:
        """The phrases follow from these fields, the code, and the version of CLDR in Babel."""
        code = hashlib.sha256(pathlib.Path(phrasebook.__file__).read_bytes()).hexdigest()
        return f"{self} {code} {importlib.metadata.version('babel')}"


_TFDS_SPEC = re.compile(r"(?P<name>[\w./-]+(:[\d*]+\.[\d*]+\.[\d*]+)?)(:(?P<split>.+))?")
_TFDS_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclasses.dataclass(frozen=True)
class Tfds:
    """A prepared TFDS dataset whose examples have a text for each language; `source` and `target` choose two."""

    name: str
    split: str
    _: dataclasses.KW_ONLY
    source: str
    target: str

    def pairs(self, report: Report) -> Iterator[Pair]:
        self._check_languages()
        place = f"tfds:{self.name}:{self.split} example"
        for number, example in enumerate(tfds.examples(self.name, self.split), start=1):
            if pair := _pair(example[self.source], example[self.target], (place, place), number, report):
                yield pair

    def fingerprint(self) -> str:
        metadata = tfds.find(self.name).info
        splits = {name: (split.num_examples, split.num_bytes) for name, split in sorted(metadata.splits.items())}
        return f"{self} {metadata.version} {splits}"

    def _check_languages(self) -> None:
        languages = list(tfds.find(self.name).info.features)
        for field, language in (("source", self.source), ("target", self.target)):
            if language not in languages:
                raise UserError(
                    f"config.data.{field} is {language!r}, but the examples of tfds:{self.name} have "
                    f"{', '.join(languages)}. Choose one of them."
                )


def _pair(source: bytes, target: bytes, places: tuple[str, str], number: int, report: Report) -> Pair | None:
    """The pair of two raw lines, or None if it is bad and dropped."""
    report.read += 1
    texts = []
    for raw, place in zip((source, target), places, strict=True):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            return report.bad(BadPair.ENCODING, f"{place} {number:,}", _bad_byte(error))
        if not text or text.isspace():
            return report.bad(BadPair.EMPTY, f"{place} {number:,}", "nothing but white space")
        texts.append(text)
    return Pair(*texts)


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"


def _lengths_match(source: bytes, target: bytes) -> bool:
    """Whether the ratio of the lengths in characters is within [1/4, 4]."""
    shorter, longer = sorted(len(side.decode(errors="replace")) for side in (source, target))
    return longer <= 4 * shorter


def _unequal_lines(names: tuple[str, str], counts: tuple[int, int], suspect: int | None) -> NoReturn:
    found = f"{names[0]} has {counts[0]:,} lines, {names[1]} has {counts[1]:,}"
    if suspect is None:
        advice = f"No length ratio leaves [1/4, 4]: look at the end of {names[counts.index(max(counts))]}."
    else:
        advice = f"Line {suspect:,} is the first where the length ratio leaves [1/4, 4]: a line may be missing near it."
    raise UserError(f"corpus line counts differ: {found}.\n{advice}")


def _open(path: str | os.PathLike) -> io.BufferedIOBase:
    try:
        return gzip.open(path) if str(path).endswith(".gz") else open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error


def _raw_lines(stream: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The lines of a binary stream. Iterating over one splits at `\\n` only, whatever bytes a line holds."""
    try:
        for number, line in enumerate(stream):
            if number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            yield line[:-1].removesuffix(b"\r") if line.endswith(b"\n") else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: the gzip file is damaged ({error}). Fetch or compress it again.") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read to its end ({error.strerror}). Check its disk.") from error


def _file_state(path: str) -> str:
    try:
        state = os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check the path.") from error
    return f"{os.path.abspath(path)} {state.st_size} {state.st_mtime_ns}"


@functools.cache
def _standard_input() -> str:
    """The name of a copy of standard input: a corpus is read more than once, for the tokenizer and for the store."""
    copy = tempfile.NamedTemporaryFile(prefix="stdin-", suffix=".tsv", delete=False)  # noqa: SIM115
    atexit.register(os.unlink, copy.name)
    with copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
    return copy.name
