"""Where a token stands: sinusoids (section 3.5), rotary positions, relative distances."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.config import SinusoidLayout


def sinusoids(
    positions: Int[Array, "*B T"], width: int, layout: SinusoidLayout = SinusoidLayout.INTERLEAVED
) -> Float[Array, "*B T D"]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(pos / 10000^(2i/D)) (section 3.5).

    Computed for any position, so there is no table to run past. `layout` orders the channels.
    """
    if width % 2:
        raise ValueError(f"sinusoids need an even width, not {width}")
    half = width // 2
    steps = max(half - 1, 1) if layout == SinusoidLayout.T2T else half
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / steps)
    angles = positions[..., None].astype(jnp.float32) * rates.reshape((1,) * positions.ndim + (half,))
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    if layout == SinusoidLayout.INTERLEAVED:
        return jnp.stack([sines, cosines], axis=-1).reshape(*positions.shape, width)
    return jnp.concatenate([sines, cosines], axis=-1)


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
    """Rotary positions (Su et al., 2021, eq. 34): channels 2i and 2i+1 turn by pos / 10000^(2i/H).

    The product of a rotated query and a rotated key depends on their distance only.
    """
    half = x.shape[-1] // 2
    waves = sinusoids(positions, x.shape[-1], SinusoidLayout.CONCATENATED)[:, :, None]
    sines, cosines = waves[..., :half], waves[..., half:]
    even, odd = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cosines - odd * sines, even * sines + odd * cosines], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def clipped_distances(
    query_positions: Int[Array, "*B T"], key_positions: Int[Array, "*B S"], limit: int
) -> Float[Array, "*B T S R"]:
    """The one-hot clip(j − i, −k, k) + k of every query i and key j (Shaw et al., 2018, section 3.1), R = 2k+1.

    Both directions of relative attention are products with it: it has no head or channel axis.
    """
    distance = key_positions[..., None, :] - query_positions[..., :, None]
    return jax.nn.one_hot(jnp.clip(distance, -limit, limit) + limit, 2 * limit + 1)
