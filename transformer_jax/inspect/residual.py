"""The residual stream (sections 3.1 and 5.4): how large it is on its way, and what each sub-layer adds."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.inspect.style import COLOURS, WIDTH, blank, styled
from transformer_jax.inspect.trace import StackTrace

SHORT = {"self_attention": "self-attention", "cross_attention": "encoder–decoder", "feed_forward": "feed-forward"}


class Stream(NamedTuple):
    """Root mean squares over positions and channels, by sub-layer from the bottom up; arrays [M]."""

    names: tuple[str, ...]
    before: ndarray
    entered: ndarray
    update: ndarray
    after: ndarray


def stream(stack: StackTrace) -> Stream:
    """The sizes of what flows through the sub-layers of a stack."""
    parts = [
        (f"{SHORT[name]} {number}", part.frame)
        for number, layer in enumerate(stack.layers)
        for name, part in layer._asdict().items()
        if part is not None
    ]
    sizes = np.array([[root_mean_square(x) for x in frame] for _, frame in parts])
    return Stream(tuple(name for name, _ in parts), *sizes.T)


def root_mean_square(x: Float[ndarray, "T D"]) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


@styled
def stream_figure(encoder: StackTrace, decoder: StackTrace) -> Figure:
    """The size of the stream before each sub-layer, of what the sub-layer gets, adds, and leaves behind."""
    sizes = [stream(stack) for stack in (encoder, decoder)]
    figure = blank(WIDTH, 0.9 + 0.25 * max(len(one.names) for one in sizes))
    panels = figure.subplots(1, 2, sharex=True)
    marks = {"before": "o", "entered": "v", "update": "D", "after": "s"}
    words = {"before": "stream before", "entered": "what f gets", "update": "f: what is added", "after": "stream after"}
    for axes, one, title in zip(panels, sizes, ("encoder", "decoder"), strict=True):
        places = np.arange(len(one.names))
        for number, (name, mark) in enumerate(marks.items()):
            axes.plot(
                getattr(one, name),
                places + 0.12 * (number - 1.5),
                linestyle="none",
                marker=mark,
                markersize=5,
                color=COLOURS[number],
                label=words[name],
            )
        axes.set_yticks(places, one.names)
        axes.set(title=f"{title}, bottom layer first", xlabel="root mean square")
        axes.invert_yaxis()
        axes.grid(axis="y", alpha=0.25)
    panels[0].set_xlim(left=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
