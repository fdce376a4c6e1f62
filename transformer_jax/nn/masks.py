"""Masks: which query may see which key. All come from segment ids, so packed and unpacked rows are one case."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def attention_mask(query_segments: Int[Array, "B T"], key_segments: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """True where a query may see a key: both in the same segment, and that segment not padding (0)."""
    same = query_segments[:, :, None] == key_segments[:, None, :]
    return (same & (key_segments != 0)[:, None, :])[:, None]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """True where the key is not after the query (section 3.2.3)."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]


def ancestry_mask(ancestry: Int[Array, "B K T"], position: Int[Array, "B"]) -> Bool[Array, "B 1 K TK"]:
    """True where a hypothesis may see a cached key: the key is its own ancestor's and already written.

    `ancestry[b, k, t]` is the beam in which the ancestor of hypothesis `k` stood at position `t`. The keys
    of all beams lie side by side, position by position, so the last axis is T · K long.
    """
    batch, beams, length = ancestry.shape
    own = jax.nn.one_hot(ancestry, beams, dtype=bool)  # [B, K, T, K]
    written = jnp.arange(length)[None, :] <= position[:, None]  # [B, T]
    return (own & written[:, None, :, None]).reshape(batch, 1, beams, length * beams)
