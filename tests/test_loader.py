import dataclasses
import itertools
import threading

import numpy as np
import pytest

from transformer_jax.batch import Batch, Share
from transformer_jax.config import PlanConfig, PlanKind
from transformer_jax.data.loader import BEGINNING, Position, batches, evaluation_batches, gather
from transformer_jax.data.plan import PlannedBatch, Shape, make_plan, weighted
from transformer_jax.data.store import build_store, store_in_memory
from transformer_jax.errors import UserError

KINDS = pytest.mark.parametrize("kind", list(PlanKind))


def random_pairs(count, *, seed=0, longest=12):
    """Pairs of token ids that end with EOS, no two the same: the first source token is the number of the pair + 2."""
    rng = np.random.default_rng(seed)
    sides = [[rng.integers(2, 100, rng.integers(0, longest - 1)).tolist() for _ in range(count)] for _ in range(2)]
    return [([i + 2, *source, 1], [*target, 1]) for i, (source, target) in enumerate(zip(*sides, strict=True))]


@pytest.fixture(scope="module")
def store():
    return store_in_memory(random_pairs(60))


def plan_for(store, kind, **fields):
    return make_plan(PlanConfig(kind=kind, tokens=96, shapes=3, row_length=24, **fields), store.lengths)


def take(count, store, plan, **arguments):
    return list(itertools.islice(batches(lambda epoch: store, plan, seed=5, **arguments), count))


def assert_equal(stream, other):
    assert [position for position, _ in stream] == [position for position, _ in other]
    for (_, batch), (_, other_batch) in zip(stream, other, strict=True):
        for array, other_array in zip(batch, other_batch, strict=True):
            np.testing.assert_array_equal(array, other_array)


def pairs_of(batch):
    """The pairs of token ids in a batch, read by its segments."""
    return [
        (source[source_segments == segment].tolist(), target[target_segments == segment].tolist())
        for source, source_segments, _, target, target_segments, _ in zip(*batch, strict=True)
        for segment in range(1, source_segments.max(initial=0) + 1)
    ]


def test_a_packed_batch_has_the_ids_segments_and_positions_of_its_pairs(tmp_path):
    pairs = [([5, 6, 1], [7, 1]), ([8, 1], [9, 10, 1]), ([11, 1], [1])]
    store = build_store(tmp_path / "store", pairs, fingerprint="f")
    planned = PlannedBatch(np.array([2, 0, 1]), np.array([0, 0, 2]), Shape(3, 6, 5))
    batch = gather(store, planned)
    expected = Batch(
        source=[[11, 1, 5, 6, 1, 0], [0] * 6, [8, 1, 0, 0, 0, 0]],
        source_segments=[[1, 1, 2, 2, 2, 0], [0] * 6, [1, 1, 0, 0, 0, 0]],
        source_positions=[[0, 1, 0, 1, 2, 0], [0] * 6, [0, 1, 0, 0, 0, 0]],
        target=[[1, 7, 1, 0, 0], [0] * 5, [9, 10, 1, 0, 0]],
        target_segments=[[1, 2, 2, 0, 0], [0] * 5, [1, 1, 1, 0, 0]],
        target_positions=[[0, 0, 1, 0, 0], [0] * 5, [0, 1, 2, 0, 0]],
    )
    for array, wanted in zip(batch, expected, strict=True):
        assert type(array) is np.ndarray
        assert array.dtype == np.int32
        assert array.tolist() == wanted


@KINDS
def test_an_epoch_has_each_pair_once_and_the_next_one_follows(store, kind):
    plan = plan_for(store, kind)
    length = len(plan(store.lengths, seed=5, epoch=0))
    stream = take(length + 1, store, plan)
    seen = [pair for _, batch in stream[:length] for pair in pairs_of(batch)]
    assert sorted(seen) == sorted(random_pairs(60))
    assert [position for position, _ in stream[-3:]] == [Position(0, length - 1), Position(1, 0), Position(1, 1)]


@KINDS
def test_resuming_at_any_position_gives_the_same_stream(store, kind):
    plan = plan_for(store, kind)
    length = len(plan(store.lengths, seed=5, epoch=0))
    stream = take(2 * length + 3, store, plan)
    for done in (0, 1, length - 1, length, length + 2):
        start = stream[done - 1][0] if done else BEGINNING
        assert_equal(take(len(stream) - done, store, plan, start=start), stream[done:])


@KINDS
@pytest.mark.parametrize("parts", [[(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)], [(0, 3), (1, 2)], [(0, 1, 2), (3,)]])
def test_the_shares_of_all_processes_are_the_batch_and_empty_rows(store, kind, parts):
    """Whoever takes which of four parts; the rows of a batch may be so few that the last parts are empty."""
    plan = plan_for(store, kind)
    stream = take(12, store, plan)
    owner = {part: (process, place) for process, own in enumerate(parts) for place, part in enumerate(own)}
    shares = [take(12, store, plan, share=Share(own, count=4, multiple=2)) for own in parts]
    for (position, batch), *of_processes in zip(stream, *shares, strict=True):
        assert all(other == position for other, _ in of_processes)
        rows = -(-len(batch.target) // 8) * 2  # of a part
        for name, whole in batch._asdict().items():
            pieces = []
            for part in range(4):
                process, place = owner[part]
                pieces.append(getattr(of_processes[process][1], name)[place * rows : (place + 1) * rows])
            joined = np.concatenate(pieces)
            np.testing.assert_array_equal(joined[: len(whole)], whole)
            assert joined.shape == (4 * rows, whole.shape[1])
            assert not joined[len(whole) :].any()


def test_the_position_does_not_depend_on_how_many_processes_there_are(store):
    plan = plan_for(store, PlanKind.BUCKETS, rows_multiple=4)
    stream = take(12, store, plan)
    resumed = [take(7, store, plan, start=stream[4][0], share=Share((part,), count=2)) for part in range(2)]
    for (_, whole), (_, upper), (_, lower) in zip(stream[5:], *resumed, strict=True):
        np.testing.assert_array_equal(whole.source, np.concatenate([upper.source, lower.source]))


def test_a_process_reads_the_pairs_of_its_rows_only(store):
    """The ids of all other pairs could be out of reach."""
    ids, (pair, other) = store.ids.copy(), (3, 5)
    start = store.starts[other, 0]
    ids[start : start + store.lengths[other].sum()] = -1
    planned = PlannedBatch(np.array([pair, other]), np.array([0, 1]), Shape(2, 24, 24))
    first, second = (
        gather(dataclasses.replace(store, ids=ids), planned, share=Share((part,), count=2)) for part in range(2)
    )
    assert first.source[0, : store.lengths[pair, 0]].tolist() == store.source(pair).tolist()
    assert (first.source >= 0).all()
    assert (second.source < 0).any()


def test_each_epoch_can_have_another_store():
    """Subword sampling: the same pairs, other ids and lengths."""
    stores = [store_in_memory(random_pairs(20, seed=epoch)) for epoch in range(4)]
    plan = make_plan(PlanConfig(tokens=96, shapes=3), stores[0].lengths, longest=12)
    seen = {epoch: [] for epoch in range(3)}
    epoch = 0
    for position, batch in batches(stores.__getitem__, plan, seed=0):
        seen[epoch] += pairs_of(batch)
        epoch = position.epoch
        if epoch == 3:
            break
    for epoch, pairs in seen.items():
        assert sorted(pairs) == sorted(random_pairs(20, seed=epoch))


def test_the_next_epoch_is_made_while_this_one_is_read(store):
    asked, plan = [threading.Event() for _ in range(9)], plan_for(store, PlanKind.BUCKETS)

    def store_of_epoch(epoch):
        asked[epoch].set()
        return store

    next(batches(store_of_epoch, plan, seed=0))
    assert asked[1].wait(timeout=10)
    assert not asked[2].is_set()


def test_an_error_in_making_an_epoch_reaches_the_reader(store):
    def store_of_epoch(epoch):
        if epoch == 1:
            raise UserError("the corpus is gone")
        return store

    with pytest.raises(UserError, match="the corpus is gone"):
        for _ in batches(store_of_epoch, plan_for(store, PlanKind.BUCKETS), seed=0):
            pass


def test_an_epoch_may_be_empty(store):
    """A tiny corpus of small weight has no pair in some epochs."""
    plan = weighted(plan_for(store, PlanKind.BUCKETS), (60,), (0.01,))
    (position, batch), *_ = take(1, store, plan)
    assert position == Position(2, 0)
    assert len(pairs_of(batch)) == 1


@KINDS
@pytest.mark.parametrize("process_count", [1, 4])
def test_evaluation_of_13_pairs_on_8_devices_has_13(kind, process_count):
    pairs = random_pairs(13)
    config = PlanConfig(kind=kind, tokens=96, row_length=24, rows_multiple=8)
    processes = [
        list(evaluation_batches(store_in_memory(pairs), config, share=Share(tuple(parts.tolist()), count=8)))
        for parts in np.split(np.arange(8), process_count)
    ]
    shapes = [[batch.source.shape for batch in process] for process in processes]
    assert all(process == shapes[0] for process in shapes), "all processes run the same steps"
    assert all(rows % (8 // process_count) == 0 for rows, _ in shapes[0])
    assert sorted(pair for process in processes for batch in process for pair in pairs_of(batch)) == sorted(pairs)


def test_evaluation_of_no_pairs_has_no_batches():
    assert list(evaluation_batches(store_in_memory([]), PlanConfig())) == []
