"""Which continuations of live hypotheses are taken: the best of a beam, each into a slot that is free."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Candidates(NamedTuple):
    """Continuations of a sentence's live hypotheses, best first; or the one that each slot takes."""

    sums: Array  # float32 [B, K], what they are ranked by; −∞: no candidate
    parent: Array  # int32 [B, K]
    token: Array  # int32 [B, K]


def best_candidates(sums: Float[Array, "B K"], log_probs: Float[Array, "B K V"]) -> Candidates:
    """The K best of the K × V continuations of hypotheses with these sums."""
    batch, beams, vocab = log_probs.shape
    totals = (sums[:, :, None] + log_probs).reshape(batch, beams * vocab)
    best, index = jax.lax.top_k(totals, beams)
    return Candidates(best, parent=index // vocab, token=index % vocab)


def in_free_slots(candidates: Candidates, kept: Bool[Array, "B K"]) -> Candidates:
    """The j-th candidate in the j-th slot that is not kept. What stands in kept slots is not to be looked at."""
    rank = jnp.maximum(jnp.cumsum(~kept, axis=1, dtype=jnp.int32) - 1, 0)
    return Candidates(*(jnp.take_along_axis(field, rank, axis=1) for field in candidates))
