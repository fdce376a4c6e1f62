"""How the pictures look, and how they are saved.

Colours can be told apart by colour-blind readers and in grey: one blue ramp for what is between 0 and 1, violet to
orange through white around 0, and Okabe and Ito's colours for what has names. Labels are never read as mathematics: a
token may have a dollar sign.
"""

import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from cycler import cycler
from jaxtyping import Num
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

WIDTH = 7.0  # inches: a page's text
SEQUENTIAL, DIVERGING = "Blues", "PuOr"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#000000")
GREY = "#8A8A8A"

RC: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=COLOURS),
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "image.interpolation": "nearest",
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: it can be searched, and a browser has fonts for every script
    "svg.hashsalt": "transformer_jax",  # the same picture gives the same file
    "figure.constrained_layout.use": True,
}


P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """`draw` under the style of these pictures, whatever the reader's own is."""

    @functools.wraps(draw)
    def draw_styled(*arguments: P.args, **options: P.kwargs) -> R:
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC}):
            return draw(*arguments, **options)

    return draw_styled


def save(figure: Figure, directory: str | os.PathLike, name: str) -> list[pathlib.Path]:
    """Writes `name`.svg and `name`.png into the directory, which is made; the two paths."""
    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    paths = [pathlib.Path(directory, f"{name}.{kind}") for kind in ("svg", "png")]
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the PNG has boxes there, the SVG the text itself
        for path in paths:
            figure.savefig(path, dpi=150, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths


def blank(width: float, height: float) -> Figure:
    """A figure without axes, in inches; it belongs to no window and to no global state."""
    return Figure(figsize=(width, height))


def heat_map(
    axes: Axes,
    matrix: Num[ndarray, "rows columns"],
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    colours: str = SEQUENTIAL,
) -> None:
    """The matrix as an image with labels: rows on the left, columns on top. What is not finite is grey."""
    palette = matplotlib.colormaps[colours].with_extremes(bad="#DDDDDD")
    axes.imshow(_finite(matrix), vmin=low, vmax=high, cmap=palette, aspect="auto")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    axes.tick_params(length=0, top=False, bottom=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def colour_bar(panels: Axes | Sequence[Axes], label: str) -> None:
    """A colour bar beside the heat-maps of these axes, which share one scale: that of the first."""
    image = (panels if isinstance(panels, Axes) else panels[0]).images[0]
    figure = image.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(image, ax=panels, shrink=0.8, aspect=25, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)  # type: ignore[operator]


def _finite(matrix: ndarray) -> ndarray:
    return np.where(np.isfinite(matrix), matrix, np.nan)
