"""An update is the same however its batch is divided, and a pure function of state and batch."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import parallel
from transformer_jax.batch import Batch, unpacked
from transformer_jax.config import MeshConfig, TransformerConfig
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.training.objective import Sums, make_objective
from transformer_jax.training.step import init_state, make_eval_step, make_train_step, split_rows

VOCAB = 11
CONFIG = TransformerConfig(
    encoder_layers=1,
    decoder_layers=1,
    width=8,
    heads=2,
    feed_forward=16,
    source_vocab=VOCAB,
    target_vocab=VOCAB,
    vocab_multiple=16,
    dropout=0.2,
)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


def random_batch(rows: int, *, seed: int = 0, length: int = 6) -> Batch:
    """Rows of uneven length."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, size=(2, rows, 1))
    source, target = rng.integers(3, VOCAB, size=(2, rows, length)) * (np.arange(length) < lengths)
    return unpacked(jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32))


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), random_batch(2)))


def without_dropout(model):
    objective = make_objective(model, label_smoothing=0.1)
    return jax.jit(lambda params, batch, rng: objective(params, batch, None))


def one_update(objective, params, batch, *, optimizer=None, **options):
    optimizer = optimizer or optax.sgd(1.0)
    state = init_state(jax.tree.map(jnp.asarray, params), optimizer, seed=0, ema=options.get("ema", 0.0))
    return make_train_step(objective, optimizer, learning_rate=lambda s: s * jnp.float32(0.5), **options)(state, batch)


def assert_trees_close(one, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), one, other)


def test_accumulation_over_uneven_micro_batches_gives_the_gradient_of_the_whole(model, params):
    batch = random_batch(8)
    objective = without_dropout(model)
    whole, report = one_update(objective, params, batch)
    parts, parts_report = one_update(objective, params, batch, accumulate=4)
    assert len(set(split_rows(batch, 4).target_segments.sum(axis=(1, 2)).tolist())) > 1  # uneven indeed
    assert_trees_close(whole.params, parts.params, atol=1e-6)
    np.testing.assert_allclose(report.grad_norm, parts_report.grad_norm, rtol=1e-5)
    np.testing.assert_allclose(report.sums.loss, parts_report.sums.loss, rtol=1e-6)
    assert report.sums.weight == parts_report.sums.weight


def test_micro_batches_have_dropout_of_their_own():
    """The objective is a random number: two micro-batches must not draw the same one."""

    def objective(params, batch, rng):
        return Sums(
            params["x"] * 0, jnp.ones(()), {"drawn": jax.random.uniform(rng), "square": jax.random.uniform(rng) ** 2}
        )

    _, report = one_update(objective, {"x": np.float32(1)}, random_batch(4), accumulate=2)
    drawn, square = report.sums.metrics["drawn"], report.sums.metrics["square"]
    assert abs(2 * square - drawn**2) > 1e-6  # equal if and only if both are the same


def test_rows_that_do_not_divide_are_refused_by_name():
    with pytest.raises(UserError, match=r"optimizer.accumulate is 4, but a batch has 6 rows"):
        split_rows(random_batch(6), 4)


def test_a_batch_of_padding_changes_nothing(model, params):
    empty = Batch(*(jnp.zeros_like(ids) for ids in random_batch(4)))
    state, report = one_update(make_objective(model, label_smoothing=0.1), params, empty)
    assert_trees_close(state.params, params, atol=0)
    assert report.sums.weight == 0
    assert report.grad_norm == 0


def test_dropout_follows_from_seed_and_step(model, params):
    objective = make_objective(model, label_smoothing=0.1)
    optimizer = optax.sgd(0.0)
    step = make_train_step(objective, optimizer, learning_rate=lambda s: s * jnp.float32(1))
    losses = []
    for _ in range(2):
        state = init_state(jax.tree.map(jnp.asarray, params), optimizer, seed=0, ema=0.0)
        for _ in range(2):
            state, report = step(state, random_batch(4))
            losses.append(float(report.sums.loss))
    assert losses[0] == losses[2]
    assert losses[1] == losses[3]
    assert losses[0] != losses[1]


def test_report_has_the_rate_and_the_count_of_this_update(model, params):
    state, report = one_update(make_objective(model, label_smoothing=0.1), params, random_batch(4))
    assert state.step == 1
    assert report.learning_rate == 0.5


def test_average_moves_towards_the_parameters_and_is_apart_from_them(model, params):
    state, _ = one_update(without_dropout(model), params, random_batch(4), ema=0.999)
    decay = 2 / 11  # (1 + s) / (10 + s) at s = 1
    expected = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, params, state.params)
    assert_trees_close(state.average, expected, atol=1e-6)


def test_average_decays_as_asked_in_the_long_run():
    optimizer = optax.sgd(0.1)
    objective = lambda params, batch, rng: Sums(params["x"] ** 2, jnp.ones(()), {})  # noqa: E731
    state = init_state({"x": jnp.ones(())}, optimizer, seed=0, ema=0.5)
    step = make_train_step(objective, optimizer, learning_rate=lambda s: s * jnp.float32(1), ema=0.5)
    for _ in range(20):
        before = jax.tree.map(np.asarray, state.average)
        state, _ = step(state, random_batch(1))
    np.testing.assert_allclose(state.average["x"], 0.5 * before["x"] + 0.5 * state.params["x"], rtol=1e-6)


def test_evaluation_has_no_dropout(model, params):
    evaluate = make_eval_step(make_objective(model, label_smoothing=0.1))
    batch = random_batch(4)
    assert evaluate(params, batch).loss == evaluate(params, batch).loss
    np.testing.assert_allclose(
        evaluate(params, batch).loss, without_dropout(model)(params, batch, None).loss, rtol=1e-6
    )


def train(rows: int, *, accumulate: int = 1, steps: int = 4) -> list[float]:
    """Losses of some steps with dropout, on as many devices as there are."""
    model, mesh = Transformer(CONFIG), parallel.make_mesh(MeshConfig())
    optimizer = optax.adam(1e-2)
    params = jax.jit(model.init)(jax.random.key(0), random_batch(2))
    state = parallel.shard(init_state(params, optimizer, seed=0, ema=0.9), mesh)
    objective = make_objective(model, label_smoothing=0.1)
    step = make_train_step(
        objective, optimizer, learning_rate=lambda s: s * jnp.float32(1), accumulate=accumulate, ema=0.9
    )
    losses = []
    for seed in range(steps):
        batch = parallel.shard_batch(random_batch(rows, seed=seed), mesh, multiple=accumulate)
        state, report = step(state, batch)
        losses.append(float(report.sums.loss / report.sums.weight))
    evaluation = make_eval_step(objective)(state.average, parallel.shard_batch(random_batch(13), mesh))
    return [*losses, float(evaluation.loss / evaluation.weight), float(evaluation.weight)]


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one():
    """Dropout, an average, accumulation, and an evaluation of 13 examples which 8 does not divide."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = "import json, jax, test_step; print(json.dumps([jax.device_count(), test_step.train(16, accumulate=2)]))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=True,
    )
    devices, losses = json.loads(done.stdout.splitlines()[-1])
    assert devices == 8
    np.testing.assert_allclose(losses, train(16, accumulate=2), rtol=1e-5)
    assert losses[-1] == (random_batch(13).target_segments != 0).sum()


def test_shard_batch_pads_with_rows_that_weigh_nothing(model, params):
    mesh = parallel.make_mesh(MeshConfig(data=1))
    batch = parallel.shard_batch(random_batch(5), mesh, multiple=4)
    assert batch.target.shape[0] == 8
    np.testing.assert_array_equal(batch.target_segments[5:], 0)
    evaluate = make_eval_step(make_objective(model, label_smoothing=0.1))
    np.testing.assert_allclose(evaluate(params, batch).loss, evaluate(params, random_batch(5)).loss, rtol=1e-5)


def test_a_mesh_larger_than_the_machine_is_refused_by_name():
    with pytest.raises(UserError, match=r"mesh\.data is 99"):
        parallel.make_mesh(MeshConfig(data=99))
