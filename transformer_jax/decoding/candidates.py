"""Which continuations of live hypotheses are taken: the best of a beam, each into a slot that is free."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128  # values of which `top_k` first finds the highest


class Candidates(NamedTuple):
    """Continuations of a sentence's live hypotheses, best first; or the one that each slot takes."""

    sums: Array  # float32 [B, M], what they are ranked by; −∞: no candidate
    parent: Array  # int32 [B, M]
    token: Array  # int32 [B, M]


def best_candidates(sums: Float[Array, "B K"], log_probs: Float[Array, "B K V"], count: int) -> Candidates:
    """The best of the K × V continuations of hypotheses with these sums."""
    batch, beams, vocab = log_probs.shape
    totals = (sums[:, :, None] + log_probs).reshape(batch, beams * vocab)
    best, index = top_k(totals, count)
    return Candidates(best, parent=index // vocab, token=index % vocab)


def top_k(values: Float[Array, "B M"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """What `jax.lax.top_k` gives, for long rows at the price of a maximum.

    A row is cut into blocks. Those with the k highest maxima hold the k highest values: whatever is in another block
    has k values before it.
    """
    batch, size = values.shape
    if size <= 2 * k * BLOCK:
        best, place = jax.lax.top_k(values, k)
        return best, place
    padded = jnp.pad(values, ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(batch, -1, BLOCK)
    chosen = jnp.sort(jax.lax.top_k(blocks.max(axis=2), k)[1], axis=1)  # in their order, which decides between equals
    among = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(batch, k * BLOCK)
    best, place = jax.lax.top_k(among, k)
    return best, jnp.take_along_axis(chosen, place // BLOCK, axis=1) * BLOCK + place % BLOCK


def in_free_slots(candidates: Candidates, kept: Bool[Array, "B K"]) -> Candidates:
    """The j-th candidate in the j-th slot that is not kept. What stands in kept slots is not to be looked at."""
    rank = jnp.maximum(jnp.cumsum(~kept, axis=1, dtype=jnp.int32) - 1, 0)
    return Candidates(*(jnp.take_along_axis(field, rank, axis=1) for field in candidates))
