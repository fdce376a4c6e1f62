"""Curves over the updates of a run: learning rates, and what metrics.jsonl has of one or several runs."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.config import OptimizerConfig, Schedule
from transformer_jax.errors import UserError
from transformer_jax.inspect.style import COLOURS, WIDTH, blank, styled
from transformer_jax.run_directory import METRICS
from transformer_jax.training.journal import records
from transformer_jax.training.optimizer import make_schedule


class Curve(NamedTuple):
    steps: ndarray  # int [M]
    values: ndarray  # float [M]


def learning_rates(config: OptimizerConfig, *, width: int, steps: int, points: int = 400) -> Curve:
    """The rate of `points` of the updates 1, 2, …, `steps`."""
    some = np.unique(np.linspace(1, steps, points).round().astype(int))
    return Curve(some, np.asarray(make_schedule(config, width=width, steps=steps)(some)))


def named_schedules(*, width: int, steps: int, warmup: int) -> dict[str, Curve]:
    """Every schedule of the library with the same highest rate, that of the paper's at this width and warm-up."""
    peak = width**-0.5 * warmup**-0.5
    configs = {
        "noam (the paper)": OptimizerConfig(schedule=Schedule.NOAM, warmup=warmup),
        "inverse_sqrt": OptimizerConfig(schedule=Schedule.INVERSE_SQRT, warmup=warmup, peak=peak),
        "cosine": OptimizerConfig(schedule=Schedule.COSINE, warmup=warmup, peak=peak),
        "constant": OptimizerConfig(schedule=Schedule.CONSTANT, warmup=warmup, peak=peak),
    }
    return {name: learning_rates(config, width=width, steps=steps) for name, config in configs.items()}


def training_curve(workdir: str | os.PathLike, split: str, field: str) -> Curve:
    """One field of the lines of one split, empty where there is none."""
    found = [(line["step"], line[field]) for line in records(workdir) if line["split"] == split and field in line]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return Curve(np.array(steps, int), np.array(values, float))


@styled
def schedules_figure(schedules: Mapping[str, Curve]) -> Figure:
    """Learning rates over the updates."""
    figure = blank(WIDTH, 2.6)
    axes = figure.subplots()
    for number, ((name, curve), line) in enumerate(zip(schedules.items(), _LINES * len(schedules), strict=False)):
        axes.plot(*curve, label=name, linestyle=line, color=COLOURS[number % len(COLOURS)])
    axes.set(xlabel="update", ylabel="learning rate", ylim=(0, None))
    axes.yaxis.set_major_formatter(_short)
    axes.legend()
    return figure


def _short(value: Any, _: Any = None) -> str:
    """0.001, 0.5, 2, 20k."""
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:.4g}"


PANELS = (  # title, field, which splits
    ("loss, nats a token", "loss", ("train", "dev")),
    ("token accuracy", "accuracy", ("train", "dev")),
    ("BLEU on the dev set", "bleu", ("dev",)),
    ("norm of the gradient", "grad_norm", ("train",)),
    ("learning rate", "learning_rate", ("train",)),
    ("tokens a second", "tokens_per_second", ("train",)),
)
_LINES = ("-", "--", "-.", ":")


@styled
def training_figure(workdirs: Sequence[str | os.PathLike]) -> Figure:
    """What runs logged, each in its colour: lines on the training batches, points on the dev set.

    Raises:
      UserError: if a directory has no log.
    """
    for workdir in workdirs:
        if not records(workdir):
            raise UserError(f"{workdir}: no {METRICS} with lines here. Give a run directory that train.py has written.")
    figure = blank(WIDTH, 4.2)
    panels = figure.subplots(2, 3, sharex=True)
    for axes, (title, field, splits) in zip(panels.ravel(), PANELS, strict=True):
        for number, workdir in enumerate(workdirs):
            colour = COLOURS[number % len(COLOURS)]
            for split in splits:
                style = {"linestyle": "-"} if split == "train" else {"marker": "o", "markersize": 4, "linestyle": ":"}
                axes.plot(*training_curve(workdir, split, field), color=colour, **style)
        axes.set_title(title)
        axes.set_yscale("log" if field == "loss" else "linear")
        axes.yaxis.set_major_formatter(_short)
    for axes in panels[1]:
        axes.set_xlabel("update")
    names = [pathlib.Path(workdir).resolve().name for workdir in workdirs]
    for number, name in enumerate(names):
        panels[0, 0].plot([], [], color=COLOURS[number % len(COLOURS)], label=name)
    panels[0, 0].plot([], [], color="black", marker="o", markersize=4, linestyle=":", label="dev")
    panels[0, 0].legend()
    return figure
