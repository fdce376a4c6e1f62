"""Files that are written piece by piece, appear under their names when they are whole, and can be continued till then.

Until the file `out` is whole there are beside it

    out.partial         what is written of it
    out.partial.json    how many lines of the input that is the translation of, a digest of those lines, how many bytes
                        it is, and what it belongs to: model, options

Only what the second counts is counted: it changes when everything before has reached the disk, and what was written
after is cut off when the file is continued. So a process may be killed at any moment.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

from transformer_jax.decoding.requests import STANDARD
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)


class Output(NamedTuple):
    """A file to write; `-` is standard output. A pipe or a device is written to as it is."""

    path: str
    finish: Callable[[pathlib.Path, pathlib.Path], None] = os.replace  # makes the file of what was written

    @property
    def is_file(self) -> bool:
        path = pathlib.Path(self.path)
        return self.path not in (STANDARD, "/dev/stdout") and (path.is_file() or not path.exists())

    @property
    def target(self) -> pathlib.Path:
        return pathlib.Path(self.path).resolve()  # through a link, which stays one


class Counted(NamedTuple):
    """What is written for good."""

    lines: int  # of the input
    digest: str  # of those lines
    sizes: list[int]  # bytes of each file
    of: dict[str, Any]  # what it belongs to


class Partial:
    """Open files, and how many lines of the input are in them for good."""

    def __init__(self, streams: Sequence[BinaryIO], record: pathlib.Path | None = None, counted: Counted | None = None):
        self.streams = streams
        self.lines = counted.lines if counted else 0
        self._record = record
        self._counted = counted
        self._digest = hashlib.sha256()

    def skip(self, lines: Iterator[bytes], *, name: str) -> None:
        """Takes the lines that are counted already from an input.

        Raises:
          UserError: if they are others.
        """
        for line in itertools.islice(lines, self.lines):
            self._digest.update(line + b"\n")
        if self._record and self._counted and self._digest.hexdigest() != self._counted.digest:
            _refuse(self._record, f"its {self.lines:,} lines are not the first ones of {name}")

    def count(self, lines: Iterable[bytes]) -> None:
        """What was written is that of these more lines. It is flushed, and counted when it is on the disk."""
        for line in lines:
            self._digest.update(line + b"\n")
            self.lines += 1
        for stream in self.streams:
            stream.flush()
        if self._record and self._counted:
            for stream in self.streams:
                os.fsync(stream.fileno())
            sizes = [stream.tell() for stream in self.streams]
            self._counted = Counted(self.lines, self._digest.hexdigest(), sizes, self._counted.of)
            _write(self._record, self._counted)


@contextlib.contextmanager
def partial_files(outputs: Sequence[Output], *, of: Callable[[], Mapping[str, Any]]) -> Iterator[Partial]:
    """The outputs, open; if partial ones of the same name are there, these are continued.

    `of` says what they belong to, in values that JSON has. Only files can be continued: if one of the outputs is
    none, the others are written anew.

    Raises:
      UserError: if the partial ones belong to something else, another process writes them, or one can't be written.
    """
    with contextlib.ExitStack() as stack:
        if all(output.is_file for output in outputs):
            yield stack.enter_context(_finished_files(outputs, of()))
        else:
            yield Partial([stack.enter_context(whole_file(*output)) for output in outputs])


@contextlib.contextmanager
def whole_file(path: str, finish: Callable[[pathlib.Path, pathlib.Path], None] = os.replace) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is whole; see `Output`.

    Raises:
      UserError: if it can't be written.
    """
    output = Output(path, finish)
    if not output.is_file:
        if finish is not os.replace:
            raise UserError(f"{path} is no file, and this can't be written piece by piece. Give the name of a file.")
        with _writing(path), _as_it_is(path) as stream:
            yield stream
        return
    unfinished = output.target.with_name(f"{output.target.name}.{socket.gethostname()}-{os.getpid()}.unfinished")
    try:
        with _writing(path):
            with unfinished.open("wb") as stream:
                yield stream
            finish(unfinished, output.target)
    finally:
        unfinished.unlink(missing_ok=True)


def refuse_existing(outputs: Iterable[Output]) -> None:
    """Raises:
    UserError: if one of the files is there with something in it.
    """
    for output in outputs:
        if output.is_file and output.target.exists() and output.target.stat().st_size:
            raise UserError(
                f"{output.path} is there and is not written over. Give another name, remove it, or add --overwrite."
            )


@contextlib.contextmanager
def _as_it_is(path: str) -> Iterator[BinaryIO]:
    if path in (STANDARD, "/dev/stdout"):
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with open(path, "wb") as stream:
            yield stream


@contextlib.contextmanager
def unfinished_files(outputs: Sequence[Output], *, of: Mapping[str, Any]) -> Iterator[Partial]:
    """The partial files of outputs that are all files, which stay partial when all is written; see `partial_files`.

    Raises:
      UserError: if they belong to something else, another process writes them, or one can't be written.
    """
    written, record = partial_paths(outputs)
    with contextlib.ExitStack() as stack:

        def opened(output: Output, path: pathlib.Path) -> BinaryIO:
            with _writing(output.path):
                return stack.enter_context(path.open("ab"))

        streams = [opened(outputs[0], written[0])]
        _lock(streams[0], written[0])
        found = counted(outputs, of=of)
        streams += map(opened, outputs[1:], written[1:])
        for stream, size in zip(streams, found.sizes, strict=True):
            stream.truncate(size)
        files = Partial(streams, record, found)
        if found.lines:
            log.info(f"{written[0]}: continued after {found.lines:,} lines")
        else:
            _write(record, found)
        try:
            yield files
        except BaseException as error:
            if files.lines and not isinstance(error, UserError):
                log.info(f"{written[0]}: {files.lines:,} lines are done. The same command continues after them.")
            if not files.lines:
                for path in (*written, record):
                    path.unlink(missing_ok=True)
            raise
        for stream in streams:
            stream.flush()


@contextlib.contextmanager
def _finished_files(outputs: Sequence[Output], of: Mapping[str, Any]) -> Iterator[Partial]:
    written, record = partial_paths(outputs)
    with unfinished_files(outputs, of=of) as files:
        yield files
        for stream in files.streams:
            stream.flush()
        for output, path in reversed(list(zip(outputs, written, strict=True))):
            output.finish(path, output.target)
        record.unlink()


def partial_paths(outputs: Sequence[Output]) -> tuple[list[pathlib.Path], pathlib.Path]:
    """What is written of each output before it is whole, and the record of that."""
    written = [output.target.with_name(f"{output.target.name}.partial") for output in outputs]
    return written, written[0].with_name(f"{written[0].name}.json")


def counted(outputs: Sequence[Output], *, of: Mapping[str, Any]) -> Counted:
    """What is written of outputs for good.

    Raises:
      UserError: if it belongs to something else than `of` says, or the files are not as the record says.
    """
    written, record = partial_paths(outputs)
    of = json.loads(json.dumps(dict(of)))
    none, text = _nothing(of, written), None
    with contextlib.suppress(FileNotFoundError):
        text = record.read_text()
    sizes = [path.stat().st_size if path.exists() else 0 for path in written]
    if text is None:
        if any(sizes):
            _refuse(record, f"{record} is missing")
        return none
    try:
        found = Counted(**json.loads(text))
        before = found.of.items()
    except (ValueError, TypeError, AttributeError):
        _refuse(record, f"{record} is damaged")
    if not found.lines or not any(sizes):
        return none  # there is nothing to lose
    missing = object()
    changes = [f"{name}: {value} → {of.get(name, 'none')}" for name, value in before if of.get(name, missing) != value]
    changes += [f"{name}: none → {value}" for name, value in of.items() if name not in found.of]
    if changes:
        _refuse(record, "it belongs to something else (there → here):\n  " + "\n  ".join(changes))
    if len(sizes) != len(found.sizes) or any(map(int.__lt__, sizes, found.sizes)):
        _refuse(record, "the files are shorter than they were")
    return found


def forget(several: Sequence[Sequence[Output]]) -> None:
    """Removes what is written of outputs, after it is said of all that nothing of them counts."""
    for written, record in map(partial_paths, several):
        with contextlib.suppress(FileNotFoundError):  # another process removes them too
            _write(record, _nothing({}, written))
    for written, record in map(partial_paths, several):
        for path in (*written, record):
            path.unlink(missing_ok=True)


def _lock(stream: BinaryIO, path: pathlib.Path) -> None:
    """Keeps other processes out until the stream is closed, or the process has ended."""
    with contextlib.suppress(OSError):
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(stream.fileno()), path.stat()):  # it was not finished and renamed meanwhile
            return
    raise UserError(f"{path}: another process is writing it. Wait until it is done, or give another --output.")


def _nothing(of: Mapping[str, Any], written: Sequence[pathlib.Path]) -> Counted:
    return Counted(0, hashlib.sha256().hexdigest(), [0] * len(written), dict(of))


def _refuse(record: pathlib.Path, why: str) -> NoReturn:
    raise UserError(
        f"{record.with_suffix('')} is a partial output that can't be continued: {why}.\n"
        f"Give the options and the input that it was begun with, or another --output, or remove it and {record}."
    )


def _write(record: pathlib.Path, counted: Counted) -> None:
    """Writes the record, whole or not at all."""
    unfinished = record.with_suffix(".tmp")
    with unfinished.open("w") as stream:
        json.dump(counted._asdict(), stream, indent=2)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(record)


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Errors of writing → a UserError that names the path."""
    try:
        yield
    except BrokenPipeError:
        raise  # who reads from a pipe may leave
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror}). Give --output another path.") from error
