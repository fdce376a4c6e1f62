"""One update of the parameters, and one evaluation, as pure functions compiled once a batch shape."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from transformer_jax.batch import Batch
from transformer_jax.config import Nonfinite
from transformer_jax.errors import UserError
from transformer_jax.training.objective import Objective, Sums
from transformer_jax.training.optimizer import LearningRate


class TrainState(NamedTuple):
    """Everything that an update changes, and the key that all randomness of the run comes from."""

    step: jax.Array  # int32: how many steps were made, skipped ones included
    params: Any
    opt_state: Any
    average: Any  # moving average of the parameters, or None
    rng: jax.Array


class StepReport(NamedTuple):
    """What one update tells the log."""

    sums: Sums
    grad_norm: jax.Array  # of the mean loss, before clipping
    learning_rate: jax.Array


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepReport]]
EvalStep = Callable[[Any, Batch], Sums]


def init_state(params: Any, optimizer: optax.GradientTransformation, *, seed: int, ema: float) -> TrainState:
    """The state before the first update."""
    average = jax.tree.map(jnp.copy, params) if ema else None  # a copy: two leaves can't donate one buffer
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average, jax.random.key(seed))


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    learning_rate: LearningRate,
    accumulate: int = 1,
    ema: float = 0.0,
    nonfinite: Nonfinite = Nonfinite.STOP,
    shardings: TrainState | None = None,
) -> TrainStep:
    """A jitted pure `(state, batch) -> (state, report)`, which donates the state.

    The gradient is that of the summed loss over the summed weight, whether the rows of the batch are taken at once, in
    `accumulate` micro-batches or on several devices. `learning_rate` is only reported; `optimizer` has its own.
    `shardings` of the state are those it comes with and keeps.

    Where the loss or its gradient is not finite, `nonfinite` skip leaves the state as it was; only `step` and the
    learning rate, which follows it, go on.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        rng = jax.random.fold_in(state.rng, state.step)
        gradients, sums = _summed_gradients(objective, state.params, batch, rng, parts=accumulate)
        weight = jnp.where(sums.weight > 0, sums.weight, 1)  # a batch of padding only has gradient 0
        gradients = jax.tree.map(lambda g: g / weight, gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        average = moving_average(state.average, params, step=step, decay=ema) if ema else None
        report = StepReport(sums, optax.tree.norm(gradients), learning_rate(step))
        new = TrainState(step, params, opt_state, average, state.rng)
        if nonfinite == Nonfinite.SKIP:
            sound = jnp.isfinite(sums.loss) & jnp.isfinite(report.grad_norm)
            new = unless_skipped(sound, new, state)
        return new, report

    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def make_eval_step(objective: Objective) -> EvalStep:
    """A jitted `(params, batch) -> sums`, without dropout."""
    return jax.jit(lambda params, batch: objective(params, batch, None))


def unless_skipped(sound: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """The new state if the step was `sound`, else the old one at the new step."""

    def chosen(after: Any, before: Any) -> Any:
        if isinstance(after, optax.ScaleByScheduleState):
            return after  # its count is the step: the rate that is used stays the one that is reported
        return jnp.where(sound, after, before)

    kept = jax.tree.map(chosen, new, old, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))
    return kept._replace(step=new.step)


def moving_average(average: Any, params: Any, *, step: jax.Array, decay: float) -> Any:
    """decay · average + (1 - decay) · params, with a smaller decay early on.

    min(decay, (1 + s) / (10 + s)) as in TensorFlow's `ExponentialMovingAverage`: the random start is soon forgotten.
    """
    step = step.astype(jnp.float32)
    early = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, new: early * old + (1 - early) * new, average, params)


def _summed_gradients(objective: Objective, params, batch: Batch, rng: jax.Array, *, parts: int) -> tuple[Any, Sums]:
    """Gradient of the summed loss and the sums, one micro-batch after another."""

    def one(batch: Batch, rng: jax.Array) -> tuple[Any, Sums]:
        def loss(params):
            sums = objective(params, batch, rng)
            return sums.loss, sums

        return jax.grad(loss, has_aux=True)(params)

    if parts == 1:
        return one(batch, rng)

    def add(total, micro_batch):
        index, micro_batch = micro_batch
        return jax.tree.map(jnp.add, total, one(micro_batch, jax.random.fold_in(rng, index))), None

    micro_batches = split_rows(batch, parts)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, batch, rng))
    total, _ = jax.lax.scan(add, zero, (jnp.arange(parts), micro_batches))
    return total


def split_rows(batch: Batch, parts: int) -> Batch:
    """Every array [B, …] as [parts, B / parts, …].

    Row r goes to part r mod `parts`, so that each device, which holds neighbouring rows, has its share of every part
    and no row moves.

    Raises:
      UserError: when the rows can't be split evenly.
    """
    rows = batch.target.shape[0]
    if rows % parts:
        raise UserError(
            f"optimizer.accumulate is {parts}, but a batch has {rows} rows, which {parts} does not divide. "
            f"Set data.plan.rows_multiple to a multiple of {parts} × the number of devices."
        )
    return jax.tree.map(lambda x: jnp.reshape(x, (rows // parts, parts, *x.shape[1:])).swapaxes(0, 1), batch)
