"""Why scores are divided by √d (section 3.2.1, footnote 4), measured on random queries and keys of unit variance."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.inspect.attention import entropy
from transformer_jax.inspect.style import COLOURS, GREY, WIDTH, blank, styled
from transformer_jax.nn.attention import attention_weights

WIDTHS = (1, 2, 8, 32, 128, 512)
KEYS = 32


class Saturation(NamedTuple):
    """Each an array [W] over widths d."""

    variance: ndarray  # of the scores
    entropy: ndarray  # of the weights, in bits
    slope: ndarray  # ‖∂ weights / ∂ scores‖, Frobenius: what is left of the gradient behind the softmax


def saturation(
    widths: Sequence[int] = WIDTHS, *, scaled: bool, queries: int = 256, keys: int = KEYS, seed: int = 0
) -> Saturation:
    """Means over random queries, each with its own keys, with and without the division by √d."""
    measured = []
    for width in widths:
        rng = np.random.default_rng((seed, width))
        q, k = (rng.normal(size=(queries, n, 1, width)).astype(np.float32) for n in (1, keys))  # [B, T or S, N, H]
        factor = np.float32(1 if scaled else width**0.5)  # `attention_weights` divides by √d; this undoes it
        weights = np.asarray(_weights(q * factor, k))[:, 0, 0]
        scores = np.einsum("BTNH,BSNH->BS", q, k) / (width**0.5 if scaled else 1)
        measured.append((scores.var(), entropy(weights).mean(), slope(weights).mean()))
    return Saturation(*np.array(measured).T)


@jax.jit
def _weights(q, k):
    return attention_weights(q, k, jnp.ones((1, 1, 1, k.shape[1]), bool))


def slope(weights: Float[ndarray, "B S"]) -> Float[ndarray, "B"]:
    """‖diag(p) − p pᵀ‖, the Frobenius norm of the softmax's Jacobian at p; 0 where one weight is 1."""
    squares = (weights**2).sum(axis=-1)
    return np.sqrt(np.maximum(squares - 2 * (weights**3).sum(axis=-1) + squares**2, 0))


@styled
def scaling_figure(widths: Sequence[int] = WIDTHS, keys: int = KEYS) -> Figure:
    """Variance of the scores, entropy of the weights and slope of the softmax over d, with and without 1/√d."""
    figure = blank(WIDTH, 2.5)
    panels = figure.subplots(1, 3)
    with_, without = (saturation(widths, scaled=scaled, keys=keys) for scaled in (True, False))
    for axes, name in zip(panels, Saturation._fields, strict=True):
        axes.plot(widths, getattr(without, name), marker="s", markersize=4, color=COLOURS[1], label="q · k")
        axes.plot(widths, getattr(with_, name), marker="o", markersize=4, color=COLOURS[0], label="q · k / √d")
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axes.set_xlabel("d")
    panels[0].set_yscale("log", base=2)
    panels[0].plot(widths, widths, color=GREY, linewidth=1, linestyle=":", label="d")
    panels[0].set_yticks([1, 8, 64, 512], ["1", "8", "64", "512"])
    panels[0].set_title("variance of the scores")
    panels[0].legend()
    panels[1].axhline(np.log2(keys), color=GREY, linewidth=1, linestyle=":")
    panels[1].text(widths[0], np.log2(keys) + 0.1, f"log₂ {keys}: all alike", color=GREY)
    panels[1].set(ylim=(0, np.log2(keys) + 0.7), title=f"entropy of {keys} weights, bits")
    panels[2].set(ylim=(0, None), title="slope of the softmax")
    return figure
