"""Schedules at the steps where they turn, and Adafactor against the paper and PyTorch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.batch import unpacked
from transformer_jax.config import OptimizerConfig, OptimizerKind, Schedule, TransformerConfig
from transformer_jax.nn.stacks import stack_layers
from transformer_jax.nn.transformer import Transformer
from transformer_jax.training.adafactor import adafactor
from transformer_jax.training.learner import over_layers
from transformer_jax.training.optimizer import make_optimizer, make_schedule

WARMUP, WIDTH, STEPS = 10, 64, 100

FORMULAS = {
    Schedule.NOAM: lambda s: 2 * WIDTH**-0.5 * min(s**-0.5, s * WARMUP**-1.5),
    Schedule.T2T_RSQRT: lambda s: 2 * WIDTH**-0.5 * min(1, s / WARMUP) / math.sqrt(max(s, WARMUP)),
    Schedule.INVERSE_SQRT: lambda s: 2 * s / WARMUP if s <= WARMUP else 2 * math.sqrt(WARMUP / s),
    Schedule.COSINE: lambda s: (
        2 * s / WARMUP
        if s <= WARMUP
        else 2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1, (s - WARMUP) / (STEPS - WARMUP)))))
    ),
    Schedule.CONSTANT: lambda s: 2 * min(1, s / WARMUP),
    Schedule.ADAFACTOR: lambda s: 2 * min(1e-2, s**-0.5),
}


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("schedule", list(Schedule))
def test_schedule_follows_its_formula_counted_from_one(schedule):
    config = OptimizerConfig(schedule=schedule, peak=2.0, warmup=WARMUP, floor=0.1)
    rate = make_schedule(config, width=WIDTH, steps=STEPS)
    steps = [1, 2, WARMUP - 1, WARMUP, WARMUP + 1, 50, STEPS, STEPS + 1, 20_000]
    np.testing.assert_allclose([rate(s) for s in steps], [FORMULAS[schedule](s) for s in steps], rtol=1e-6)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_no_warmup_gives_finite_rates_above_zero(schedule):
    rate = make_schedule(OptimizerConfig(schedule=schedule, warmup=0), width=WIDTH, steps=STEPS)
    assert all(np.isfinite(rate(s)) and rate(s) > 0 for s in (1, 2, 50))


def test_base_and_big_peaks_are_the_papers():
    config = OptimizerConfig()
    assert make_schedule(config, width=512, steps=100_000)(4000) == pytest.approx(6.99e-4, rel=1e-3)
    assert make_schedule(config, width=1024, steps=300_000)(4000) == pytest.approx(4.94e-4, rel=1e-3)


def test_first_update_uses_the_rate_of_step_one():
    config = OptimizerConfig(schedule=Schedule.CONSTANT, peak=0.5, warmup=4)
    params, gradients = {"w": jnp.ones((2,))}, {"w": jnp.full((2,), 3.0)}
    optimizer = make_optimizer(config, width=WIDTH, steps=STEPS)
    state = optimizer.init(params)
    for s in (1, 2, 3, 4, 5):
        updates, state = optimizer.update(gradients, state, params)
        np.testing.assert_allclose(updates["w"], -0.5 * min(1, s / 4), rtol=1e-5)  # Adam's update is the sign here


def test_adam_follows_its_definition():
    """Kingma and Ba (2015), algorithm 1, with the paper's β and ε."""
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(20, 5)) * 10.0 ** rng.integers(-3, 3, size=(20, 5))
    config = OptimizerConfig(schedule=Schedule.CONSTANT, peak=0.01, warmup=0)
    actual = run(make_optimizer(config, width=WIDTH, steps=STEPS), {"x": np.ones(5)}, [{"x": g} for g in gradients])
    x, m, v = np.ones(5), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g**2
        x = x - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-9)
    np.testing.assert_allclose(actual["x"], x, rtol=1e-5)


def test_weight_decay_spares_biases_and_norms():
    config = OptimizerConfig(kind=OptimizerKind.ADAMW, schedule=Schedule.CONSTANT, peak=0.1, warmup=0, weight_decay=0.5)
    params = {"kernel": np.ones((2, 2)), "bias": np.ones(2)}
    zero = jax.tree.map(np.zeros_like, params)
    after = run(make_optimizer(config, width=WIDTH, steps=STEPS), params, [zero])
    np.testing.assert_allclose(after["kernel"], 1 - 0.1 * 0.5)
    np.testing.assert_array_equal(after["bias"], 1)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_stacked_layers_are_updated_as_separate_ones(kind):
    config = OptimizerConfig(kind=kind, schedule=Schedule.CONSTANT, peak=0.1, warmup=0)
    config.weight_decay = 0.5 if kind == OptimizerKind.ADAMW else 0.0
    rng = np.random.default_rng(0)

    def stacks():
        layer = {"kernel": (3, 4), "bias": (4,)}
        stack = {f"layers_{i}": {name: (i + 1) * rng.normal(size=layer[name]) for name in layer} for i in range(3)}
        return {"params": {"encoder": stack, "decoder": stack, "table": rng.normal(size=(5, 4))}}

    params, gradients = stacks(), [stacks() for _ in range(2)]
    optimizer = make_optimizer(config, width=WIDTH, steps=STEPS)
    separate = run(optimizer, params, gradients)
    stacked = run(over_layers(optimizer), stacked_params(params), [stacked_params(one) for one in gradients])
    jax.tree.map(np.testing.assert_array_equal, stacked, stacked_params(separate))


def stacked_params(params):
    return {"params": stack_layers(params["params"])}


def test_clipping_limits_the_norm_of_all_gradients_together():
    config = OptimizerConfig(
        clip=1.0, schedule=Schedule.CONSTANT, peak=1.0, warmup=0, beta1=0.0, beta2=0.0, epsilon=1e6
    )
    params = {"a": np.zeros(1), "b": np.zeros(1)}
    after = run(
        make_optimizer(config, width=WIDTH, steps=STEPS), params, [{"a": np.full(1, 3.0), "b": np.full(1, 4.0)}]
    )
    # With so large an epsilon Adam divides by a constant: the update shows the clipped gradient.
    np.testing.assert_allclose([after["a"][0] * 1e6, after["b"][0] * 1e6], [-0.6, -0.8], rtol=1e-4)


def run(optimizer, params, gradients):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for gradient in gradients:
        params, state = step(params, state, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient))
    return params


def paper_optimizer() -> optax.GradientTransformation:
    config = OptimizerConfig(kind=OptimizerKind.ADAFACTOR, schedule=Schedule.ADAFACTOR)
    return make_optimizer(config, width=WIDTH, steps=STEPS)


def transcription(x: np.ndarray, gradients) -> np.ndarray:
    """Shazeer and Stern (2018), algorithms 4 and 5, in float64 and with sums as printed."""
    x = x.astype(np.float64)
    rows = columns = second = 0.0
    for t, g in enumerate(gradients, start=1):
        g = g.astype(np.float64)
        rho, beta = min(1e-2, 1 / math.sqrt(t)), 1 - t**-0.8
        alpha = max(1e-3, root_mean_square(x)) * rho
        square = g**2 + 1e-30
        if x.ndim > 1:
            rows = beta * rows + (1 - beta) * square.sum(-1, keepdims=True)
            columns = beta * columns + (1 - beta) * square.sum(-2, keepdims=True)
            second = rows * columns / rows.sum(-2, keepdims=True)
        else:
            second = beta * second + (1 - beta) * square
        update = g / np.sqrt(second)
        x = x - alpha * update / max(1, root_mean_square(update))
    return x


def root_mean_square(x):
    return np.sqrt(np.mean(x**2))


@pytest.mark.parametrize("shape", [(5,), (8, 3), (3, 8), (16, 4, 6)])
def test_adafactor_is_the_papers(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    gradients = rng.normal(size=(50, *shape)) * 10.0 ** rng.integers(-4, 3, size=(50, *(1 for _ in shape)))
    actual = run(paper_optimizer(), {"x": x}, [{"x": g} for g in gradients])["x"]
    np.testing.assert_allclose(actual, transcription(x, gradients), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (8, 3), (16, 4, 6)])
def test_adafactor_is_pytorchs(shape):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x, gradients = rng.normal(size=shape), rng.normal(size=(30, *shape))
    parameter = torch.nn.Parameter(torch.tensor(x, dtype=torch.float32))
    optimizer = torch.optim.Adafactor([parameter], lr=1e-2, eps=(1e-30, 1e-3), d=1.0, weight_decay=0.0)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    actual = run(paper_optimizer(), {"x": x}, [{"x": g} for g in gradients])["x"]
    np.testing.assert_allclose(actual, parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_adafactor_steps_do_not_depend_on_the_scale_of_gradients():
    gradients = np.random.default_rng(0).normal(size=(5, 4, 3))
    small, large = (run(paper_optimizer(), {"x": np.ones((4, 3))}, [{"x": g * c} for g in gradients]) for c in (1, 1e4))
    np.testing.assert_allclose(small["x"], large["x"], rtol=1e-5)


def test_adafactor_survives_zero_gradients():
    after = run(
        paper_optimizer(), {"x": np.ones((4, 3)), "b": np.zeros(3)}, [{"x": np.zeros((4, 3)), "b": np.zeros(3)}]
    )
    np.testing.assert_array_equal(after["x"], 1)
    np.testing.assert_array_equal(after["b"], 0)


def test_adafactor_keeps_a_row_and_a_column_of_every_matrix():
    params = {"kernel": jnp.zeros((512, 2048)), "stacked": jnp.zeros((6, 32, 16)), "bias": jnp.zeros((7,))}
    state = jax.eval_shape(adafactor().init, params)
    size = total_size(state)
    assert size == (512 + 2048) + 6 * (32 + 16) + 7 + 1  # and the count


def test_adafactor_state_of_the_base_model_is_below_a_hundredth_of_its_parameters():
    model, ids = Transformer(TransformerConfig(source_vocab=37_000, target_vocab=37_000)), jnp.ones((1, 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), unpacked(ids, ids))
    state = jax.eval_shape(paper_optimizer().init, params)
    assert total_size(state) < 0.01 * total_size(params)


def total_size(tree) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
