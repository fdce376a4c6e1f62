"""Lexical constraints: phrases of which every translation has to have all (Post and Vilar, 2018).

What a hypothesis has of them is a function of its tokens alone. A phrase is met where its tokens stand side by side,
wherever: in a forced prefix, inside another phrase, overlapping one. A phrase that is given n times is met by n places,
which may overlap too. No hypothesis ends before it has all.

What other rules forbid is forbidden to constraints too: a phrase that can't be had, because it is suppressed, repeats
an n-gram that must not be repeated, or does not fit into the limit, leaves only unfinished hypotheses that are marked
as not satisfied.

The slots of a beam are allotted to *banks*: hypotheses with the same number of tokens of constraints met. Else those
which go for a phrase, nearly always at a cost, would be crowded out by those which put it off.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.batch import PAD
from transformer_jax.decoding.candidates import Candidates
from transformer_jax.decoding.filters import shifted


class Progress(NamedTuple):
    """What hypotheses have of their sentence's phrases, of up to P tokens each."""

    phrases: Array  # int32 [B, C, P], padded; one without tokens is none
    met: Array  # bool [B, K, C]
    begun: Array  # bool [B, K, C, P], at j: the hypothesis ends with the first j tokens of the phrase, and needs it

    @property
    def lengths(self) -> Array:
        """Tokens of each phrase, int32 [B, C]."""
        return (self.phrases != PAD).sum(axis=2)

    @property
    def satisfied(self) -> Array:
        """Whether all is met, bool [B, K]."""
        return self.met.all(axis=2)

    def of_slots(self, slots: slice) -> "Progress":
        return Progress(self.phrases, self.met[:, slots], self.begun[:, slots])


def progress_of(tokens: Int[Array, "B K T"], position: Int[Array, "B"], phrases: Int[Array, "B C P"]) -> Progress:
    """What hypotheses of `position` tokens, behind which there are only pads, have of the phrases."""
    longest, position = phrases.shape[2], position[:, None, None]
    lengths = (phrases != PAD).sum(axis=2)[:, None]  # [B, 1, C]
    same = jnp.ones((*tokens.shape[:2], phrases.shape[1], tokens.shape[2]), bool)  # [B, K, C, T]: it begins here
    places = jnp.zeros(same.shape[:3], jnp.int32)
    begun = [jnp.ones(same.shape[:3], bool)]  # with none of its tokens
    for count in range(1, longest + 1):
        same &= shifted(tokens, count - 1)[:, :, None] == phrases[:, None, :, count - 1, None]
        places += jnp.where(lengths == count, same.sum(axis=3), 0)
        last = jnp.maximum(position - count, 0)[..., None]  # [B, 1, 1, 1]
        at_the_end = jnp.take_along_axis(same, last, axis=3)[..., 0]
        begun.append(at_the_end & (position >= count) & (lengths > count))
    before = same_before(phrases)[:, None]  # [B, 1, C]: so many places belong to phrases of the same tokens
    needed = (places == before) & (lengths > 0)
    return Progress(phrases, (places > before) | (lengths == 0), needed[..., None] & jnp.stack(begun[:-1], axis=3))


def same_before(phrases: Int[Array, "B C P"]) -> Int[Array, "B C"]:
    """How many of the phrases before each one are the same."""
    same = (phrases[:, :, None] == phrases[:, None]).all(axis=3)  # [B, C, C]
    return jnp.tril(same, -1).sum(axis=2)


def banks(progress: Progress, tokens: Int[Array, "B U"]) -> Int[Array, "B K U"]:
    """How many tokens of constraints each hypothesis would have with each of these tokens.

    Those of all phrases that are met, and of the one among the others which it ends with most of.
    """
    lengths = progress.lengths[:, None, :, None]  # [B, 1, C, 1]
    nexts = progress.phrases[:, :, :, None] == tokens[:, None, None]  # [B, C, P, U]
    count = jnp.arange(1, progress.phrases.shape[2] + 1)[:, None]  # [P, 1]
    reached = jnp.where(progress.begun[..., None] & nexts[:, None], count[None, None, None], 0).max(
        axis=3
    )  # [B, K, C, U]
    met = progress.met[..., None] | (reached == lengths)
    return jnp.where(met, lengths, 0).sum(axis=2) + jnp.where(met, 0, reached).max(axis=2)


def constrained_candidates(
    sums: Float[Array, "B K"], log_probs: Float[Array, "B K V"], progress: Progress, count: int
) -> Candidates:
    """So many continuations: the best of each bank, then the second best of each, and so on.

    So every bank has its share of the beam, and what one can't fill falls to the others. Within a round the banks with
    more of the constraints come first, so a beam of fewer slots than banks goes straight for the phrases. Where there
    are no phrases there is one bank, and these are the best.

    All that can be chosen is looked at: the tokens of phrases, and the best of the others, which are all of a bank.
    """
    batch, beams, vocab = log_probs.shape
    phrase_tokens = progress.phrases.reshape(batch, -1)  # [B, U]
    of_phrases = jnp.take_along_axis(log_probs, phrase_tokens[:, None], axis=2)
    again = same_before(phrase_tokens[:, :, None]) > 0
    of_phrases = jnp.where(again[:, None], -jnp.inf, of_phrases)
    others = jax.vmap(lambda rows, ids: rows.at[:, ids].set(-jnp.inf))(log_probs, phrase_tokens)
    others, other_tokens = jax.lax.top_k(others, min(count, vocab))

    base = banks(progress, jnp.full((batch, 1), PAD, jnp.int32))  # [B, K, 1]
    bank = jnp.concatenate([jnp.broadcast_to(base, others.shape), banks(progress, phrase_tokens)], axis=2)
    token = jnp.concatenate([other_tokens, jnp.broadcast_to(phrase_tokens[:, None], of_phrases.shape)], axis=2)
    total = sums[:, :, None] + jnp.concatenate([others, of_phrases], axis=2)
    parent = jnp.broadcast_to(jnp.arange(beams, dtype=jnp.int32)[None, :, None], token.shape)
    total, parent, token, bank = (field.reshape(batch, -1) for field in (total, parent, token, bank))
    chosen = in_rounds(total, bank)[:, :count]
    return Candidates(*(jnp.take_along_axis(field, chosen, axis=1) for field in (total, parent, token)))


def in_rounds(sums: Float[Array, "B M"], bank: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """The order in which candidates are chosen: by their rank within their bank, then by bank; impossible ones last."""
    by_bank = jnp.lexsort((-sums, bank), axis=1)
    sorted_bank = jnp.take_along_axis(bank, by_bank, axis=1)
    place = jnp.broadcast_to(jnp.arange(bank.shape[1]), bank.shape)
    new = jnp.pad(sorted_bank[:, 1:] != sorted_bank[:, :-1], ((0, 0), (1, 0)))
    rank = place - jax.lax.cummax(jnp.where(new, place, 0), axis=1)
    impossible = jnp.take_along_axis(sums, by_bank, axis=1) == -jnp.inf
    return jnp.take_along_axis(by_bank, jnp.lexsort((-sorted_bank, rank, impossible), axis=1), axis=1)
