"""The loss is the paper's, counts tokens only, and never looks at padding."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import Batch, unpacked
from transformer_jax.training.metrics import add, means
from transformer_jax.training.objective import make_objective, smoothing_entropy, token_losses

VOCAB, PADDED = 7, 16


class Table:
    """A stand-in model: the logits of a token depend on the decoder's input token and on nothing else."""

    config = SimpleNamespace(target_vocab=VOCAB)

    def apply(self, params, batch, dropout_rng=None):
        del dropout_rng
        return mask_padded(params[batch.target_input])


def mask_padded(logits):
    return jnp.where(jnp.arange(PADDED)[None, None] < VOCAB, logits, jnp.finfo(jnp.float32).min)


@pytest.fixture
def table():
    return jax.random.normal(jax.random.key(0), (VOCAB, PADDED))


@pytest.fixture
def batch() -> Batch:
    target = jnp.array([[3, 4, 1, 0], [5, 1, 0, 0]])
    return unpacked(target, target)


def closed_form(log_probs: np.ndarray, target: int, label_smoothing: float) -> float:
    """KL(q ‖ p) written out."""
    q = np.full(VOCAB, label_smoothing / (VOCAB - 1))
    q[target] = 1 - label_smoothing
    return sum(q_k * (np.log(q_k) - log_p) for q_k, log_p in zip(q, log_probs, strict=True) if q_k > 0)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_loss_is_the_divergence_from_the_smoothed_target(label_smoothing):
    logits = jax.random.normal(jax.random.key(1), (2, 3, VOCAB)) * 3
    targets = jnp.array([[2, 5, 1], [0, 6, 3]])
    losses = token_losses(logits, targets, vocab=VOCAB, label_smoothing=label_smoothing).smoothed
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    expected = [[closed_form(log_probs[b, t], targets[b, t], label_smoothing) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)


def test_without_smoothing_loss_is_cross_entropy():
    logits = jax.random.normal(jax.random.key(1), (2, 3, VOCAB))
    targets = jnp.array([[2, 5, 1], [0, 6, 3]])
    losses = token_losses(logits, targets, vocab=VOCAB, label_smoothing=0.0)
    np.testing.assert_allclose(losses.smoothed, losses.nll, atol=1e-6)
    expected = -np.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses.nll, expected, atol=1e-6)


def test_loss_is_zero_for_the_smoothed_target_itself_and_nowhere_below():
    q = jnp.full((VOCAB,), 0.1 / (VOCAB - 1)).at[2].set(0.9)
    best = token_losses(jnp.log(q)[None, None], jnp.array([[2]]), vocab=VOCAB, label_smoothing=0.1).smoothed
    np.testing.assert_allclose(best, 0, atol=1e-6)
    other = token_losses(jnp.log(q)[None, None] * 1.1, jnp.array([[2]]), vocab=VOCAB, label_smoothing=0.1).smoothed
    assert other > 1e-4


def test_entropy_is_that_of_the_smoothed_target():
    q = np.array([0.9] + [0.1 / 36_999] * 36_999)
    np.testing.assert_allclose(smoothing_entropy(37_000, 0.1), -(q * np.log(q)).sum(), rtol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding", [0, 3])
def test_gradient_is_that_of_the_closed_form(label_smoothing, padding):
    """Of any mix of the losses, each weighted differently at each token."""
    logits, weights = jax.random.normal(jax.random.key(1), (2, 3, VOCAB)) * 3, jnp.arange(12.0).reshape(2, 2, 3) - 4
    targets = jnp.array([[2, 5, 1], [0, 6, 3]])

    def ours(logits):
        columns = jnp.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=jnp.finfo(jnp.float32).min)
        losses = token_losses(columns, targets, vocab=VOCAB, label_smoothing=label_smoothing)
        return (weights[0] * losses.smoothed + weights[1] * losses.nll).sum()

    def derived(logits):
        log_probs, true = jax.nn.log_softmax(logits), jax.nn.one_hot(targets, VOCAB)
        q = jnp.where(true > 0, 1 - label_smoothing, label_smoothing / (VOCAB - 1))
        return -(weights[0] * (q * log_probs).sum(-1) + weights[1] * (true * log_probs).sum(-1)).sum()

    gradient = jax.jit(jax.grad(ours))(logits)
    np.testing.assert_allclose(gradient, jax.grad(derived)(logits), atol=2e-6)
    half = jax.grad(ours)(logits.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), gradient, atol=0.2)


def test_padded_vocabulary_columns_change_nothing(table):
    targets = jnp.array([[2, 5, 1]])
    logits = jax.random.normal(jax.random.key(1), (1, 3, VOCAB))
    lowest = jnp.full((1, 3, PADDED - VOCAB), jnp.finfo(jnp.float32).min)

    def total(logits):
        return token_losses(logits, targets, vocab=VOCAB, label_smoothing=0.1).smoothed.sum()

    plain, plain_gradient = jax.value_and_grad(total)(logits)
    padded, padded_gradient = jax.value_and_grad(total)(jnp.concatenate([logits, lowest], axis=-1))
    np.testing.assert_allclose(plain, padded, rtol=1e-6)
    np.testing.assert_allclose(plain_gradient, padded_gradient[..., :VOCAB], atol=1e-6)
    assert not padded_gradient[..., VOCAB:].any()


def test_padding_changes_neither_loss_nor_gradient(table, batch):
    objective = make_objective(Table(), label_smoothing=0.1)
    wider = Batch(*(jnp.pad(ids, ((0, 3), (0, 5))) for ids in batch))
    garbage = wider._replace(target=jnp.where(wider.target_segments == 0, 6, wider.target))
    for other in (wider, garbage):
        (loss, sums), gradient = jax.value_and_grad(lambda p, b=batch: split(objective(p, b)), has_aux=True)(table)
        (loss_2, sums_2), gradient_2 = jax.value_and_grad(lambda p, b=other: split(objective(p, b)), has_aux=True)(
            table
        )
        np.testing.assert_allclose(loss, loss_2, rtol=1e-6)
        np.testing.assert_allclose(gradient, gradient_2, atol=1e-6)
        assert sums.weight == sums_2.weight == 5
        assert sums.metrics["correct"] == sums_2.metrics["correct"]


def split(sums):
    return sums.loss, sums


def test_a_batch_of_padding_has_weight_and_loss_zero(table, batch):
    empty = Batch(*(jnp.zeros_like(ids) for ids in batch))
    sums = make_objective(Table(), label_smoothing=0.1)(table, empty, None)
    assert sums.weight == 0
    assert sums.loss == 0
    assert sums.metrics["nll"] == 0
    assert means(sums)["loss"] == 0


def test_accuracy_counts_tokens_held_most_likely(batch):
    table = jnp.zeros((VOCAB, PADDED)).at[0, 3].set(1.0).at[3, 4].set(1.0).at[4, 6].set(1.0).at[5, 6].set(1.0)
    sums = make_objective(Table(), label_smoothing=0.1)(table, batch, None)
    assert sums.metrics["correct"] == 2  # 3 after BOS and 4 after 3, of 5 tokens


def test_sums_of_parts_are_the_sums_of_the_whole(table, batch):
    objective = make_objective(Table(), label_smoothing=0.1)
    parts = None
    for row in range(2):
        parts = add(parts, objective(table, Batch(*(ids[row : row + 1] for ids in batch)), None))
    whole = add(None, objective(table, batch, None))
    np.testing.assert_allclose(means(parts)["loss"], means(whole)["loss"], rtol=1e-6)
    assert parts.weight == whole.weight
    np.testing.assert_allclose(means(whole)["perplexity"], np.exp(whole.metrics["nll"] / 5), rtol=1e-6)
