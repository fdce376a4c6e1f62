"""Distributions over the vocabulary: what the targets ask for and what a model has learned."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.inspect.style import WIDTH, blank, colour_bar, heat_map, styled


class Likeliest(NamedTuple):
    """The tokens of highest probability at each target position, best first."""

    tokens: ndarray  # int [T, n]
    probabilities: ndarray  # [T, n]


def target_distributions(
    targets: Int[ndarray, "T"], *, vocab: int, label_smoothing: float = 0.0
) -> Float[ndarray, "T V"]:
    """What training asks for: 1 − ε on the true token, ε / (V − 1) on each other one (section 5.4)."""
    asked = np.full((len(targets), vocab), label_smoothing / (vocab - 1), np.float32)
    asked[np.arange(len(targets)), targets] = 1 - label_smoothing
    return asked


def cross_entropies(target: Float[ndarray, "T V"], model: Float[ndarray, "T V"]) -> Float[ndarray, "T"]:
    """−Σ q log p of each position, in nats."""
    return -(target * np.log(np.where(target > 0, model, 1))).sum(axis=-1)


def divergences(target: Float[ndarray, "T V"], model: Float[ndarray, "T V"]) -> Float[ndarray, "T"]:
    """KL(q ‖ p) of each position, in nats: the cross-entropy less the entropy of the target, and 0 at best."""
    return cross_entropies(target, model) - cross_entropies(target, target)


def likeliest(probabilities: Float[ndarray, "T V"], count: int) -> Likeliest:
    """The `count` best tokens of each position."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
    return Likeliest(order, np.take_along_axis(probabilities, order, axis=1))


@styled
def distributions_figure(
    matrices: Mapping[str, Float[ndarray, "T V"]], positions: Sequence[str], vocabulary: Sequence[str]
) -> Figure:
    """Probability matrices side by side under their titles: a row for each position of the output."""
    labels = 0.075 * max(map(len, vocabulary))
    figure = blank(WIDTH, 0.75 + labels + 0.36 * len(positions))
    panels = figure.subplots(1, len(matrices), sharey=True, squeeze=False)[0]
    for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
        heat_map(axes, matrix, rows=positions, columns=vocabulary)
        axes.set_xlabel(title)
        for (row, column), value in np.ndenumerate(matrix):
            if value >= 0.005:
                colour = "white" if value > 0.6 else "black"
                text = f"{value:.2f}".removeprefix("0")
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    colour_bar(list(panels), "probability")
    return figure


@styled
def likeliest_figure(
    found: Likeliest, labels: Sequence[Sequence[str]], rows: Sequence[str], *, title: str = ""
) -> Figure:
    """The likeliest next tokens after each input of the decoder, with their probabilities.

    `labels` are the words of `found.tokens`, `rows` what the decoder reads at each position.
    """
    figure = blank(WIDTH, 0.6 + 0.28 * len(rows))
    axes = figure.subplots()
    heat_map(axes, found.probabilities, rows=rows, columns=[f"{n}." for n in range(1, len(labels[0]) + 1)])
    for (row, column), value in np.ndenumerate(found.probabilities):
        text = f"{labels[row][column]}  {value:.3f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "black")
    axes.tick_params(axis="x", rotation=0)
    axes.set_ylabel("the decoder has read")
    axes.set_xlabel(title)
    colour_bar(axes, "probability")
    return figure
