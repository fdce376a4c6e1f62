"""The functions of a run — model, objective, optimizer, steps — made once from its config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, OptimizerKind, with_vocabularies
from transformer_jax.config_check import check_divides
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.nn.stacks import stack_layers, unstack_layers
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parallel import make_mesh, on_mesh, shardings
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
        shapes = jax.eval_shape(self.init)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            shardings(shapes, self.mesh),
        )


def make_learner(config: Config, tokenizer: Tokenizer) -> Learner:
    """The learner of a config.

    Raises:
      UserError: for a model that the config and the tokenizer don't allow, and for a mesh that the devices or the
        model don't.
    """
    model_config = with_vocabularies(config.model, source=tokenizer.source_vocab, target=tokenizer.target_vocab)
    model, mesh = Transformer(model_config), make_mesh(config.mesh)
    check_divides(model_config, mesh.shape)
    shape = {"width": config.model.width, "steps": config.run.steps}
    optimizer = make_optimizer(config.optimizer, **shape)
    if config.model.scan and config.optimizer.kind != OptimizerKind.ADAM:  # Adam takes each number alone
        optimizer = over_layers(optimizer)
    objective = on_mesh(make_objective(model, label_smoothing=config.optimizer.label_smoothing), mesh)

    def init() -> TrainState:
        tokens = jnp.ones((1, 1), jnp.int32)
        params = model.init(jax.random.key(config.run.seed), unpacked(tokens, tokens))
        return init_state(params, optimizer, seed=config.run.seed, ema=config.optimizer.ema)

    lie = shardings(jax.eval_shape(init), mesh)
    return Learner(
        config=config,
        tokenizer=tokenizer,
        model=model,
        mesh=mesh,
        init=jax.jit(init, out_shardings=lie),
        train_step=make_train_step(
            objective,
            optimizer,
            learning_rate=make_schedule(config.optimizer, **shape),
            accumulate=config.optimizer.accumulate,
            ema=config.optimizer.ema,
            nonfinite=config.optimizer.nonfinite,
            shardings=lie,
        ),
        eval_step=make_eval_step(objective),
    )


def over_layers(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer over each layer's own parameters where `scan` stacks them, so that it does as without `scan`.

    It would take a stack of biases for a matrix, and all layers for one.
    """

    def unstacked(tree: Any) -> Any:
        return {**tree, "params": unstack_layers(tree["params"])}

    def init(params: Any) -> Any:
        return optimizer.init(unstacked(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(unstacked(updates), state, unstacked(params))
        return {**updates, "params": stack_layers(updates["params"])}, state

    return optax.GradientTransformation(init, update)


def evaluated_params(state: TrainState) -> Any:
    """The parameters that evaluation uses: the moving average where there is one."""
    return state.params if state.average is None else state.average


def size(params: Any) -> int:
    """How many numbers there are."""
    return sum(x.size for x in jax.tree.leaves(params))
