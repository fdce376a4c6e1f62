"""Beam search and sampling over a step function. It knows no model; one `jit` around a search is one program.

Every sentence has K slots. A hypothesis that ends keeps its slot and the beam of that sentence shrinks, so a beam of
1 is greedy search to the token; or it is set aside and the beam stays full (`Beam`). A sentence is done when none of
its hypotheses is live, when its output limit is reached, or when a bound proves that no live hypothesis can enter its
n-best list; then it does not change any more, whatever its neighbours do.

One step, `advance`, is: the model's log-probabilities; `filters`, which forbid or penalise tokens; what the sentence
itself asks for, a forced prefix (`filters.forced`) and `constraints`; a choice of continuations, by beams
(`candidates`), by groups of beams (`diversity`) or at random (`sampling`). What is not asked for is not in the program.

Hypotheses have two sums. The *log-probability* is the model's own over all tokens, forced ones too, and a *score* is
always log-probability / LP(L), what rescoring the same tokens gives. What hypotheses are *ranked* by is the sum of what
tokens cost after filters and diversity, over LP(L); it is another one only with a repetition penalty or with groups.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.batch import BOS, EOS, PAD, Ids
from transformer_jax.config import Beam, LengthPenalty
from transformer_jax.decoding.candidates import Candidates, best_candidates, in_free_slots
from transformer_jax.decoding.constraints import Progress, constrained_candidates, progress_of
from transformer_jax.decoding.diversity import diverse_candidates
from transformer_jax.decoding.filters import NO_FILTERS, Filters, filtered, forced
from transformer_jax.decoding.sampling import PLAIN_SAMPLING, Sampling, draw

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
        self, token: Int[Array, "B K"], parent: Int[Array, "B K"], position: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B K V"], Cache]: ...


class Hypotheses(NamedTuple):
    """The n best of each sentence: finished ones by falling rank, then unfinished ones, of these first the satisfied.

    Samples are in the order of their numbers, and may be alike; those of beam search never are. An entry of length 0
    and score −∞ is none at all: that sentence has fewer than n hypotheses.
    """

    tokens: Array  # int32 [B, n, T], EOS included, then only pads
    log_probs: Array  # float32 [B, n], the model's, summed over the tokens
    scores: Array  # float32 [B, n], log_probs / LP(lengths)
    lengths: Array  # int32 [B, n], tokens with EOS; of unfinished ones, all tokens
    finished: Array  # bool [B, n], whether it ends with EOS
    satisfied: Array  # bool [B, n], whether it has all of its sentence's constraints


class Rules(NamedTuple):
    """What holds for all sentences of a search. Hashable, so that a program can be compiled for it."""

    beam_size: int = 4
    top_beams: int = 1  # n
    penalty: LengthPenalty = LengthPenalty.GNMT
    alpha: float | Array = 0.6
    filters: Filters = NO_FILTERS
    groups: int = 1
    diversity: float | Array = 0.0
    sampling: Sampling | None = None  # samples instead of beams
    beam: Beam = Beam.SHRINKING

    @property
    def slots(self) -> int:
        """K."""
        return self.beam_size if self.sampling is None else self.top_beams

    @property
    def change_sums(self) -> bool:
        """Whether hypotheses are ranked by other sums than their log-probabilities."""
        return self.sampling is None and (self.filters.change_sums or self.groups > 1)

    @property
    def full(self) -> bool:
        """Whether hypotheses that end are set aside. A beam of 1 is greedy search all the same."""
        return self.beam == Beam.FULL and self.sampling is None and self.beam_size > 1


class Asked(NamedTuple):
    """What is asked for each sentence."""

    limits: Ids  # int32 [B], the most tokens of each output, EOS counted; a sentence of limit 0 is padding
    prefix: Ids | None = None  # int32 [B, P], with which outputs begin; PAD behind it
    constraints: Ids | None = None  # int32 [B, C, P], phrases that outputs have; padded with PAD
    keys: Any = None  # key [B], the randomness of samples


class Ended(NamedTuple):
    """The best of the hypotheses of each sentence that ended and were set aside."""

    tokens: Array  # int32 [B, K, T]
    log_probs: Array  # float32 [B, K], −∞: none
    sums: Array | None  # float32 [B, K], as in `State`
    lengths: Array  # int32 [B, K]


class State(NamedTuple):
    """A search after some steps. All of it belongs to sentences and leads with B, as the cache should."""

    position: Array  # int32 [B]: how many tokens live hypotheses have
    tokens: Array  # int32 [B, K, T]
    log_probs: Array  # float32 [B, K], −∞: the slot is empty
    sums: Array | None  # float32 [B, K], what hypotheses are ranked by; None: their log-probabilities
    lengths: Array  # int32 [B, K]
    finished: Array  # bool [B, K]
    token: Array  # int32 [B, K]: the last token of live hypotheses
    parent: Array  # int32 [B, K]: the slot which its hypothesis had a step before
    done: Array  # bool [B]
    ended: Ended | None  # None: what ends keeps its slot
    cache: Cache


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
    filters: Filters = NO_FILTERS,
    prefix: Int[Array, "B P"] | None = None,
    constraints: Int[Array, "B C Q"] | None = None,
    groups: int = 1,
    diversity: float | Float[Array, ""] = 0.0,
    beam: Beam = Beam.SHRINKING,
) -> Hypotheses:
    """The `top_beams` best of each sentence by log-probability / LP(L) (section 6.1; Wu et al., 2016).

    Args:
      limits: the most tokens of each output, EOS counted, at most `max_length`. A sentence of limit 0 is padding.
      max_length: T of the result.
      prefix: the tokens with which each output begins, padded. One as long as the limit leaves no room for EOS.
      constraints: for each sentence phrases that each output has, padded with pads and with phrases of pads.

    Raises:
      ValueError: unless 1 ≤ top_beams ≤ beam_size, and groups divide the beam.
    """
    rules = Rules(beam_size, top_beams, penalty, alpha, filters, groups, diversity, beam=beam)
    return search(step, cache, Asked(limits, prefix, constraints), rules, max_length=max_length)


def sample(
    step: Step,
    cache: Cache,
    *,
    keys: Key[Array, "B"],
    limits: Int[Array, "B"],
    max_length: int,
    samples: int = 1,
    sampling: Sampling = PLAIN_SAMPLING,
    penalty: LengthPenalty = LengthPenalty.GNMT,
    alpha: float | Float[Array, ""] = 0.6,
    filters: Filters = NO_FILTERS,
    prefix: Int[Array, "B P"] | None = None,
) -> Hypotheses:
    """Independent samples of each sentence; each depends on its sentence's key and its own number only.

    Log-probabilities and scores are the model's own, whatever the draws were made from. The arguments are those of
    `beam_search`.
    """
    rules = Rules(samples, samples, penalty, alpha, filters, sampling=sampling)
    return search(step, cache, Asked(limits, prefix, keys=keys), rules, max_length=max_length)


def greedy(step: Step, cache: Cache, *, limits: Int[Array, "B"], max_length: int) -> Hypotheses:
    """The most probable token at each step; scores are log-probabilities."""
    return beam_search(step, cache, limits=limits, max_length=max_length, beam_size=1, penalty=LengthPenalty.NONE)


def search(step: Step, cache: Cache, asked: Asked, rules: Rules, *, max_length: int) -> Hypotheses:
    """From the first step to the last. `step` gets K = `rules.slots` hypotheses of each sentence.

    Raises:
      ValueError: for rules and wishes which don't go together.
    """
    _check(asked, rules)
    asked = asked._replace(limits=jnp.minimum(asked.limits, max_length))
    state = init(cache, asked, rules, max_length=max_length)
    state = jax.lax.while_loop(lambda state: ~state.done.all(), lambda state: advance(step, state, asked, rules), state)
    return finish(state, asked, rules)


def init(cache: Cache, asked: Asked, rules: Rules, *, max_length: int) -> State:
    """One live hypothesis without tokens in the first slot of each group, or in each slot that samples have."""
    slots = (asked.limits.shape[0], rules.slots)
    own_slot = jnp.broadcast_to(jnp.arange(rules.slots, dtype=jnp.int32), slots)
    gap = 1 if rules.sampling is not None else rules.slots // rules.groups
    live = jnp.zeros(slots, bool).at[:, ::gap].set(True)
    log_probs = jnp.where(live, 0.0, -jnp.inf).astype(jnp.float32)
    tokens, lengths = jnp.full((*slots, max_length), PAD, jnp.int32), jnp.zeros(slots, jnp.int32)
    nothing = jnp.full(slots, -jnp.inf, jnp.float32)
    return State(
        position=jnp.zeros(slots[0], jnp.int32),
        tokens=tokens,
        log_probs=log_probs,
        sums=log_probs if rules.change_sums else None,
        lengths=lengths,
        finished=jnp.zeros(slots, bool),
        token=jnp.full(slots, BOS, jnp.int32),
        parent=own_slot,
        done=asked.limits <= 0,
        ended=Ended(tokens, nothing, nothing if rules.change_sums else None, lengths) if rules.full else None,
        cache=cache,
    )


def advance(step: Step, state: State, asked: Asked, rules: Rules) -> State:
    """One token more for every live hypothesis of sentences that are not done; at most T times."""
    log_probs, cache = step(state.token, state.parent, state.position, state.cache)
    log_probs = allowed(log_probs)
    costs = filtered(log_probs, state.tokens, state.position, rules.filters)
    progress = None
    if asked.constraints is not None:
        progress = progress_of(state.tokens, state.position, asked.constraints)
        costs = costs.at[:, :, EOS].add(jnp.where(progress.satisfied, 0.0, -jnp.inf))
    if asked.prefix is not None:
        costs = forced(costs, log_probs, prefix_token(asked.prefix, state.position))
    kept = state.finished | state.done[:, None]
    if rules.sampling is None:
        chosen = choose(state, costs, progress, kept, asked, rules)
    else:
        token = draw(costs, asked.keys, state.position, rules.sampling)
        chosen = drawn(state, log_probs, token)
    if rules.full:
        state = state._replace(ended=set_aside(state, chosen, log_probs, rules))
        chosen = going_on(chosen)
    state = extend(state, chosen, log_probs, kept)
    return state._replace(done=state.done | is_done(state, asked, rules), cache=cache)


def ranking_sums(state: State) -> Float[Array, "B K"]:
    """What hypotheses are ranked by, −∞ in empty slots."""
    return state.log_probs if state.sums is None else state.sums


def live_sums(state: State) -> Float[Array, "B K"]:
    """The ranking sums of the live hypotheses, −∞ in other slots."""
    return jnp.where(state.finished, -jnp.inf, ranking_sums(state))


def allowed(log_probs: Float[Array, "B K V"]) -> Float[Array, "B K V"]:
    """Log-probabilities in float32 with −∞ for the pad id, masked tokens and NaN."""
    log_probs = log_probs.astype(jnp.float32)
    no_pad = jnp.arange(log_probs.shape[2])[None, None] != PAD
    return jnp.where(no_pad & (log_probs > IMPOSSIBLE), log_probs, -jnp.inf)


def prefix_token(prefix: Int[Array, "B P"], position: Int[Array, "B"]) -> Int[Array, "B"]:
    """The token that is forced at a position; PAD: none."""
    last = prefix.shape[1] - 1
    token = jnp.take_along_axis(prefix, jnp.minimum(position, last)[:, None], axis=1)[:, 0]
    return jnp.where(position <= last, token, PAD)


def choose(
    state: State,
    costs: Float[Array, "B K V"],
    progress: Progress | None,
    kept: Bool[Array, "B K"],
    asked: Asked,
    rules: Rules,
) -> Candidates:
    """The continuation which each slot takes that is not kept, −∞ for none; for a full beam the 2 K best."""

    def best(sums: Array, costs: Array, slots: slice) -> Candidates:
        count = sums.shape[1] * (2 if rules.full else 1)
        if progress is None:
            return best_candidates(sums, costs, count)
        return constrained_candidates(sums, costs, progress.of_slots(slots), count)

    sums = live_sums(state)
    if rules.full:
        return best(sums, costs, slice(None))
    if rules.groups == 1:
        return in_free_slots(best(sums, costs, slice(None)), kept)
    last, options = state.position + 1 >= asked.limits, {"groups": rules.groups, "diversity": rules.diversity}
    return diverse_candidates(sums, costs, best, tokens=state.tokens, kept=kept, last=last, **options)


def drawn(state: State, log_probs: Float[Array, "B K V"], token: Int[Array, "B K"]) -> Candidates:
    """What was drawn for each sample, with the log-probability that the model gives it."""
    log_prob = jnp.take_along_axis(log_probs, token[:, :, None], axis=2)[:, :, 0]
    own_slot = jnp.broadcast_to(jnp.arange(token.shape[1], dtype=jnp.int32), token.shape)
    return Candidates(live_sums(state) + log_prob, own_slot, token)


def extend(state: State, chosen: Candidates, log_probs: Float[Array, "B K V"], kept: Bool[Array, "B K"]) -> State:
    """Writes down what was chosen, but in slots that are kept."""
    own_slot = jnp.broadcast_to(jnp.arange(kept.shape[1], dtype=jnp.int32), kept.shape)
    sums = jnp.where(kept, ranking_sums(state), chosen.sums)
    parent = jnp.where(kept, own_slot, chosen.parent)
    token = jnp.where(kept | (sums == -jnp.inf), PAD, chosen.token)
    tokens = jnp.take_along_axis(state.tokens, parent[:, :, None], axis=1)
    here = jnp.arange(tokens.shape[2])[None] == state.position[:, None]  # [B, T]
    return state._replace(
        position=jnp.where(state.done, state.position, state.position + 1),
        tokens=jnp.where(here[:, None], token[:, :, None], tokens),
        log_probs=sums if state.sums is None else model_sums(state, chosen, log_probs, kept),
        sums=None if state.sums is None else sums,
        lengths=jnp.where(kept, state.lengths, state.position[:, None] + 1),
        finished=state.finished | (token == EOS),
        token=token,
        parent=parent,
    )


def going_on(candidates: Candidates) -> Candidates:
    """The first half of those that do not end. At most half of them do: a hypothesis has one end."""
    order = jnp.argsort(candidates.token == EOS, axis=1, stable=True)[:, : candidates.token.shape[1] // 2]
    sums, parent, token = (jnp.take_along_axis(field, order, axis=1) for field in candidates)
    return Candidates(jnp.where(token == EOS, -jnp.inf, sums), parent, token)


def set_aside(state: State, candidates: Candidates, log_probs: Float[Array, "B K V"], rules: Rules) -> Ended:
    """The best, by rank, of the hypotheses that ended before and of the candidates that end."""
    assert state.ended is not None
    candidates = candidates._replace(sums=jnp.where(candidates.token == EOS, candidates.sums, -jnp.inf))
    here = jnp.arange(state.tokens.shape[2])[None, None] == state.position[:, None, None]
    new = Ended(
        tokens=jnp.where(here, EOS, jnp.take_along_axis(state.tokens, candidates.parent[:, :, None], axis=1)),
        log_probs=candidates.sums if state.sums is None else grown_log_probs(state, candidates, log_probs),
        sums=None if state.sums is None else candidates.sums,
        lengths=jnp.broadcast_to(state.position[:, None] + 1, candidates.token.shape),
    )
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), state.ended, new)
    ranks = (both.log_probs if both.sums is None else both.sums) / length_divisor(rules)(both.lengths)
    best = jax.lax.top_k(ranks, rules.beam_size)[1]
    kept = jax.tree.map(lambda x: jnp.take_along_axis(x, best.reshape(*best.shape, *[1] * (x.ndim - 2)), axis=1), both)
    return jax.tree.map(
        lambda old, new: jnp.where(state.done.reshape(-1, *[1] * (new.ndim - 1)), old, new), state.ended, kept
    )


def with_ended(state: State) -> State:
    """The state with the hypotheses that were set aside behind those of the beam."""
    if state.ended is None:
        return state

    def join(live: Any, ended: Any) -> Array:
        return jnp.concatenate([live, ended], axis=1)

    return state._replace(
        tokens=join(state.tokens, state.ended.tokens),
        log_probs=join(state.log_probs, state.ended.log_probs),
        sums=None if state.sums is None else join(state.sums, state.ended.sums),
        lengths=join(state.lengths, state.ended.lengths),
        finished=join(state.finished, state.ended.log_probs > -jnp.inf),
    )


def model_sums(
    state: State, chosen: Candidates, log_probs: Float[Array, "B K V"], kept: Bool[Array, "B K"]
) -> Float[Array, "B K"]:
    """The log-probabilities of hypotheses which are ranked by something else."""
    return jnp.where(kept, state.log_probs, grown_log_probs(state, chosen, log_probs))


def grown_log_probs(state: State, chosen: Candidates, log_probs: Float[Array, "B K V"]) -> Float[Array, "B M"]:
    """The model's log-probabilities of continuations."""
    batch, beams, vocab = log_probs.shape
    of_token = jnp.take_along_axis(
        log_probs.reshape(batch, beams * vocab), chosen.parent * vocab + chosen.token, axis=1
    )
    grown = jnp.take_along_axis(state.log_probs, chosen.parent, axis=1) + of_token
    return jnp.where(chosen.sums == -jnp.inf, -jnp.inf, grown)


def is_done(state: State, asked: Asked, rules: Rules) -> Bool[Array, "B"]:
    """Whether nothing is live, the limit is reached, or no live hypothesis can enter the n-best list."""
    best_live = live_sums(state).max(axis=1)
    over = (best_live == -jnp.inf) | (state.position >= asked.limits)
    if rules.sampling is not None:
        return over
    divisor, state = length_divisor(rules), with_ended(state)
    finished_ranks = jnp.where(state.finished, ranking_sums(state) / divisor(state.lengths), -jnp.inf)
    worst_kept = jax.lax.top_k(finished_ranks, rules.top_beams)[0][:, -1]
    return over | (score_bound(best_live, state.position, asked.limits, divisor) <= worst_kept)


def score_bound(
    sums: Float[Array, "B"], lengths: Int[Array, "B"], limits: Int[Array, "B"], divisor: Penalty
) -> Float[Array, "B"]:
    """The highest rank that hypotheses of these lengths and sums can still finish with.

    Sums only fall: log-probabilities are not positive, a repetition penalty multiplies them by a positive number,
    diversity takes something away, and forced tokens cost what the model says. And LP is monotone in L, rising or
    falling with the sign of α: the best length is either the next one or the limit. What forbids tokens or ends (a
    minimum length, constraints, n-grams) leaves fewer ways to finish, none of them better.
    """
    return jnp.maximum(sums / divisor(lengths + 1), sums / divisor(limits))


def length_divisor(rules: Rules) -> Penalty:
    return functools.partial(length_penalty, penalty=rules.penalty, alpha=rules.alpha)


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


def finish(state: State, asked: Asked, rules: Rules) -> Hypotheses:
    """The n-best lists. Slots without a hypothesis, and those of sentences of limit 0, come last as no entry."""
    state = with_ended(state)
    exists = (state.log_probs > -jnp.inf) & (state.lengths > 0)
    log_probs = jnp.where(exists, state.log_probs, -jnp.inf)
    divided = length_divisor(rules)(state.lengths)
    ranks = jnp.where(exists, ranking_sums(state), -jnp.inf) / divided
    satisfied, keys = exists, (-ranks, ~state.finished)  # the last key is the first looked at
    if asked.constraints is not None:
        satisfied = exists & progress_of(state.tokens, state.lengths.max(axis=1), asked.constraints).satisfied
        keys = (-ranks, ~satisfied, ~state.finished)
    if rules.sampling is not None:
        keys = (~exists,)
    order = jnp.lexsort(keys, axis=1)[:, : rules.top_beams]
    best = functools.partial(jnp.take_along_axis, indices=order, axis=1)
    return Hypotheses(
        tokens=jnp.take_along_axis(jnp.where(exists[:, :, None], state.tokens, PAD), order[:, :, None], axis=1),
        log_probs=best(log_probs),
        scores=best(log_probs / divided),
        lengths=best(jnp.where(exists, state.lengths, 0)),
        finished=best(state.finished),
        satisfied=best(satisfied),
    )


def _check(asked: Asked, rules: Rules) -> None:
    if not 1 <= rules.top_beams <= rules.slots:
        raise ValueError(f"top_beams is {rules.top_beams}; expected 1 to beam_size ({rules.slots}).")
    if rules.slots % rules.groups:
        raise ValueError(f"groups is {rules.groups}, which does not divide the beam of {rules.slots}.")
    if rules.full and rules.groups > 1:
        raise ValueError(f"groups is {rules.groups}; groups of beams shrink. Set beam=shrinking.")
    if rules.sampling is not None and (asked.keys is None or asked.constraints is not None or rules.groups > 1):
        raise ValueError("samples need keys, and have neither constraints nor groups: those need beam search.")
