"""Adafactor (Shazeer and Stern, 2018): Adam's second moment in the memory of a row and a column.

optax has an Adafactor as well, which factors the two *largest* dimensions and only from 128 up, so that attention
kernels of small heads are not factored at all. Here every matrix is, over its last two dimensions, as in the paper.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

EPSILON_1 = 1e-30  # added to squared gradients
EPSILON_2 = 1e-3  # the least scale of a parameter
CLIP = 1.0  # d: the largest root mean square of an update
DECAY = 0.8  # β₂ at update t is 1 - t^-DECAY


class Factors(NamedTuple):
    """A matrix of second moments, as the means of its rows and of its columns."""

    rows: jax.Array  # [..., R]
    columns: jax.Array  # [..., C]


class FactoredState(NamedTuple):
    updates: jax.Array  # how many were made
    moments: Any  # `Factors` in the place of each matrix, the second moment itself in the place of each vector


def adafactor() -> optax.GradientTransformation:
    """Algorithms 4 and 5 of the paper, without momentum, short of the relative step size (the schedule's part).

    Updates are divided by their factored second moment, clipped to a root mean square of 1 and multiplied by that of
    the parameter they change, so that the learning rate is relative.
    """
    return optax.chain(
        scale_by_factored_moment(),
        optax.clip_by_block_rms(CLIP),
        optax.scale_by_param_block_rms(EPSILON_2),
    )


def scale_by_factored_moment() -> optax.GradientTransformation:
    """Gradients over the root of a running mean of their squares, kept as `Factors` for every matrix."""

    def init(params):
        return FactoredState(jnp.zeros((), jnp.int32), jax.tree.map(_zero_moment, params))

    def update(updates, state, params=None):
        del params
        made = state.updates + 1
        decay = 1 - made.astype(jnp.float32) ** -DECAY
        moments = jax.tree.map(lambda g, old: _running_moment(g, old, decay), updates, state.moments)
        updates = jax.tree.map(lambda g, moment: g * _inverse_root(moment), updates, moments)
        return updates, FactoredState(made, moments)

    return optax.GradientTransformation(init, update)


def _zero_moment(param: jax.Array) -> Factors | jax.Array:
    if param.ndim < 2:
        return jnp.zeros(param.shape, jnp.float32)
    return Factors(
        rows=jnp.zeros(param.shape[:-1], jnp.float32),
        columns=jnp.zeros(param.shape[:-2] + param.shape[-1:], jnp.float32),
    )


def _running_moment(gradient: jax.Array, old: Factors | jax.Array, decay: jax.Array) -> Factors | jax.Array:
    square = jnp.square(gradient.astype(jnp.float32)) + EPSILON_1
    new = Factors(square.mean(axis=-1), square.mean(axis=-2)) if isinstance(old, Factors) else square
    return jax.tree.map(lambda before, now: decay * before + (1 - decay) * now, old, new)


def _inverse_root(moment: Factors | jax.Array) -> Float[Array, "..."]:
    """V^-0.5, where V = rows · columns / mean of the rows for a matrix."""
    if not isinstance(moment, Factors):
        return moment**-0.5
    rows = moment.rows / moment.rows.mean(axis=-1, keepdims=True)
    return rows[..., :, None] ** -0.5 * moment.columns[..., None, :] ** -0.5
