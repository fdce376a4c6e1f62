"""How far context flows: how much each output position of a stack depends on each of its input positions.

In one layer of self-attention any two positions are one step apart (table 1), and in the encoder it flows both ways.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.batch import Batch
from transformer_jax.inspect.style import WIDTH, blank, colour_bar, heat_map, styled
from transformer_jax.nn.transformer import Transformer

PROBES = 8


def influence(stack: Callable[[Array], Array], x: Float[Array, "T D"], *, seed: int = 0) -> Float[Array, "T T"]:
    """‖∂ output_i / ∂ input_j‖ of a function [T, D] → [T, D]: rows are outputs, columns inputs.

    The Frobenius norms are estimated from a few random directions of each output (E ‖Jᵀ v‖² = ‖J‖²), so a value is
    good to some ten per cent; where nothing flows it is exactly 0.
    """
    output, pull_back = jax.vjp(stack, x)
    directions = jax.random.normal(jax.random.key(seed), (PROBES, *output.shape), output.dtype)

    def row(position, direction):
        only = jnp.where((jnp.arange(len(output)) == position)[:, None], direction, 0)
        return (pull_back(only)[0] ** 2).sum(axis=-1)

    squares = jax.vmap(lambda direction: jax.vmap(lambda i: row(i, direction))(jnp.arange(len(output))))(directions)
    return jnp.sqrt(squares.mean(axis=0))


@functools.partial(jax.jit, static_argnums=0)
def influences(model: Transformer, params: Any, batch: Batch) -> tuple[Float[Array, "S S"], Float[Array, "T T"]]:
    """Of a pair, [1, S] and [1, T]: source embeddings on the encoder's output, target embeddings on the decoder's."""
    source = model.apply(params, batch.source, batch.source_positions, method="embed_source")
    target = model.apply(params, batch.target_input, batch.target_positions, method="embed_target")
    segments = batch.source_segments, batch.target_segments

    def encode(x):
        return model.apply(params, x[None], segments[0], batch.source_positions, method="encode_embedded")[0]

    encoded = encode(source[0])[None]

    def decode(x):
        options = (encoded, *segments, batch.target_positions)
        return model.apply(params, x[None], *options, method="decode_embedded")[0]

    return influence(encode, source[0]), influence(decode, target[0])


@styled
def influence_figure(
    encoder: Float[ndarray, "S S"], decoder: Float[ndarray, "T T"], source: Sequence[str], target: Sequence[str]
) -> Figure:
    """Both stacks, each row in parts of its largest value; what is exactly 0 is grey."""
    height = 1.0 + 0.15 * max(len(source), len(target), 6) + 0.075 * max(map(len, (*source, *target)))
    figure = blank(WIDTH, min(height, 6.0))
    panels = figure.subplots(1, 2)
    drawn = ((encoder, source, "encoder: both directions"), (decoder, target, "decoder: nothing from later positions"))
    for axes, (matrix, labels, title) in zip(panels, drawn, strict=True):
        shares = matrix / matrix.max(axis=1, keepdims=True)
        heat_map(axes, np.where(matrix == 0, np.nan, shares), rows=labels, columns=labels)
        axes.set_xlabel(title)
    panels[0].set_ylabel("output at")
    colour_bar(list(panels), "influence of the input")
    return figure
