"""Pictures of attention (section 3.2): who looks at whom, by layer and head.

Rows are queries, columns keys; a row of weights sums to 1.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.inspect.style import (
    COLOURS,
    DIVERGING,
    GREY,
    WIDTH,
    blank,
    colour_bar,
    heat_map,
    styled,
)
from transformer_jax.inspect.trace import AttentionTrace

LONGEST = 40  # tokens on an axis that can still be read


def alignment(cross_weights: Float[ndarray, "L N T S"], layer: int | None = None) -> Float[ndarray, "T S"]:
    """How much each target position looks at each source token: the mean over the heads of a layer, or of all."""
    chosen = cross_weights if layer is None else cross_weights[layer : layer + 1]
    return chosen.mean(axis=(0, 1))


def entropy(weights: Float[ndarray, "... S"]) -> Float[ndarray, "..."]:
    """Of each distribution, in bits: 0 where one key has it all, log₂ S where all have the same."""
    logs = np.log2(weights, where=weights > 0, out=np.zeros_like(weights))
    return -(weights * logs).sum(axis=-1)


@styled
def head_figure(
    weights: Float[ndarray, "T S"], rows: Sequence[str], columns: Sequence[str], *, title: str = ""
) -> Figure:
    """The weights of one head."""
    figure = blank(*_size(rows, columns, most=WIDTH))
    axes = figure.subplots()
    heat_map(axes, weights, rows=rows, columns=columns)
    colour_bar(axes, "attention weight")
    axes.set_title(title)
    return figure


@styled
def heads_figure(
    weights: Float[ndarray, "N T S"], rows: Sequence[str], columns: Sequence[str], *, title: str = ""
) -> Figure:
    """The weights of all heads of a layer, on one scale."""
    across = min(len(weights), 4 if len(columns) <= 12 else 2)
    down = -(-len(weights) // across)
    height = _size(rows, columns, most=WIDTH / across - 0.1)[1]
    figure = blank(WIDTH, min(down * (height + 0.1) + 0.4, 9.5))
    panels = np.atleast_1d(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)).ravel()
    for number, axes in enumerate(panels):
        if number >= len(weights):
            axes.set_axis_off()
            continue
        heat_map(axes, weights[number], rows=rows, columns=columns)
        axes.tick_params(labelleft=number % across == 0, labeltop=number < across)
        axes.set_xlabel(f"head {number}: {entropy(weights[number]).mean():.1f} bits")
    colour_bar(list(panels), "attention weight")
    figure.suptitle(title, fontsize=9)
    return figure


@styled
def focus_figure(
    weights: Float[ndarray, "N T S"], query: int, rows: Sequence[str], columns: Sequence[str], *, title: str = ""
) -> Figure:
    """What one token attends to: a line for each head and key, as strong as the weight, in the colour of its head.

    The queries stand on the right, the chosen one in bold; the keys on the left, beside bars of the weights they get.
    """
    heads, _, keys = weights.shape
    longest = max(len(rows), len(columns))
    figure = blank(min(WIDTH, 5.0), max(2.2, 0.24 * longest + 0.7))
    axes = figure.subplots()
    bar = 0.16
    for head in range(heads):
        left = -bar * (heads - head)
        for key in range(keys):
            weight = float(weights[head, query, key])
            colour = COLOURS[head % len(COLOURS)]
            axes.barh(key, bar * 0.9, left=left, height=0.86, color=colour, alpha=weight, linewidth=0, align="center")
            axes.plot([0.05, 1.95], [key, query], color=colour, alpha=weight, linewidth=2.5, solid_capstyle="round")
        axes.text(left + bar / 2, -1.0, str(head), color=COLOURS[head % len(COLOURS)], ha="center", fontweight="bold")
    for key, text in enumerate(columns):
        axes.text(-bar * heads - 0.06, key, text, ha="right", va="center")
    for place, text in enumerate(rows):
        chosen = place == query
        axes.text(
            2.05, place, text, va="center", fontweight="bold" if chosen else None, color="black" if chosen else GREY
        )
    axes.text(-bar * heads - 0.06, -1.0, "head", ha="right")
    axes.set(xlim=(-bar * heads - 0.9, 2.9), ylim=(longest - 0.4, -1.5))
    axes.set_axis_off()
    axes.set_title("\n".join(textwrap.wrap(title, 70)))
    return figure


@styled
def steps_figure(attention: AttentionTrace, head: int, rows: Sequence[str], columns: Sequence[str]) -> Figure:
    """The steps of one head: q · k, divided by √H, masked, softmax. What the mask hides is grey."""
    across = 4 if len(columns) <= 8 else 2
    height = _size(rows, columns, most=WIDTH / across - 0.2)[1]
    figure = blank(WIDTH, 4 // across * (height + 0.1))
    panels = figure.subplots(4 // across, across, sharex=True, sharey=True).ravel()
    top = float(np.abs(attention.scores[head]).max()) or 1.0
    drawn = (
        ("1. scores q · k", attention.scores[head]),
        (f"2. divided by √{attention.queries.shape[-1]}", attention.scaled_scores[head]),
        ("3. masked", attention.masked_scores[head]),
    )
    for axes, (title, matrix) in zip(panels, drawn, strict=False):
        heat_map(axes, matrix, rows=rows, columns=columns, low=-top, high=top, colours=DIVERGING)
        axes.set_xlabel(title)
    colour_bar(list(panels[: across - across // 4]), "score")
    heat_map(panels[3], attention.weights[head], rows=rows, columns=columns)
    panels[3].set_xlabel("4. softmax")
    colour_bar(list(panels[across - across // 4 :]), "weight")
    for number, axes in enumerate(panels):
        axes.tick_params(labelleft=number % across == 0, labeltop=number < across)
    return figure


@styled
def mask_figure(mask: Bool[ndarray, "T S"], rows: Sequence[str], columns: Sequence[str], *, title: str = "") -> Figure:
    """Which query may see which key; what it may not is −∞ before the softmax."""
    figure = blank(*_size(rows, columns, most=4.5))
    axes = figure.subplots()
    heat_map(axes, mask.astype(np.float32), rows=rows, columns=columns, high=1.6)
    for row, column in np.argwhere(~mask) if len(columns) <= 12 else ():
        axes.text(column, row, "−∞", ha="center", va="center", color=GREY, fontsize=7)
    axes.set_ylabel("query")
    axes.set_xlabel(f"key\n{title}" if title else "key")
    return figure


@styled
def alignment_figure(
    weights: Float[ndarray, "T S"], target: Sequence[str], source: Sequence[str], *, title: str = ""
) -> Figure:
    """Which source tokens each target token was made from; the strongest one of each row is framed."""
    figure = blank(*_size(target, source, most=WIDTH))
    axes = figure.subplots()
    heat_map(axes, weights, rows=target, columns=source)
    colour_bar(axes, "mean weight")
    for row, column in enumerate(weights.argmax(axis=1)):
        axes.plot(column, row, marker="s", markersize=6, fillstyle="none", color=COLOURS[1], markeredgewidth=1.2)
    axes.set_ylabel("the decoder predicts")
    axes.set_xlabel(f"it looks at\n{title}" if title else "it looks at")
    return figure


def _size(rows: Sequence[str], columns: Sequence[str], *, most: float) -> tuple[float, float]:
    """Inches for a heat-map of cells that are about square, with its labels."""
    labels = 0.075 * max(map(len, rows), default=1), 0.075 * max(map(len, columns), default=1)
    cell = min(0.3, max(0.12, (most - labels[0] - 0.9) / max(1, len(columns))))
    width = min(most, labels[0] + cell * len(columns) + 1.2)
    return max(width, 1.5), labels[1] + cell * len(rows) + 0.7
