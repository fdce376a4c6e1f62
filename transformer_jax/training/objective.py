"""What training minimises: label-smoothed cross-entropy, as sums over tokens."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.batch import Batch


class Sums(NamedTuple):
    """Sums over the tokens of a batch, each a float32 scalar.

    They are sums, not means, so that micro-batches, devices and evaluation batches add up exactly: the mean
    is `loss / weight`, taken once at the very end.
    """

    loss: Any  # jax.Array, or np.float64 once it is added up on the host
    weight: Any  # how many tokens count
    metrics: dict[str, Any]  # further sums, to be divided by `weight` as well


Objective = Callable[[Any, Batch, jax.Array | None], Sums]
"""`(params, batch, rng) -> Sums`. The rng is for dropout; None means evaluation, without dropout."""


@runtime_checkable
class Model(Protocol):
    """What an objective needs of a model; `Transformer` is one."""

    config: Any  # has `target_vocab`, the true V

    def apply(self, params: Any, batch: Batch, /, *, dropout_rng: Any) -> Any: ...  # logits [B, T, V or more]


def make_objective(model: Model, *, label_smoothing: float) -> Objective:
    """The paper's objective (section 5.4): smoothed cross-entropy of every target token.

    Its metrics are `nll`, the cross-entropy with the true tokens (perplexity is exp of its mean), and `correct`,
    how many tokens the model holds most likely.
    """

    def objective(params: Any, batch: Batch, rng: jax.Array | None = None) -> Sums:
        logits = model.apply(params, batch, dropout_rng=rng)
        counts = batch.target_segments != 0
        losses = token_losses(logits, batch.target, vocab=model.config.target_vocab, label_smoothing=label_smoothing)
        return Sums(
            loss=masked_sum(losses.smoothed, counts),
            weight=counts.sum(dtype=jnp.float32),
            metrics={"nll": masked_sum(losses.nll, counts), "correct": masked_sum(losses.correct, counts)},
        )

    return objective


class TokenLosses(NamedTuple):
    smoothed: jax.Array  # [B, T] KL(smoothed target ‖ model), 0 at best
    nll: jax.Array  # [B, T] -log p(token)
    correct: jax.Array  # [B, T] 1 where no token is likelier than the true one, else 0


def token_losses(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], *, vocab: int, label_smoothing: float
) -> TokenLosses:
    """Losses of each target token in nats, in float32.

    The smoothed target q has 1-ε on the true token and ε/(vocab-1) on every other one of the first `vocab` columns;
    the columns after those are padding. The loss is the KL divergence from q, Σ q log q - Σ q log p, and
    Σ q log p = Σ q·logits - logsumexp(logits) because q sums to 1.
    """
    smoothed, nll, correct = _cross_entropy(logits, targets, vocab, label_smoothing)
    return TokenLosses(smoothed - smoothing_entropy(vocab, label_smoothing), nll, correct)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits, targets, vocab: int, label_smoothing: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-Σ q log p, -log p(token) and whether no token is likelier, [B, T] each.

    The gradient is written down, because the one which JAX derives keeps exp(logits) beside the logits for the backward
    pass; this one keeps them and a number for each token. q is never stored.
    """
    return _forward(logits, targets, vocab, label_smoothing)[0]


def _forward(logits, targets, vocab: int, label_smoothing: float):
    values = logits.astype(jnp.float32)
    highest = values.max(axis=-1)
    normaliser = highest + jnp.log(jnp.exp(values - highest[..., None]).sum(axis=-1))
    true_logit = jnp.take_along_axis(values, targets[..., None], axis=-1)[..., 0]
    in_vocabulary = jnp.arange(values.shape[-1]) < vocab  # the columns of padding hold the lowest float
    total = jnp.einsum("BTV,V->BT", values, in_vocabulary.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    other_logits = total - true_logit
    on_true, on_other = _smoothed_target(vocab, label_smoothing)
    smoothed = normaliser - on_true * true_logit - on_other * other_logits
    losses = smoothed, normaliser - true_logit, (true_logit >= highest).astype(jnp.float32)
    return losses, (logits, targets, normaliser)


def _backward(vocab: int, label_smoothing: float, residuals, cotangents):
    """p - q, times the gradient that comes from above."""
    (logits, targets, normaliser), (by_smoothed, by_nll, _) = residuals, cotangents
    on_true, on_other = _smoothed_target(vocab, label_smoothing)
    columns = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    others = jnp.where(columns < vocab, (on_other * by_smoothed)[..., None], 0)
    target = jnp.where(columns == targets[..., None], (on_true * by_smoothed + by_nll)[..., None], others)
    probabilities = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    return ((by_smoothed + by_nll)[..., None] * probabilities - target).astype(logits.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _smoothed_target(vocab: int, label_smoothing: float) -> tuple[float, float]:
    """q of the true token, and of each other."""
    return 1 - label_smoothing, label_smoothing / (vocab - 1)


def smoothing_entropy(vocab: int, label_smoothing: float) -> float:
    """Entropy of the smoothed target: the least cross-entropy that any model can reach."""
    other = label_smoothing / (vocab - 1)
    return -sum(n * p * math.log(p) for n, p in ((1, 1 - label_smoothing), (vocab - 1, other)) if p > 0)


def masked_sum(values: Float[Array, "B T"], counts: Bool[Array, "B T"]) -> Float[Array, ""]:
    """The sum where `counts`; what stands on padding does not matter, be it NaN."""
    return jnp.where(counts, values, 0).sum()
