"""From store and plan to batches: each process gathers its share of the rows of each batch, ahead of the training.

for position, batch in batches(lambda epoch: store, plan, seed=0, start=position): …
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import grain
import numpy as np
from jaxtyping import Int

from transformer_jax.batch import ALL, Batch, Share
from transformer_jax.config import PlanConfig
from transformer_jax.data.plan import Plan, PlannedBatch, evaluation_plan
from transformer_jax.data.store import Store

READ = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # batches made ahead, in this process


class Position(NamedTuple):
    """Which batch comes next. Saved with a checkpoint, it is all that resuming the data needs."""

    epoch: int
    batch: int


BEGINNING = Position(epoch=0, batch=0)


def batches(
    store_of_epoch: Callable[[int], Store],
    plan: Plan,
    *,
    seed: int,
    start: Position = BEGINNING,
    share: Share = ALL,
) -> Iterator[tuple[Position, Batch]]:
    """The training batches from `start` on, without end, each with the position that comes after it.

    Arrays are NumPy int32. The parts which the processes share, put together, are the batch and empty rows: it does not
    depend on who takes which.
    `store_of_epoch` is called once an epoch (in another thread, while the epoch before is trained on), and may give
    another store each time: subword sampling.
    """

    def prepare(epoch: int) -> tuple[Store, list[PlannedBatch]]:
        store = store_of_epoch(epoch)
        return store, plan(store.lengths, seed=seed, epoch=epoch)

    epoch, first = start
    prepared = _in_background(prepare, epoch)
    while True:
        store, planned = prepared.result()
        prepared = _in_background(prepare, epoch + 1)
        for number, batch in enumerate(_gathered(store, planned[first:], share), start=first + 1):
            yield Position(epoch, number) if number < len(planned) else Position(epoch + 1, 0), batch
        epoch, first = epoch + 1, 0


def evaluation_batches(store: Store, config: PlanConfig, *, share: Share = ALL) -> Iterator[Batch]:
    """Every pair of the store exactly once, in batches of few shapes, padded with empty rows (of segment 0)."""
    return _gathered(store, evaluation_plan(config, store.lengths), share)


def gather(store: Store, planned: PlannedBatch, *, share: Share = ALL) -> Batch:
    """The planned batch, or a share of its rows, as int32 arrays. Nothing else is read from the store."""
    rows = share.rows(planned.shape.rows)
    first, last = np.searchsorted(planned.rows, rows), np.searchsorted(planned.rows, rows, side="right")
    row = np.repeat(np.arange(len(rows)), last - first)  # of each pair, in this share
    pairs = planned.pairs[np.repeat(last - np.cumsum(last - first), last - first) + np.arange(len(row))]
    source = _side(store, 0, pairs, row, shape=(len(rows), planned.shape.source))
    target = _side(store, 1, pairs, row, shape=(len(rows), planned.shape.target))
    return Batch(*source, *target)


def _side(
    store: Store, side: int, pairs: Int[np.ndarray, " n"], row: Int[np.ndarray, " n"], *, shape: tuple[int, int]
) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    """Ids, segments and positions of one side: the pairs of a row one after another, all tokens at once."""
    lengths = store.lengths[pairs, side]
    before = np.cumsum(lengths) - lengths  # tokens of this side in the pairs before
    first_in_row = np.searchsorted(row, row)
    segment = np.arange(len(pairs)) - first_in_row + 1
    column = before - before[first_in_row]

    position = np.arange(lengths.sum()) - np.repeat(before, lengths)
    place = np.repeat(row * shape[1] + column, lengths) + position
    ids, segments, positions = np.zeros((3, *shape), np.int32)
    ids.reshape(-1)[place] = store.ids[np.repeat(store.starts[pairs, side], lengths) + position]
    segments.reshape(-1)[place] = np.repeat(segment, lengths)
    positions.reshape(-1)[place] = position
    return ids, segments, positions


def _gathered(store: Store, planned: Sequence[PlannedBatch], share: Share) -> Iterator[Batch]:
    make = functools.partial(gather, store, share=share)
    return iter(grain.MapDataset.source(planned).map(make).to_iter_dataset(READ))


def _in_background(function: Callable, *arguments: object) -> Future:
    """The result of a call in a thread which does not keep the interpreter from exiting."""
    future = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
