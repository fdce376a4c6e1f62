"""Many sentences searched in few shapes: a pool of rows, each with a sentence of its own, at a position of its own.

A row whose sentence is done is given the next one, so the work follows the tokens that are made and not the longest
sentence of a batch. Sentences come by falling length. Between two runs of the compiled search the pool is brought to
the shape [B rows, S source tokens, T target tokens] that what is left to do needs, from a short list.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from transformer_jax.batch import segments_and_positions
from transformer_jax.config import EnsembleMean
from transformer_jax.decoding import search
from transformer_jax.decoding.batches import padded_length, power_of_two, stack
from transformer_jax.decoding.ensemble import mean_log_probs
from transformer_jax.decoding.search import Asked, Hypotheses, Rules, State
from transformer_jax.nn.live import Live, live_among
from transformer_jax.nn.stacks import resized
from transformer_jax.nn.transformer import Transformer

GROUPS = 8  # a pool is refilled when one in so many of its rows is free
STANDBY = 5  # one in so many rows is more than a step computes: beams shrink, so live hypotheses need fewer
SHRINK = 2  # when none is waiting a pool is cut to this part of its rows, a half
SHORTEST = 32  # target tokens that a pool has room for at first
NOBODY = -1


class Engine(NamedTuple):
    """What programs are compiled for. Hashable."""

    model: Transformer
    rules: Rules
    ensemble: EnsembleMean = EnsembleMean.PROBABILITIES


class Shape(NamedTuple):
    rows: int  # B
    source: int  # S
    target: int  # T


def search_all(
    engine: Engine,
    members: tuple[Any, ...],
    sources: Sequence[Sequence[int]],
    asked: Asked,
    *,
    tokens: int,
    positions: int = sys.maxsize,
) -> Iterator[tuple[int, Hypotheses]]:
    """The number of each sentence with its hypotheses (NumPy, without the batch axis), in the order in which they end.

    Args:
      members: the parameters of each member of an ensemble.
      asked: for all sentences.
      tokens: B × S is at most this on each device, but for a sentence which is longer by itself.
      positions: S is at most this, the model's last position; no sentence is longer.
    """
    if not sources:
        return
    lengths = np.array([len(source) for source in sources], np.int64)
    waiting = np.argsort(lengths, kind="stable").tolist()  # the next one last
    pool = Pool(engine, members, sources, asked)
    options = {"tokens": tokens * pool.devices, "positions": positions}
    while waiting or pool.busy.any():
        longest = max(lengths[pool.owner[pool.busy]].max(initial=1), lengths[waiting[-1]] if waiting else 1)
        reached = int(pool.position[pool.busy].max(initial=0))
        pool.bring_to(shape_for(pool.shape, int(longest), reached, int(pool.busy.sum()), len(waiting), **options))
        while waiting and not pool.busy.all():
            pool.begin([waiting.pop() for _ in range(min(pool.group, len(waiting), int((~pool.busy).sum())))])
        yield from pool.run(free=pool.group if waiting else pool.shape.rows - pool.shape.rows // SHRINK)


def shape_for(
    now: Shape, longest: int, reached: int, busy: int, waiting: int, *, tokens: int, positions: int = sys.maxsize
) -> Shape:
    """The shape for sentences of at most `longest` tokens, of which `busy` have translations of up to `reached`."""
    source = min(padded_length(longest), positions)
    room = power_of_two(max(1, tokens // source) + 1) // 2  # the last power of two that fits
    rows = max(power_of_two(max(1, busy)), min(room, power_of_two(busy + waiting)))
    target = max(SHORTEST, power_of_two(reached + 1))
    same = (rows, source) == (now.rows, now.source)
    return Shape(rows, source, max(target, now.target) if same else target)


class Pool:
    """A search state on the device, and on the host which sentence has which row."""

    def __init__(self, engine: Engine, members: tuple[Any, ...], sources: Sequence[Sequence[int]], asked: Asked):
        self.engine, self.members, self.sources, self.asked = engine, members, sources, asked
        self.shape = Shape(1, 1, SHORTEST)
        self.owner = np.array([NOBODY])  # [B]
        self.position = np.array([0])  # [B]
        sharding = getattr(jax.tree.leaves(members)[0], "sharding", None)  # NumPy's arrays have none
        self.mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        self.state = self._placed(empty(engine, members, self._asked(self.owner), self.shape))

    @property
    def devices(self) -> int:
        """Over how many devices rows are split."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def busy(self) -> np.ndarray:
        """The rows that have a sentence, bool [B]."""
        return self.owner != NOBODY

    @property
    def group(self) -> int:
        """How many sentences are begun together."""
        return max(1, self.shape.rows // GROUPS)

    def bring_to(self, shape: Shape) -> None:
        """Changes the room that there is; sentences under way keep theirs."""
        if shape == self.shape:
            return
        rows = np.full(shape.rows, NOBODY)
        rows[: self.busy.sum()] = np.flatnonzero(self.busy)
        self.owner = np.where(rows == NOBODY, NOBODY, self.owner[rows])
        self.position = np.where(rows == NOBODY, 0, self.position[rows])
        self.shape = shape
        self.state = self._placed(reshaped(self.state, rows, shape))

    def begin(self, sentences: Sequence[int]) -> None:
        """Gives free rows to sentences, at most a group."""
        rows = np.full(self.group, self.shape.rows)  # beyond the last: none
        rows[: len(sentences)] = np.flatnonzero(~self.busy)[: len(sentences)]
        source = stack([self.sources[index] for index in sentences], rows=self.group, length=self.shape.source)
        asked = self._asked(np.append(sentences, np.full(self.group - len(sentences), NOBODY)))
        self.state = self._placed(begin(self.engine, self.members, self.state, source, asked, rows))
        self.owner[rows[: len(sentences)]] = sentences
        self.position[rows[: len(sentences)]] = 0

    def run(self, *, free: int) -> list[tuple[int, Hypotheses]]:
        """Searches until so many rows are free, or one needs more room; the sentences that are done."""
        asked = self._asked(self.owner)
        state, found = run(self.engine, self.members, self.state, asked, free, rows=self._computed_rows)
        self.state = self._placed(state)
        done, self.position = map(np.array, jax.device_get((self.state.done, self.state.position)))
        ended = np.flatnonzero(done & self.busy)
        found = jax.device_get(found) if len(ended) else found
        results = [(int(self.owner[row]), Hypotheses(*(field[row] for field in found))) for row in ended]
        self.owner[ended] = NOBODY
        return results

    @property
    def _computed_rows(self) -> int:
        """How many rows the hypotheses of a step would fill. Fewer than all only where that saves time: where beams
        shrink, on one CPU, on which a step takes as long as it has rows."""
        rules, rows = self.engine.rules, self.shape.rows
        shrinks = rules.slots > 1 and not rules.full and self.mesh is None and jax.default_backend() == "cpu"
        return rows - rows // STANDBY if shrinks else rows

    def _placed(self, state: State) -> State:
        """The state with its rows split over the devices, if they divide them."""
        if self.mesh is None:
            return state
        whole = self.shape.rows % self.mesh.size
        return jax.device_put(state, NamedSharding(self.mesh, PartitionSpec(None if whole else self.mesh.axis_names)))

    def _asked(self, sentences: np.ndarray) -> Asked:
        """What is asked for some of the sentences; nothing for nobody."""
        asked = jax.tree.map(lambda field: field[np.maximum(sentences, 0)], self.asked)
        return asked._replace(limits=np.where(sentences == NOBODY, 0, asked.limits).astype(np.int32))


def start(engine: Engine, members: tuple[Any, ...], source: Int[Array, "B S"], asked: Asked, *, length: int) -> State:
    """Encodes sentences with each member: a search before its first step, with room for `length` tokens."""
    segments, positions = segments_and_positions(source)
    model, rules = engine.model, engine.rules

    def cache(params):
        encoded = model.apply(params, source, segments, positions, method="encode")
        return model.apply(params, encoded, segments, beams=rules.slots, length=length, method="init_cache")

    return search.init(tuple(map(cache, members)), asked, rules, max_length=length)


# Never run: what was traced once, for its shapes, is remembered.
_jitted_start = jax.jit(start, static_argnames=("engine", "length"))


def empty(engine: Engine, members: tuple[Any, ...], asked: Asked, shape: Shape) -> State:
    """The state of a pool without sentences."""
    source = np.zeros((shape.rows, shape.source), np.int32)
    shapes = _jitted_start.eval_shape(engine, members, source, asked, length=shape.target)
    state = jax.device_put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    return state._replace(done=np.ones(shape.rows, bool))


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="state")
def begin(
    engine: Engine,
    members: tuple[Any, ...],
    state: State,
    source: Int[Array, "G S"],
    asked: Asked,
    rows: Int[Array, "G"],
) -> State:
    """The state with new sentences in some of its rows; those for rows beyond the last are dropped."""
    new = start(engine, members, source, asked, length=state.tokens.shape[2])
    return jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, new)


@functools.partial(jax.jit, static_argnames=("engine", "rows"), donate_argnames="state")
def run(
    engine: Engine, members: tuple[Any, ...], state: State, asked: Asked, free: Int[Array, ""], *, rows: int
) -> tuple[State, Hypotheses]:
    """Steps until so many sentences are done, or one that is not has no room for a further token.

    Args:
      rows: W, at most B. A step computes W × K hypotheses.
    """

    def goes_on(state: State):
        longest = jnp.where(state.done, 0, state.position).max()
        return (state.done.sum() < free) & (longest < state.tokens.shape[2])

    state = jax.lax.while_loop(goes_on, lambda state: advance(engine, members, state, asked, rows=rows), state)
    return state, search.finish(state, asked, engine.rules)


def advance(engine: Engine, members: tuple[Any, ...], state: State, asked: Asked, *, rows: int) -> State:
    """One token more for the live hypotheses of the sentences for which `rows` have room; the others rest."""
    if rows == len(state.done):
        return search.advance(mean_step(engine, members), state, asked, engine.rules)
    live = (search.live_sums(state) > -jnp.inf) & ~state.done[:, None]
    rest = resting(live, state.position, rows)
    step = mean_step(engine, members, live_among(live & ~rest[:, None], rows))
    after = search.advance(step, state._replace(done=state.done | rest), asked, engine.rules)
    # Those that rest are no longer done. Their ancestry is in order, and their parents are their own slots.
    return after._replace(
        done=jnp.where(rest, state.done, after.done), token=jnp.where(rest[:, None], state.token, after.token)
    )


def resting(live: Bool[Array, "B K"], position: Int[Array, "B"], rows: int) -> Bool[Array, "B"]:
    """The sentences for which `rows` have no room in a step. Those that are furthest go first."""
    order = jnp.argsort(-position)
    filled = jnp.cumsum(live.sum(axis=1)[order])
    return jnp.zeros(len(order), bool).at[order].set(filled > rows * live.shape[1])


def mean_step(engine: Engine, members: tuple[Any, ...], live: Live | None = None) -> search.Step:
    """A step with the mean of the members' probabilities; its cache has one of each."""

    def step(token, parent, position, cache):
        log_probs, after = [], []
        for params, own in zip(members, cache, strict=True):
            logits, own = engine.model.apply(params, token, parent, position, own, live, method="decode_step")
            log_probs.append(jax.nn.log_softmax(logits))
            after.append(own)
        return mean_log_probs(log_probs, engine.ensemble), tuple(after)

    return step


def search_batch(
    engine: Engine, members: tuple[Any, ...], source: Int[Array, "B S"], asked: Asked, *, length: int
) -> Hypotheses:
    """A batch from the first step to the last, within one program; outputs have at most `length` tokens."""
    caches = start(engine, members, source, asked, length=length).cache
    step = mean_step(engine, members)
    return search.search(step, caches, asked, engine.rules, max_length=length)


@functools.partial(jax.jit, static_argnames="shape")
def reshaped(state: State, rows: Int[Array, "B"], shape: Shape) -> State:
    """The state with these of its rows and with other room; rows of nobody are done."""
    state = jax.tree.map(lambda leaf: jnp.take(leaf, jnp.maximum(rows, 0), axis=0), state)
    caches = tuple(cache.resized(source=shape.source, length=shape.target) for cache in state.cache)
    tokens, ended = resized(state.tokens, shape.target, axis=2), state.ended
    if ended is not None:
        ended = ended._replace(tokens=resized(ended.tokens, shape.target, axis=2))
    return state._replace(done=state.done | (rows == NOBODY), tokens=tokens, ended=ended, cache=caches)
