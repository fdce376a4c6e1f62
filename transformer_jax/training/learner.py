"""The functions of a run — model, objective, optimizer, steps — made once from its config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, TransformerConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parallel import make_mesh, replicated
from transformer_jax.training.objective import make_objective
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import EvalStep, TrainState, TrainStep, init_state, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Learner:
    config: Config
    tokenizer: Tokenizer
    model: Transformer
    mesh: Mesh
    init: Callable[[], TrainState]
    train_step: TrainStep
    eval_step: EvalStep

    @property
    def template(self) -> TrainState:
        """Shapes, dtypes and shardings of the state, without its numbers."""
        sharding = replicated(self.mesh)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), jax.eval_shape(self.init)
        )


def make_learner(config: Config, tokenizer: Tokenizer) -> Learner:
    """The learner of a config.

    Raises:
      UserError: for a model that the config and the tokenizer don't allow, and for a mesh of too many devices.
    """
    model, mesh = Transformer(model_config(config.model, tokenizer)), make_mesh(config.mesh)
    shape = {"width": config.model.width, "steps": config.run.steps}
    optimizer = make_optimizer(config.optimizer, **shape)
    objective = make_objective(model, label_smoothing=config.optimizer.label_smoothing)

    def init() -> TrainState:
        tokens = jnp.ones((1, 1), jnp.int32)
        params = model.init(jax.random.key(config.run.seed), unpacked(tokens, tokens))
        return init_state(params, optimizer, seed=config.run.seed, ema=config.optimizer.ema)

    return Learner(
        config=config,
        tokenizer=tokenizer,
        model=model,
        mesh=mesh,
        init=jax.jit(init, out_shardings=replicated(mesh)),
        train_step=make_train_step(
            objective,
            optimizer,
            learning_rate=make_schedule(config.optimizer, **shape),
            accumulate=config.optimizer.accumulate,
            ema=config.optimizer.ema,
        ),
        eval_step=make_eval_step(objective),
    )


def model_config(config: TransformerConfig, tokenizer: Tokenizer) -> TransformerConfig:
    """The config with the vocabularies of the tokenizer.

    Raises:
      UserError: if it names others.
    """
    sizes = {"source_vocab": tokenizer.source_vocab, "target_vocab": tokenizer.target_vocab}
    for name, size in sizes.items():
        if getattr(config, name) not in (None, size):
            raise UserError(
                f"config.model.{name} is {getattr(config, name)}, but the tokenizer has {size} pieces. Leave it unset."
            )
    return dataclasses.replace(config, **sizes)


def evaluated_params(state: TrainState) -> Any:
    """The parameters that evaluation uses: the moving average where there is one."""
    return state.params if state.average is None else state.average


def size(params: Any) -> int:
    """How many numbers there are."""
    return sum(x.size for x in jax.tree.leaves(params))
