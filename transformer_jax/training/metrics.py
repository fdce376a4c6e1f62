"""Sums over tokens → the figures people read."""

import math

import numpy as np

from transformer_jax.training.objective import Sums


def add(one: Sums | None, other: Sums) -> Sums:
    """The sums of both batches, as NumPy float64 so that long evaluations don't lose tokens."""
    other = Sums(
        np.float64(other.loss), np.float64(other.weight), {name: np.float64(v) for name, v in other.metrics.items()}
    )
    if one is None:
        return other
    metrics = {name: one.metrics[name] + value for name, value in other.metrics.items()}
    return Sums(one.loss + other.loss, one.weight + other.weight, metrics)


def means(sums: Sums) -> dict[str, float]:
    """`loss` and every metric a token; with `nll` its `perplexity`, and `correct` as `accuracy`."""
    weight = max(float(sums.weight), 1.0)
    figures = {"loss": float(sums.loss) / weight}
    figures |= {name: float(value) / weight for name, value in sums.metrics.items()}
    if "nll" in figures:
        figures["perplexity"] = perplexity(figures["nll"])
    if "correct" in figures:
        figures["accuracy"] = figures.pop("correct")
    return figures


def perplexity(nll: float) -> float:
    """exp of the mean negative log-likelihood in nats; infinite where that overflows."""
    return math.exp(nll) if nll < 700 else math.inf
