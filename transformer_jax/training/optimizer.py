"""Learning-rate schedules and optimizers. All arithmetic on gradients is optax's, but for Adafactor's factors.

Every schedule counts updates from s = 1: the first update already has a rate above 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from transformer_jax.config import OptimizerConfig, OptimizerKind, Schedule
from transformer_jax.training.adafactor import adafactor

LearningRate = Callable[[ArrayLike], jax.Array]
"""The rate of the update s = 1, 2, …"""


def noam(s, *, peak: float, warmup: int, width: int) -> jax.Array:
    """The paper's equation 3: D^-0.5 · min(s^-0.5, s · w^-1.5), times `peak`. Highest at s = w."""
    return peak * width**-0.5 * jnp.minimum(s**-0.5, s * warmup**-1.5)


def t2t_rsqrt(s, *, peak: float, warmup: int, width: int) -> jax.Array:
    """Tensor2Tensor's `transformer_base` v3: min(1, s/w) · max(s, w)^-0.5 · D^-0.5, times `peak`."""
    return peak * width**-0.5 * jnp.minimum(1.0, s / warmup) * jnp.maximum(s, warmup) ** -0.5


def inverse_sqrt(s, *, peak: float, warmup: int) -> jax.Array:
    """fairseq's: linear to `peak` at s = w, then peak · √(w/s)."""
    return peak * jnp.minimum(s / warmup, (warmup / s) ** 0.5)


def cosine(s, *, peak: float, warmup: int, steps: int, floor: float) -> jax.Array:
    """Linear to `peak` at s = w, then half a cosine down to `floor` · peak at s = `steps`, where it stays."""
    progress = jnp.clip((s - warmup) / max(steps - warmup, 1), 0.0, 1.0)
    decay = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return peak * jnp.minimum(s / warmup, decay)


def constant(s, *, peak: float, warmup: int) -> jax.Array:
    """Linear to `peak` at s = w, where it stays."""
    return peak * jnp.minimum(1.0, s / warmup)


def relative_step(s, *, peak: float) -> jax.Array:
    """Adafactor's (Shazeer and Stern, 2018, section 9): min(10^-2, 1/√s), times `peak`."""
    return peak * jnp.minimum(1e-2, s**-0.5)


def make_schedule(config: OptimizerConfig, *, width: int, steps: int) -> LearningRate:
    """The rate of update s = 1, 2, … of a run of `steps` updates of a model of `width` D; float32."""
    peak, warmup = config.peak, max(config.warmup, 1)
    formulas: dict[Schedule, LearningRate] = {
        Schedule.NOAM: lambda s: noam(s, peak=peak, warmup=warmup, width=width),
        Schedule.T2T_RSQRT: lambda s: t2t_rsqrt(s, peak=peak, warmup=warmup, width=width),
        Schedule.INVERSE_SQRT: lambda s: inverse_sqrt(s, peak=peak, warmup=warmup),
        Schedule.COSINE: lambda s: cosine(s, peak=peak, warmup=warmup, steps=steps, floor=config.floor),
        Schedule.CONSTANT: lambda s: constant(s, peak=peak, warmup=warmup),
        Schedule.ADAFACTOR: lambda s: relative_step(s, peak=peak),
    }
    formula = formulas[config.schedule]
    return lambda s: formula(jnp.asarray(s, jnp.float32))


def make_optimizer(config: OptimizerConfig, *, width: int, steps: int) -> optax.GradientTransformation:
    """Clipping, then Adam, AdamW or Adafactor at the rate of `make_schedule`."""
    schedule = make_schedule(config, width=width, steps=steps)
    clip = optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip)
    # optax counts updates from 0.
    return optax.chain(
        clip, _update_rule(config), optax.scale_by_learning_rate(lambda count: schedule(jnp.asarray(count) + 1))
    )


def _update_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    match config.kind:
        case OptimizerKind.ADAM:
            return adam
        case OptimizerKind.ADAMW:
            return optax.chain(adam, optax.add_decayed_weights(config.weight_decay, mask=matrices))
        case OptimizerKind.ADAFACTOR:
            return adafactor()


def matrices(params: optax.Params) -> optax.Params:
    """True for the parameters which weight decay shrinks: matrices, not biases and norms."""
    return jax.tree.map(lambda param: param.ndim > 1, params)
