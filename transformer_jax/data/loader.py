"""From store and plan to batches: each process gathers its slice of the rows of each batch, ahead of the training.

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

from transformer_jax.batch import Batch
from transformer_jax.config import PlanConfig
from transformer_jax.data.plan import Plan, PlannedBatch, evaluation_plan
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError

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
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[Position, Batch]]:
    """The training batches from `start` on, without end, each with the position that comes after it.

    Arrays are NumPy int32. A process gets rows × process_index / process_count and so on of each batch: the slices of
    all processes, one after another, are the batch, and depend on nothing else.
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
        slices = _gathered(store, planned[first:], process_index=process_index, process_count=process_count)
        for number, batch in enumerate(slices, start=first + 1):
            yield Position(epoch, number) if number < len(planned) else Position(epoch + 1, 0), batch
        epoch, first = epoch + 1, 0


def evaluation_batches(
    store: Store, config: PlanConfig, *, process_index: int = 0, process_count: int = 1
) -> Iterator[Batch]:
    """Every pair of the store exactly once, in batches of few shapes, padded with empty rows (of segment 0)."""
    planned = evaluation_plan(config, store.lengths)
    return _gathered(store, planned, process_index=process_index, process_count=process_count)


def gather(store: Store, planned: PlannedBatch, *, process_index: int = 0, process_count: int = 1) -> Batch:
    """The planned batch, or a process's slice of its rows, as int32 arrays."""
    if planned.shape.rows % process_count:
        raise UserError(
            f"a batch of {planned.shape.rows} rows can't be shared by {process_count} processes; "
            "make data.plan.rows_multiple a multiple of the number of processes (of devices, rather)."
        )
    rows = planned.shape.rows // process_count
    first, last = np.searchsorted(planned.rows, (rows * process_index, rows * (process_index + 1)))
    pairs, row = planned.pairs[first:last], planned.rows[first:last] - rows * process_index
    source = _side(store, 0, pairs, row, shape=(rows, planned.shape.source))
    target = _side(store, 1, pairs, row, shape=(rows, planned.shape.target))
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


def _gathered(
    store: Store, planned: Sequence[PlannedBatch], *, process_index: int, process_count: int
) -> Iterator[Batch]:
    make = functools.partial(gather, store, process_index=process_index, process_count=process_count)
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
