"""Which pairs go into which batch: a pure function of (lengths, seed, epoch) that touches no tokens.

Every host computes the same plan and takes its slice of each batch, so a batch number is a data position. Two plans:

*Buckets*: a few shapes chosen from the lengths; each row holds one pair, in the cheapest shape that it fits.
*Packing*: one shape; each row holds as many pairs as fit (best fit, of source and target together).

Rows × padded length of a side never exceeds `PlanConfig.tokens`. Every pair comes exactly once an epoch.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from transformer_jax.config import PlanConfig, PlanKind
from transformer_jax.errors import UserError

POOL = 16_384  # pairs packed together: more would pack no denser, and take longer
SAMPLE = 100_000  # pairs that a summary of a big corpus looks at
GRID = 256  # values of a side among which the shapes of buckets are chosen


class Shape(NamedTuple):
    """Padded shape of a batch: rows, and the length of each side in tokens (B, S, T)."""

    rows: int
    source: int
    target: int


class PlannedBatch(NamedTuple):
    """Some pairs of the corpus, the row of each one, and the padded shape.

    `rows` is sorted; the pairs of a row stand in it in the order in which they stand here. Rows that no pair is in
    are padding.
    """

    pairs: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n]
    shape: Shape


@runtime_checkable
class Plan(Protocol):
    """The batches of one epoch. Pure in its arguments; epochs differ in the order and make-up of the batches."""

    def __call__(self, lengths: Int[np.ndarray, "pairs 2"], *, seed: int, epoch: int) -> list[PlannedBatch]: ...


def make_plan(config: PlanConfig, lengths: Int[np.ndarray, "pairs 2"], *, longest: int | None = None) -> Plan:
    """The plan that `config` asks for, fit for corpora whose lengths are as `lengths` (tokens, EOS counted).

    `longest` makes room for pairs with sides up to so many tokens, which later epochs may have (subword sampling).

    Raises:
      UserError: where a row of the longest pair does not fit the budget, or there are no pairs.
    """
    if not len(lengths):
        raise UserError("there are no pairs to make batches of; look at what was dropped from data.train and data.dev.")
    if config.kind == PlanKind.PACKING:
        return _packing(config, lengths)
    return _buckets(config, lengths, longest)


def evaluation_plan(config: PlanConfig, lengths: Int[np.ndarray, "pairs 2"]) -> list[PlannedBatch]:
    """Every pair once, one in a row, in few shapes; a pair over the budget is in a batch of its own, never refused."""
    if not len(lengths):
        return []
    roomy = dataclasses.replace(
        config,
        kind=PlanKind.BUCKETS,
        tokens=max(config.tokens, int(lengths.max()) * config.rows_multiple),
        shapes=min(config.shapes, 4),
    )
    return make_plan(roomy, lengths)(lengths, seed=0, epoch=0)


def padding_waste(batches: Sequence[PlannedBatch], lengths: Int[np.ndarray, "pairs 2"]) -> float:
    """Part of the positions of both sides that is padding; empty rows count."""
    tokens = sum(int(lengths[batch.pairs].sum()) for batch in batches)
    positions = sum(batch.shape.rows * (batch.shape.source + batch.shape.target) for batch in batches)
    return 1 - tokens / positions


def summary(plan: Plan, lengths: Int[np.ndarray, "pairs 2"]) -> str:
    """A line for the log: batches an epoch, shapes and padding; of a big corpus estimated from a sample.

    `plan` is one of `make_plan`; a weighted one is tied to its corpora and can't be sampled.
    """
    sample, about = lengths, ""
    if len(lengths) > SAMPLE:
        sample, about = lengths[np.random.default_rng(0).choice(len(lengths), SAMPLE, replace=False)], "about "
    batches = plan(sample, seed=0, epoch=0)
    count = len(batches) * len(lengths) // len(sample)
    shapes = len({batch.shape for batch in batches})
    waste = 100 * padding_waste(batches, sample)
    shaped = "1 shape" if shapes == 1 else f"{shapes} shapes"
    return f"{len(lengths):,} pairs: {about}{count:,} batches an epoch in {shaped}, {waste:.1f} % padding"


def epoch_pairs(sizes: Sequence[int], weights: Sequence[float], *, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """Indices of the pairs of an epoch, where corpora of `sizes` pairs stand one after another in the store.

    Each pair of a corpus of weight w comes ⌊w⌋ or ⌈w⌉ times: an epoch is the next w · size places of an endless
    walk round the corpus, in an order drawn once. So any two pairs of a corpus are seen equally often in the long run.
    """
    chosen = []
    for corpus, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        order = np.random.default_rng((seed, corpus)).permutation(size) + sum(sizes[:corpus])
        share = Fraction(weight).limit_denominator(10**6) * size  # exact: sums of rounded steps would drift
        walk = np.arange(math.floor(epoch * share), math.floor((epoch + 1) * share))
        chosen.append(order[walk % size] if size else order)
    return np.concatenate(chosen)


def weighted(plan: Plan, sizes: Sequence[int], weights: Sequence[float]) -> Plan:
    """`plan` over `epoch_pairs` of several corpora instead of over every pair once."""
    if len(weights) != len(sizes) or min(weights) < 0 or not max(weights):
        raise UserError(
            f"data.weights is {tuple(weights)}; expected {len(sizes)} numbers ≥ 0, not all 0: "
            "one for each corpus of data.train."
        )

    def weighted_plan(lengths: Int[np.ndarray, "pairs 2"], *, seed: int, epoch: int) -> list[PlannedBatch]:
        chosen = epoch_pairs(sizes, weights, seed=seed, epoch=epoch)
        batches = plan(lengths[chosen], seed=seed, epoch=epoch)
        return [batch._replace(pairs=chosen[batch.pairs]) for batch in batches]

    return weighted_plan


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """One pair a row, in batches of the given shapes, which are sorted by S + T. The last one holds any pair."""

    shapes: tuple[Shape, ...]

    def __call__(self, lengths: Int[np.ndarray, "pairs 2"], *, seed: int, epoch: int) -> list[PlannedBatch]:
        limit = (self.shapes[-1].source, self.shapes[-1].target)
        _refuse_longer(lengths, limit, "the largest bucket of this run", "lower data.max_length")
        rng = np.random.default_rng((seed, epoch))
        cheapest = _cheapest_shape(self.shapes)[lengths[:, 0], lengths[:, 1]]
        batches, promoted = [], np.empty(0, np.int64)
        for number, shape in enumerate(self.shapes):
            fits = (lengths[promoted] <= (shape.source, shape.target)).all(axis=1)
            members = rng.permutation(np.concatenate([np.flatnonzero(cheapest == number), promoted[fits]]))
            whole = len(members) // shape.rows * shape.rows
            batches += [_one_a_row(pairs, shape) for pairs in members[:whole].reshape(-1, shape.rows)]
            rest, promoted = members[whole:], promoted[~fits]
            if self._is_cheaper_promoted(lengths[rest], number):
                promoted = np.concatenate([promoted, rest])
            elif len(rest):
                batches.append(_one_a_row(rest, shape))
        return [batches[i] for i in rng.permutation(len(batches))]

    def _is_cheaper_promoted(self, lengths: Int[np.ndarray, "n 2"], number: int) -> bool:
        """Whether what is left over pads less in larger shapes than in a last batch with empty rows."""
        shape, larger = self.shapes[number], self.shapes[number + 1 :]
        if not larger:
            return False
        next_shape = _cheapest_shape(larger)[lengths[:, 0], lengths[:, 1]]
        width = np.array([other.source + other.target for other in larger])[next_shape]
        own_width = shape.source + shape.target
        return bool((width - own_width).sum() < (shape.rows - len(lengths)) * own_width)


def _one_a_row(pairs: Int[np.ndarray, " n"], shape: Shape) -> PlannedBatch:
    return PlannedBatch(pairs, np.arange(len(pairs)), shape)


def _cheapest_shape(shapes: Sequence[Shape]) -> Int[np.ndarray, "S T"]:
    """Index of the first shape that holds a pair, for each pair of lengths; the last shape holds any."""
    table = np.empty((shapes[-1].source + 1, shapes[-1].target + 1), np.int64)
    for number in reversed(range(len(shapes))):
        table[: shapes[number].source + 1, : shapes[number].target + 1] = number
    return table


def _buckets(config: PlanConfig, lengths: Int[np.ndarray, "pairs 2"], longest: int | None) -> BucketPlan:
    limit = config.tokens // config.rows_multiple
    budget = f"a row of data.plan.tokens ({config.tokens}) / data.plan.rows_multiple ({config.rows_multiple})"
    _refuse_longer(lengths, (limit, limit), budget, "raise data.plan.tokens or lower data.max_length")
    if longest is not None:
        lengths = np.concatenate([lengths, np.full((1, 2), min(longest, limit), lengths.dtype)])
    most_rows = _round_down(len(lengths) + config.rows_multiple - 1, config.rows_multiple)
    shapes = []
    for source, target in bucket_lengths(lengths, config.shapes):
        rows = _round_down(config.tokens // max(source, target), config.rows_multiple)
        shapes.append(Shape(min(rows, most_rows), source, target))
    return BucketPlan(tuple(shapes))


def bucket_lengths(lengths: Int[np.ndarray, "pairs 2"], shapes: int) -> list[tuple[int, int]]:
    """At most `shapes` padded lengths (S, T), sorted by S + T, chosen to pad the pairs little; the last holds any.

    Greedy: the one that holds any pair first, then always the one which saves most padding; then each but the first
    is taken back once and chosen again in view of the others.
    """
    source, source_index = _grid(lengths[:, 0])
    target, target_index = _grid(lengths[:, 1])
    counts = np.zeros((len(source), len(target)), np.int64)
    np.add.at(counts, (source_index, target_index), 1)
    width = source[:, None] + target[None, :]

    chosen = [(len(source) - 1, len(target) - 1)]
    for _ in range(2 * (shapes - 1)):
        if len(chosen) == shapes:
            chosen.pop(1)
        chosen.append(_most_saving(counts, width, chosen))
    return sorted({(int(source[s]), int(target[t])) for s, t in chosen}, key=lambda pair: (sum(pair), pair))


def _grid(side: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " G"], Int[np.ndarray, " n"]]:
    """At most `GRID` values, the longest length among them, and the index of the first that each length fits."""
    longest = int(side.max())
    step = -(-longest // GRID)
    values = np.unique(np.minimum(-(-side // step) * step, longest))
    return values, np.searchsorted(values, side)


def _most_saving(
    counts: Int[np.ndarray, "S T"], width: Int[np.ndarray, "S T"], chosen: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The shape (as indices) which, added to the chosen ones, saves most: pairs now in a wider shape may move to it."""
    current = np.full(width.shape, width.max())
    for s, t in sorted(chosen, key=lambda shape: -width[shape]):
        current[: s + 1, : t + 1] = width[s, t]
    saved = np.zeros(width.shape, np.int64)
    for wide in np.unique(current):
        movable = np.where(current == wide, counts, 0).cumsum(axis=0).cumsum(axis=1)
        saved += np.maximum(wide - width, 0) * movable
    s, t = np.unravel_index(saved.argmax(), saved.shape)
    return int(s), int(t)


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Pairs packed into rows of the shape's source and target length (which are equal)."""

    shape: Shape

    def __call__(self, lengths: Int[np.ndarray, "pairs 2"], *, seed: int, epoch: int) -> list[PlannedBatch]:
        _refuse_longer_than_row(lengths, self.shape.source)
        rng = np.random.default_rng((seed, epoch))
        pairs = rng.permutation(len(lengths))
        row = np.empty(len(pairs), np.int64)
        rows = 0
        for start in range(0, len(pairs), POOL):
            pool = slice(start, start + POOL)
            row[pool] = rows + best_fit(lengths[pairs[pool]], row_length=self.shape.source)
            rows = int(row[pool].max()) + 1
        row = rng.permutation(rows)[row]
        order = np.argsort(row, kind="stable")
        pairs, row = pairs[order], row[order]
        bounds = np.searchsorted(row, np.arange(0, rows + self.shape.rows, self.shape.rows))
        return [
            PlannedBatch(pairs[start:end], row[start:end] % self.shape.rows, self.shape)
            for start, end in itertools.pairwise(bounds)
        ]


def best_fit(lengths: Int[np.ndarray, "n 2"], *, row_length: int) -> Int[np.ndarray, " n"]:
    """The row of each pair, so that neither side of any row is longer than `row_length`; rows are 0, 1, … .

    As many rows as the tokens would fill are open from the start. The longest pairs are placed first, each into the
    row with the least room among those that hold it; where none does, rows are opened. Pairs of the same two lengths
    are placed together, which makes the cost grow with the number of different lengths, not of pairs.
    """
    room = np.full((2, max(1, int(lengths.sum(axis=0).max()) // row_length)), row_length, np.int32)
    row = np.empty(len(lengths), np.int64)
    for members in _same_lengths(lengths):
        source, target = lengths[members[0]]
        while len(members):
            fitting = np.flatnonzero((room[0] >= source) & (room[1] >= target))
            if not len(fitting):
                fitting = room.shape[1] + np.arange(-(-len(members) // int(row_length // max(source, target))))
                room = np.concatenate([room, np.full((2, len(fitting)), row_length, np.int32)], axis=1)
            tightest = fitting[np.argsort(room[:, fitting].sum(axis=0), kind="stable")][: len(members)]
            row[members[: len(tightest)]] = tightest
            room[0, tightest] -= source
            room[1, tightest] -= target
            members = members[len(tightest) :]
    return np.unique(row, return_inverse=True)[1].reshape(-1)


def _same_lengths(lengths: Int[np.ndarray, "n 2"]) -> list[Int[np.ndarray, " m"]]:
    """Indices of the pairs, those of the same two lengths together, most tokens first."""
    order = np.lexsort((lengths[:, 0], -lengths.sum(axis=1)))
    changes = (np.diff(lengths[order], axis=0) != 0).any(axis=1)
    return np.split(order, np.flatnonzero(changes) + 1)


def _packing(config: PlanConfig, lengths: Int[np.ndarray, "pairs 2"]) -> PackingPlan:
    rows = _round_down(config.tokens // config.row_length, config.rows_multiple)
    if not rows:
        raise UserError(
            f"data.plan.tokens is {config.tokens}, which holds fewer than data.plan.rows_multiple "
            f"({config.rows_multiple}) rows of data.plan.row_length ({config.row_length}). Raise data.plan.tokens to "
            f"{config.rows_multiple * config.row_length} or lower data.plan.row_length."
        )
    _refuse_longer_than_row(lengths, config.row_length)
    return PackingPlan(Shape(rows, config.row_length, config.row_length))


def _refuse_longer_than_row(lengths: Int[np.ndarray, "pairs 2"], row_length: int) -> None:
    remedy = f"raise data.plan.row_length to {int(lengths.max(initial=0))} or lower data.max_length to {row_length}"
    _refuse_longer(lengths, (row_length, row_length), "a row of data.plan.row_length", remedy)


def _refuse_longer(lengths: Int[np.ndarray, "pairs 2"], limit: tuple[int, int], what: str, remedy: str) -> None:
    longer = np.flatnonzero((lengths > limit).any(axis=1))
    if len(longer):
        source, target = lengths[longer[0]]
        raise UserError(
            f"{what} holds {limit[0]} source and {limit[1]} target tokens, but {len(longer)} of {len(lengths)} pairs "
            f"are longer; the first is pair {longer[0]} (counted from 0) with {source} and {target}: {remedy}."
        )


def _round_down(number: int, multiple: int) -> int:
    return number // multiple * multiple
