"""Beam search over a step function. It knows no model; one `jit` around `beam_search` is one program.

Every sentence has K slots. A hypothesis that ends keeps its slot and the beam of that sentence shrinks, so a beam of
1 is greedy search to the token. A sentence is done when none of its hypotheses is live, when its output limit is
reached, or when a bound proves that no live hypothesis can enter its n-best list; then it does not change any more,
whatever its neighbours do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.batch import BOS, EOS, PAD
from transformer_jax.config import LengthPenalty

Cache = Any  # whatever pytree the step wants
Penalty = Callable[[Array], Array]  # lengths -> what log-probabilities are divided by

IMPOSSIBLE = -1e9  # log-probabilities below it are masks, and never become a hypothesis


@runtime_checkable
class Step(Protocol):
    """Next-token log-probabilities of every hypothesis.

    `parent` says which hypothesis of the last step each token continues. At position 0 all tokens are BOS and all
    parents their own slot. What is returned for slots without a live hypothesis is not looked at.
    """

    def __call__(
        self, token: Int[Array, "B K"], parent: Int[Array, "B K"], position: Int[Array, ""], cache: Cache
    ) -> tuple[Float[Array, "B K V"], Cache]: ...


class Hypotheses(NamedTuple):
    """The n best of each sentence: finished ones by falling score, then unfinished ones by falling score.

    An entry of length 0 and score −∞ is none at all: that sentence has fewer than n hypotheses.
    """

    tokens: Array  # int32 [B, n, T], EOS included, then only pads
    log_probs: Array  # float32 [B, n], summed over the tokens
    scores: Array  # float32 [B, n], log_probs / LP(lengths)
    lengths: Array  # int32 [B, n], tokens with EOS; of unfinished ones, all tokens
    finished: Array  # bool [B, n], whether it ends with EOS


class State(NamedTuple):
    position: Array  # int32 scalar: how many tokens live hypotheses have
    tokens: Array  # int32 [B, K, T]
    log_probs: Array  # float32 [B, K], −∞: the slot is empty
    lengths: Array  # int32 [B, K]
    finished: Array  # bool [B, K]
    token: Array  # int32 [B, K]: the last token of live hypotheses
    parent: Array  # int32 [B, K]: the slot which its hypothesis had a step before
    done: Array  # bool [B]
    cache: Cache


class Candidates(NamedTuple):
    """The K best continuations of a sentence's live hypotheses, best first."""

    log_probs: Array  # float32 [B, K], −∞: no candidate
    parent: Array  # int32 [B, K]
    token: Array  # int32 [B, K]


def beam_search(
    step: Step,
    cache: Cache,
    *,
    limits: Int[Array, "B"],
    max_length: int,
    beam_size: int = 4,
    top_beams: int = 1,
    penalty: LengthPenalty = LengthPenalty.GNMT,
    alpha: float | Float[Array, ""] = 0.6,
) -> Hypotheses:
    """The `top_beams` best of each sentence by log-probability / LP(L) (section 6.1; Wu et al., 2016).

    Args:
      limits: the most tokens of each output, EOS counted, at most `max_length`. A sentence of limit 0 is padding.
      max_length: T of the result.

    Raises:
      ValueError: unless 1 ≤ top_beams ≤ beam_size.
    """
    if not 1 <= top_beams <= beam_size:
        raise ValueError(f"top_beams is {top_beams}; expected 1 to beam_size ({beam_size}).")
    limits = jnp.minimum(limits, max_length)
    divisor = functools.partial(length_penalty, penalty=penalty, alpha=alpha)

    def advance(state: State) -> State:
        log_probs, cache = step(state.token, state.parent, state.position, state.cache)
        state = extend(state, best_candidates(live_log_probs(state), allowed(log_probs)))
        done = state.done | is_done(state, limits, top_beams=top_beams, divisor=divisor)
        return state._replace(done=done, cache=cache)

    state = init(cache, limits, beam_size=beam_size, max_length=max_length)
    state = jax.lax.while_loop(lambda state: ~state.done.all(), advance, state)
    return finish(state, top_beams=top_beams, divisor=divisor)


def greedy(step: Step, cache: Cache, *, limits: Int[Array, "B"], max_length: int) -> Hypotheses:
    """The most probable token at each step; scores are log-probabilities."""
    return beam_search(step, cache, limits=limits, max_length=max_length, beam_size=1, penalty=LengthPenalty.NONE)


def init(cache: Cache, limits: Int[Array, "B"], *, beam_size: int, max_length: int) -> State:
    """One live hypothesis without tokens in slot 0; the other slots are empty."""
    slots = (limits.shape[0], beam_size)
    own_slot = jnp.broadcast_to(jnp.arange(beam_size, dtype=jnp.int32), slots)
    return State(
        position=jnp.zeros((), jnp.int32),
        tokens=jnp.full((*slots, max_length), PAD, jnp.int32),
        log_probs=jnp.where(own_slot == 0, 0.0, -jnp.inf).astype(jnp.float32),
        lengths=jnp.zeros(slots, jnp.int32),
        finished=jnp.zeros(slots, bool),
        token=jnp.full(slots, BOS, jnp.int32),
        parent=own_slot,
        done=limits <= 0,
        cache=cache,
    )


def live_log_probs(state: State) -> Float[Array, "B K"]:
    """The sums of the live hypotheses, −∞ in other slots."""
    return jnp.where(state.finished, -jnp.inf, state.log_probs)


def allowed(log_probs: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Log-probabilities in float32 with −∞ for the pad id, masked tokens and NaN."""
    log_probs = log_probs.astype(jnp.float32)
    log_probs = log_probs.at[:, :, PAD].set(-jnp.inf)
    return jnp.where(log_probs > IMPOSSIBLE, log_probs, -jnp.inf)


def best_candidates(sums: Float[Array, "B K"], log_probs: Float[Array, "B K V"]) -> Candidates:
    """The K best of the K × V continuations of hypotheses with these sums."""
    batch, beams, vocab = log_probs.shape
    totals = (sums[:, :, None] + log_probs).reshape(batch, beams * vocab)
    best, index = jax.lax.top_k(totals, beams)
    return Candidates(best, parent=index // vocab, token=index % vocab)


def extend(state: State, candidates: Candidates) -> State:
    """Puts the j-th candidate into the j-th slot that is free; finished hypotheses and done sentences keep theirs."""
    kept = state.finished | state.done[:, None]
    rank = jnp.maximum(jnp.cumsum(~kept, axis=1, dtype=jnp.int32) - 1, 0)
    log_probs, parent, token = (jnp.take_along_axis(field, rank, axis=1) for field in candidates)

    own_slot = jnp.broadcast_to(jnp.arange(kept.shape[1], dtype=jnp.int32), kept.shape)
    log_probs = jnp.where(kept, state.log_probs, log_probs)
    parent = jnp.where(kept, own_slot, parent)
    token = jnp.where(kept | (log_probs == -jnp.inf), PAD, token)

    tokens = jnp.take_along_axis(state.tokens, parent[:, :, None], axis=1)
    return state._replace(
        position=state.position + 1,
        tokens=jax.lax.dynamic_update_index_in_dim(tokens, token, state.position, axis=2),
        log_probs=log_probs,
        lengths=jnp.where(kept, state.lengths, state.position + 1),
        finished=state.finished | (token == EOS),
        token=token,
        parent=parent,
    )


def is_done(state: State, limits: Int[Array, "B"], *, top_beams: int, divisor: Penalty) -> Bool[Array, "B"]:
    """Whether nothing is live, the limit is reached, or no live hypothesis can enter the n-best list."""
    best_live = live_log_probs(state).max(axis=1)
    finished_scores = jnp.where(state.finished, state.log_probs / divisor(state.lengths), -jnp.inf)
    worst_kept = jax.lax.top_k(finished_scores, top_beams)[0][:, -1]
    bound = score_bound(best_live, state.position, limits, divisor)
    return (best_live == -jnp.inf) | (state.position >= limits) | (bound <= worst_kept)


def score_bound(
    log_probs: Float[Array, "B"], length: Int[Array, ""], limits: Int[Array, "B"], divisor: Penalty
) -> Float[Array, "B"]:
    """The highest score that hypotheses of `length` tokens can still finish with.

    Sums only fall, and LP is monotone in L, rising or falling with the sign of α: the best length is either the next
    one or the limit.
    """
    next_length = jnp.broadcast_to(length + 1, limits.shape)
    return jnp.maximum(log_probs / divisor(next_length), log_probs / divisor(limits))


def length_penalty(
    lengths: Int[Array, "..."], *, penalty: LengthPenalty, alpha: float | Float[Array, ""]
) -> Float[Array, "..."]:
    """LP(L), which log-probabilities are divided by; L counts the tokens with EOS.

    gnmt ((5 + L) / 6)^α (Wu et al., 2016, equation 14), power L^α, none 1.
    """
    lengths = jnp.maximum(lengths, 1).astype(jnp.float32)
    match penalty:
        case LengthPenalty.GNMT:
            return ((5.0 + lengths) / 6.0) ** alpha
        case LengthPenalty.POWER:
            return lengths**alpha
        case LengthPenalty.NONE:
            return jnp.ones_like(lengths)


def finish(state: State, *, top_beams: int, divisor: Penalty) -> Hypotheses:
    """The n-best lists. Slots without a hypothesis, and those of sentences of limit 0, come last as no entry."""
    exists = (state.log_probs > -jnp.inf) & (state.lengths > 0)
    log_probs = jnp.where(exists, state.log_probs, -jnp.inf)
    scores = log_probs / divisor(state.lengths)
    order = jnp.lexsort((-scores, ~state.finished), axis=1)[:, :top_beams]  # the last key is the first looked at
    best = functools.partial(jnp.take_along_axis, indices=order, axis=1)
    return Hypotheses(
        tokens=jnp.take_along_axis(jnp.where(exists[:, :, None], state.tokens, PAD), order[:, :, None], axis=1),
        log_probs=best(log_probs),
        scores=best(scores),
        lengths=best(jnp.where(exists, state.lengths, 0)),
        finished=best(state.finished),
    )
