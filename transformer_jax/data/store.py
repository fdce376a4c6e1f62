"""Token ids on disk: tokenise once, then read them through a memory map, with the length of each side of each pair.

A store is a directory: `ids.npy` (int32, each pair's source tokens followed by its target tokens), `lengths.npy`
(int32 [pairs, 2]) and `store.json` (fingerprint, sizes, checksums). It is written under a temporary name and renamed
when whole, so that a store is never half there.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import Int

from transformer_jax import disk
from transformer_jax.errors import UserError

FORMAT = 2
CHUNK = 65_536  # pairs written at once

PairIds = tuple[Sequence[int], Sequence[int]]

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Store:
    """Token ids of pairs, in the order of the corpus. Where it comes from several corpora, they follow one another."""

    ids: np.ndarray  # int32 [tokens]: source, target, source, target, …; memory-mapped or in memory
    lengths: np.ndarray  # int32 [pairs, 2], EOS counted
    sizes: tuple[int, ...]  # pairs of each corpus
    fingerprint: str
    starts: np.ndarray  # int64 [pairs, 2]: where each side begins in `ids`
    checksums: tuple[str, ...] = ()  # of the ids and lengths of each corpus; of a store on disk

    def __len__(self) -> int:
        return len(self.lengths)

    def source(self, pair: int) -> Int[np.ndarray, " S"]:
        return self._side(pair, 0)

    def target(self, pair: int) -> Int[np.ndarray, " T"]:
        return self._side(pair, 1)

    def _side(self, pair: int, side: int) -> Int[np.ndarray, " n"]:
        start = self.starts[pair, side]
        return self.ids[start : start + self.lengths[pair, side]]


def store_in_memory(*corpora: Iterable[PairIds]) -> Store:
    """A store that is not on disk, for sets of a few thousand pairs."""
    parts = [list(_chunks(corpus)) for corpus in corpora]
    sizes = [sum(len(lengths) for _, lengths in part) for part in parts]
    ids = [np.empty(0, np.int32), *(ids for part in parts for ids, _ in part)]
    lengths = [np.empty((0, 2), np.int32), *(lengths for part in parts for _, lengths in part)]
    return _store(np.concatenate(ids), np.concatenate(lengths), sizes=sizes, fingerprint="")


def build_store(path: str | Path, *corpora: Iterable[PairIds], fingerprint: str) -> Store:
    """Writes the ids of all pairs of the corpora to the directory `path`, streaming, and opens it.

    A store that is there already is replaced. `fingerprint` says what the ids were made of (corpus files, tokenizer,
    epoch of subword sampling); `open_store` wants the same.

    Raises:
      UserError: if it can't be written.
    """
    path = Path(path)
    with contextlib.ExitStack() as stack:
        with disk.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            directory = tempfile.TemporaryDirectory(
                prefix=f".{path.name}.", suffix=disk.UNFINISHED, dir=path.parent, ignore_cleanup_errors=True
            )
            temporary = stack.enter_context(directory)
            whole = Path(temporary) / "store"
            _write(whole, corpora, fingerprint)
        with contextlib.suppress(FileNotFoundError):
            path.rename(Path(temporary) / "replaced")
        with contextlib.suppress(OSError):  # another process was faster, and its store is as good
            whole.rename(path)
    store = open_store(path, fingerprint)
    if store is None:
        raise UserError(f"{path} could not be written, or was changed by another process; remove it and start again.")
    return store


def open_store(path: str | Path, fingerprint: str) -> Store | None:
    """The store at `path`, or None where there is none, it has another fingerprint, or it is damaged (logged).

    Reads the whole store once to compare checksums, about a second for a gigabyte.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        description = json.loads((path / "store.json").read_bytes())
        if (description["format"], description["fingerprint"]) != (FORMAT, fingerprint):
            log.warning("%s was made from another corpus or tokenizer; it will be built again.", path)
            return None
        ids, lengths = _array(path / "ids.npy", ()), np.array(_array(path / "lengths.npy", (2,)))
        store = _store(ids, lengths, sizes=description["sizes"], fingerprint=fingerprint)
        if lengths.min(initial=0) < 0 or lengths.sum(dtype=np.int64) != len(ids) or sum(store.sizes) != len(lengths):
            raise ValueError("its parts are not of one size")
        store = dataclasses.replace(store, checksums=_checksums(store))
        if store.checksums != tuple(description["checksums"]):
            raise ValueError("it has not the checksums that store.json says")
    except Exception as error:  # whatever damaged bytes make of NumPy and of what is read here
        log.warning("%s is damaged (%s: %.200s); it will be built again.", path, type(error).__name__, error)
        return None
    return store


def _array(path: Path, row_shape: tuple[int, ...]) -> np.ndarray:
    """An int32 array in a .npy file, mapped, whatever size its header says; no other kind of file is taken for one."""
    array = np.lib.format.open_memmap(path, mode="r")
    if array.dtype != np.dtype("<i4") or array.shape[1:] != row_shape or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} is {array.dtype} {array.shape}")
    return array


def _checksums(store: Store) -> tuple[str, ...]:
    """Of the ids and of the lengths of each corpus."""
    pairs = [0, *itertools.accumulate(store.sizes)]
    tokens = [0, *(int(store.lengths[:end].sum(dtype=np.int64)) for end in pairs[1:])]
    return tuple(
        _checksum(zlib.crc32(store.ids[tokens[n] : tokens[n + 1]].data), zlib.crc32(store.lengths[pairs[n] : end].data))
        for n, end in enumerate(pairs[1:])
    )


def _checksum(ids: int, lengths: int) -> str:
    return f"{ids:08x}{lengths:08x}"


def _store(ids: np.ndarray, lengths: np.ndarray, *, sizes: Sequence[int], fingerprint: str) -> Store:
    ends = np.cumsum(lengths.reshape(-1), dtype=np.int64)
    starts = (ends - lengths.reshape(-1)).reshape(-1, 2)
    return Store(ids=ids, lengths=lengths, sizes=tuple(sizes), fingerprint=fingerprint, starts=starts)


def _write(path: Path, corpora: Sequence[Iterable[PairIds]], fingerprint: str) -> None:
    path.mkdir()
    sizes, checksums = [], []
    with open(path / "ids.npy", "wb") as ids_file, open(path / "lengths.npy", "wb") as lengths_file:
        all_ids, all_lengths = _GrowingArray(ids_file, ()), _GrowingArray(lengths_file, (2,))
        for corpus in corpora:
            sizes.append(0)
            all_ids.checksum = all_lengths.checksum = 0
            for ids, lengths in _chunks(corpus):
                all_ids.append(ids)
                all_lengths.append(lengths)
                sizes[-1] += len(lengths)
            checksums.append(_checksum(all_ids.checksum, all_lengths.checksum))
        all_ids.finish()
        all_lengths.finish()
    description = {"format": FORMAT, "fingerprint": fingerprint, "sizes": sizes, "checksums": checksums}
    (path / "store.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


class _GrowingArray:
    """An int32 array in a .npy file that grows along its first axis. The header is written again at the end.

    NumPy leaves room in the header for the number of rows to grow, so its size stays the same.
    """

    def __init__(self, file: BinaryIO, row_shape: tuple[int, ...]):
        self.file = file
        self.row_shape = row_shape
        self.rows = 0
        self.checksum = 0  # of what was appended since it was set to 0
        self._write_header()

    def append(self, array: np.ndarray) -> None:
        content = array.astype("<i4").tobytes()
        self.file.write(content)
        self.rows += len(array)
        self.checksum = zlib.crc32(content, self.checksum)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": "<i4", "fortran_order": False, "shape": (self.rows, *self.row_shape)}
        np.lib.format.write_array_header_1_0(self.file, header)


def _chunks(corpus: Iterable[PairIds]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The ids [tokens] and the lengths [pairs, 2] of one `CHUNK` of pairs after another."""
    pairs = iter(corpus)
    while chunk := list(itertools.islice(pairs, CHUNK)):
        lengths = np.array([(len(source), len(target)) for source, target in chunk], np.int32)
        ids = np.fromiter(itertools.chain.from_iterable(side for pair in chunk for side in pair), np.int32)
        yield ids, lengths
