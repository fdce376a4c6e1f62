"""Parts of the library inside other people's JAX code."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import transformer_jax as tj

X = jax.random.normal(jax.random.key(0), (2, 5, 8))
CONFIG = tj.TransformerConfig(
    encoder_layers=2, decoder_layers=1, width=8, heads=2, feed_forward=16, source_vocab=12, target_vocab=12
)


def test_parameters_can_be_mapped_over():
    """An ensemble: three sets of parameters, stacked, under one vmap."""
    encoder = tj.Encoder(CONFIG)
    ensemble = jax.jit(jax.vmap(lambda key: encoder.init(key, X)))(jax.random.split(jax.random.key(1), 3))
    together = jax.jit(jax.vmap(lambda params: encoder.apply(params, X)[0]))(ensemble)
    assert together.shape == (3, 2, 5, 8)
    second = jax.tree.map(lambda leaf: leaf[1], ensemble)
    np.testing.assert_allclose(together[1], encoder.apply(second, X)[0], atol=1e-5)


def test_another_optimizer_trains_an_encoder_by_plain_grad():
    encoder, optimizer = tj.Encoder(CONFIG), optax.lion(1e-2)
    params, target = jax.jit(encoder.init)(jax.random.key(1), X), jnp.roll(X, 1, axis=1)

    def loss(params):
        return ((encoder.apply(params, X)[0] - target) ** 2).mean()

    @jax.jit
    def update(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(20):
        params, state, value = update(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


def test_attention_inside_another_flax_module():
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = jnp.ones((1, 1, 1, x.shape[1]), bool)
            query = self.param("query", nn.initializers.normal(), (1, 1, 8))
            attention = tj.MultiHeadAttention(heads=2, width=8)
            return attention(jnp.broadcast_to(query, (x.shape[0], 1, 8)), x, mask).output[:, 0]

    module = Pooled()
    params = module.init(jax.random.key(0), X)
    assert module.apply(params, X).shape == (2, 8)
    assert set(params["params"]) == {"query", "MultiHeadAttention_0"}


def test_feed_forward_under_flax_scan():
    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + tj.FeedForward(width=8, hidden=16)(x), None

    deep = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()
    params = jax.jit(deep.init)(jax.random.key(0), X, None)
    assert params["params"]["FeedForward_0"]["hidden"]["kernel"].shape == (4, 8, 16)
    assert np.isfinite(deep.apply(params, X, None)[0]).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # nnx's own, of the versions that move its defaults
def test_a_transformer_through_the_bridge_to_nnx():
    batch = tj.unpacked(jnp.array([[5, 6, 1]]), jnp.array([[7, 1]]))
    bridged = nnx.bridge.ToNNX(tj.Transformer(CONFIG), rngs=nnx.Rngs(params=0)).lazy_init(batch)
    logits = bridged(batch)
    assert logits.shape == (1, 2, 128)
    params = nnx.state(bridged, nnx.Param)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 2000


def test_beam_search_over_any_step_function():
    """The search knows no model: here a fixed table of log-probabilities over 4 ids."""
    table = jnp.log(jnp.array([0.0, 0.3, 0.1, 0.6]))

    def step(token, parent, position, cache):
        return jnp.broadcast_to(table, (*token.shape, 4)), cache

    found = tj.beam_search(step, (), limits=jnp.array([3]), max_length=3, beam_size=3, top_beams=1)
    np.testing.assert_array_equal(found.tokens[0, 0], [1, 0, 0])
    assert float(found.log_probs[0, 0]) == pytest.approx(np.log(0.3), abs=1e-5)
