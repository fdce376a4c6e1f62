"""Dropout (section 5.4) as a function of a key."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


def dropout(x: Float[Array, "*shape"], rate: float, rng: Key[Array, ""] | None) -> Float[Array, "*shape"]:
    """Zeroes elements with probability `rate` and divides the others by 1 − rate; without a key, `x` itself.

    Each element costs 16 random bits, not the 32 and the float conversion of `jax.random.bernoulli`: drawing
    masks is a large part of a small model's step on a CPU. The rate is exact to 2⁻¹⁶.
    """
    if rng is None or rate == 0.0:
        return x
    keep = _bits16(rng, x.shape) >= jnp.uint16(round(rate * 2**16))
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), jnp.zeros_like(x))


def _bits16(rng: Key[Array, ""], shape: tuple[int, ...]) -> jax.Array:
    """Uniform uint16 of the shape, two from each 32-bit word along the last axis."""
    words = jax.random.bits(rng, (*shape[:-1], -(-shape[-1] // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16)  # [..., words, 2]
    return halves.reshape(*shape[:-1], -1)[..., : shape[-1]]
