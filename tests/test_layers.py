import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import Activation, Norm, NormPlace, TransformerConfig
from transformer_jax.nn.layers import EncoderLayer, FeedForward, Residual, normalization
from transformer_jax.nn.stacks import Encoder


def x_of(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape)


def test_feed_forward_is_equation_2():
    layer, x = FeedForward(width=4, hidden=6), x_of(1, 3, 4)
    params = layer.init(jax.random.key(1), x)["params"]
    hidden, output = params["hidden"], params["output"]
    expected = (
        np.maximum(0, x @ hidden["kernel"] + hidden["bias"][None, None]) @ output["kernel"] + output["bias"][None, None]
    )
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("activation", Activation)
def test_a_gated_feed_forward_multiplies_by_a_second_projection(activation):
    layer, x = FeedForward(width=4, hidden=6, activation=activation, gated=True), x_of(1, 3, 4)
    params = layer.init(jax.random.key(1), x)["params"]
    act = {
        "relu": jax.nn.relu,
        "gelu": lambda x: x * (1 + jax.lax.erf(x / np.float32(np.sqrt(2)))) / 2,
        "gelu_tanh": lambda x: x * (1 + jnp.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3))) / 2,
        "swish": lambda x: x / (1 + jnp.exp(-x)),
    }[activation]
    expected = (act(x @ params["hidden"]["kernel"]) * (x @ params["gate"]["kernel"])) @ params["output"]["kernel"]
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-6)


def test_post_norm_normalises_the_sum_and_pre_norm_the_input():
    x, y = x_of(1, 3, 8), x_of(2, 3, 8)[1:]

    def normal(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    post, pre = (Residual(Norm.LAYER, place, dropout=0.0) for place in (NormPlace.POST, NormPlace.PRE))
    params = post.init(jax.random.key(0), x, y, method="leave")
    np.testing.assert_array_equal(post.apply(params, x, method="enter"), x)
    np.testing.assert_allclose(post.apply(params, x, y, method="leave"), normal(x + y), atol=1e-5)
    np.testing.assert_allclose(pre.apply(params, x, method="enter"), normal(x), atol=1e-5)
    np.testing.assert_array_equal(pre.apply(params, x, y, method="leave"), x + y)


def test_the_epsilon_of_a_norm_is_the_configs():
    config = TransformerConfig(encoder_layers=1, width=8, heads=2, feed_forward=8, norm_epsilon=1e6)
    for place in NormPlace:  # everything is divided by about 1000
        encoder = Encoder(dataclasses.replace(config, norm_place=place))
        params = encoder.init(jax.random.key(0), x_of(1, 3, 8))
        assert np.abs(encoder.apply(params, x_of(1, 3, 8))[0]).max() < 0.01


def test_rms_norm_does_not_centre():
    x = x_of(1, 2, 8) + 3
    norm = normalization(Norm.RMS)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(norm.apply(norm.init(jax.random.key(0), x), x), expected, atol=1e-5)


def test_pre_norm_stacks_end_in_a_norm_and_post_norm_ones_add_none():
    config = TransformerConfig(encoder_layers=1, width=8, heads=2, feed_forward=8)
    for place in NormPlace:
        encoder = Encoder(dataclasses.replace(config, norm_place=place))
        params = encoder.init(jax.random.key(0), x_of(1, 3, 8))["params"]
        assert ("final_norm" in params) == (place == NormPlace.PRE)


def test_layers_share_structure_but_not_weights():
    encoder = Encoder(TransformerConfig(encoder_layers=3, width=8, heads=2, feed_forward=8))
    params = encoder.init(jax.random.key(0), x_of(1, 3, 8))["params"]
    assert set(params) == {"layers_0", "layers_1", "layers_2"}
    kernels = [params[name]["self_attention"]["query"]["kernel"] for name in sorted(params)]
    assert not np.allclose(kernels[0], kernels[1])


def test_a_layer_works_alone():
    layer = EncoderLayer(TransformerConfig(width=8, heads=2, feed_forward=8))
    x, mask = x_of(2, 3, 8), jnp.ones((1, 1, 3, 3), bool)
    output, weights = layer.apply(layer.init(jax.random.key(0), x, mask), x, mask, return_weights=True)
    assert output.shape == (2, 3, 8)
    assert weights.shape == (2, 2, 3, 3)
