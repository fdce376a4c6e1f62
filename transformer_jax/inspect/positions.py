"""The picture of the positional encodings (section 3.5): each row a position, each column a channel."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.config import SinusoidLayout
from transformer_jax.inspect.style import DIVERGING, WIDTH, blank, colour_bar, heat_map, styled
from transformer_jax.nn.positions import sinusoids


def encodings(length: int, width: int, layout: SinusoidLayout) -> Float[ndarray, "T D"]:
    """Of the positions 0, 1, …, as the model adds them."""
    return np.asarray(sinusoids(jnp.arange(length), width, layout))


def similarities(table: Float[ndarray, "T D"]) -> Float[ndarray, "T T"]:
    """The cosines of each two rows. Of sinusoids they depend on the distance only, and fall with it."""
    rows = table / np.linalg.norm(table, axis=1, keepdims=True)
    return rows @ rows.T


@styled
def positions_figure(length: int = 50, width: int = 512) -> Figure:
    """The encodings with their sines and cosines interleaved, as in the paper, and one half after the other."""
    figure = blank(WIDTH, 4.4)
    panels = figure.subplots(2, 1, sharex=True)
    titles = {
        SinusoidLayout.INTERLEAVED: "interleaved: sin, cos, sin, cos, … (the paper)",
        SinusoidLayout.CONCATENATED: "concatenated: all sines, then all cosines",
    }
    for axes, (layout, title) in zip(panels, titles.items(), strict=True):
        heat_map(axes, encodings(length, width, layout), low=-1.0, high=1.0, colours=DIVERGING)
        axes.set_title(title)
        _count(axes, length, "position")
    panels[1].tick_params(labeltop=False, labelbottom=True)
    panels[1].set_xticks(range(0, width + 1, max(1, width // 8)), range(0, width + 1, max(1, width // 8)), rotation=0)
    panels[0].tick_params(labeltop=False)
    panels[1].set_xlabel("channel")
    colour_bar(list(panels), "value")
    return figure


@styled
def table_figure(table: Float[ndarray, "T D"], *, title: str = "") -> Figure:
    """What a model adds to its embeddings for each position, and how alike positions are by it."""
    figure = blank(WIDTH, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    top = float(np.abs(table).max())
    heat_map(left, table, low=-top, high=top, colours=DIVERGING)
    colour_bar(left, "value")
    _count(left, len(table), "position")
    left.set(xlabel="channel", title=title)
    heat_map(right, similarities(table), low=-1.0, high=1.0, colours=DIVERGING)
    colour_bar(right, "cosine")
    _count(right, len(table), "")
    right.set(xlabel="position", title="likeness of two positions")
    return figure


def _count(axes, length: int, label: str) -> None:
    places = range(0, length, max(1, length // 5))
    axes.set_yticks(places, [str(place) for place in places])
    axes.set_ylabel(label)
