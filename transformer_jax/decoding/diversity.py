"""Diverse beam search: groups of hypotheses that keep away from each other (Vijayakumar et al., 2018).

The beam of a sentence is cut into G equal groups. At each step the groups choose one after the other, each from its own
hypotheses and as a beam of its own; a token costs λ for each hypothesis of an earlier group that takes it at this step
(their Hamming diversity). The costs are part of the sums that hypotheses are ranked by. The first group is an ordinary
beam search.

Two groups may go the same way for a while, but not to the same end: a whole hypothesis that an earlier group has is not
to be had again, so all entries of an n-best list differ.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.batch import EOS
from transformer_jax.decoding.candidates import Candidates, in_free_slots

Best = Callable[[Array, Array, slice], Candidates]  # sums, log-probabilities, their slots -> candidates


def diverse_candidates(
    sums: Float[Array, "B K"],
    log_probs: Float[Array, "B K V"],
    best: Best,
    *,
    tokens: Int[Array, "B K T"],
    kept: Bool[Array, "B K"],
    last: Bool[Array, "B"],
    groups: int,
    diversity: float | Float[Array, ""],
) -> Candidates:
    """What each slot takes, with `best` as the beam search of a group.

    `last` are the sentences whose limit this step reaches, so that all it takes is whole.
    """
    size = sums.shape[1] // groups
    same = (tokens[:, :, None] == tokens[:, None]).all(axis=3)  # [B, K, K]
    ends = last[:, None] | (jnp.arange(log_probs.shape[2]) == EOS)[None]  # [B, V]
    used = jnp.zeros_like(log_probs[:, 0])  # [B, V], hypotheses of earlier groups that took this token
    had = jnp.zeros(log_probs.shape, bool)  # [B, K, V], an earlier group has this continuation of this hypothesis
    chosen = []
    for first in range(0, sums.shape[1], size):
        own = slice(first, first + size)
        allowed = jnp.where(had[:, own] & ends[:, None], -jnp.inf, log_probs[:, own] - diversity * used[:, None])
        group = in_free_slots(best(sums[:, own], allowed, own), kept[:, own])
        group = group._replace(parent=group.parent + first)
        fresh = (group.sums > -jnp.inf) & ~kept[:, own]
        used = jax.vmap(lambda row, token, new: row.at[token].add(new))(used, group.token, fresh.astype(used.dtype))
        had |= continuations(same, group, fresh, vocab=log_probs.shape[2])
        chosen.append(group)
    return Candidates(*(jnp.concatenate(fields, axis=1) for fields in zip(*chosen, strict=True)))


def continuations(
    same: Bool[Array, "B K K"], group: Candidates, fresh: Bool[Array, "B g"], *, vocab: int
) -> Bool[Array, "B K V"]:
    """For every hypothesis the tokens with which it would be one that the group chose."""
    parents_like = jnp.take_along_axis(same, group.parent[:, None], axis=2) & fresh[:, None]  # [B, K, g]
    taken = jax.nn.one_hot(group.token, vocab, dtype=bool)  # [B, g, V]
    return (parents_like[..., None] & taken[:, None]).any(axis=2)
