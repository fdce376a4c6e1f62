"""The live hypotheses of a search side by side: what a layer does to each position by itself it does to no others."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Live(NamedTuple):
    """Where the live of B × K hypotheses stand among W × K."""

    slots: Int[Array, "WK"]  # the slot in which each stands, counted over all sentences; of none, B · K
    places: Int[Array, "B K"]  # its place among the live; of other slots, W · K

    def gathered(self, x: Array) -> Array:
        """[B, K, …] → [W, K, …], the live ones first."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.slots, axis=0, mode="clip").reshape(-1, *x.shape[1:])

    def scattered(self, x: Array) -> Array:
        """[W, K, …] → [B, K, …], each in its slot. What stands in other slots is not to be looked at."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.places, axis=0, mode="clip")


def live_among(live: Bool[Array, "B K"], rows: int) -> Live:
    """Places for at most rows · K live hypotheses; there are no more."""
    flat, count = live.reshape(-1), rows * live.shape[1]
    places = jnp.where(flat, jnp.cumsum(flat, dtype=jnp.int32) - 1, count)
    slots = jnp.full(count, flat.size, jnp.int32).at[places].set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
    return Live(slots, places.reshape(live.shape))
