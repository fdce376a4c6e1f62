import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.nn.attention import MultiHeadAttention, Relative, attention_weights, weighted_values
from transformer_jax.nn.positions import clipped_distances

B, T, S, N, H = 2, 5, 7, 3, 4


@pytest.fixture
def projected():
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (B, T, N, H)),
        jax.random.normal(keys[1], (B, S, N, H)),
        jax.random.normal(keys[2], (B, S, N, H)),
    )


@pytest.fixture
def mask():
    return jax.random.bernoulli(jax.random.key(1), 0.6, (B, 1, T, S)).at[..., 0].set(True)


def naive(query, key, value, mask, a_keys=None, a_values=None, limit=0):
    """Attention by loops, float64: equations 1–5 of Shaw et al.; without tables, equation 1 of the paper."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, t, n in np.ndindex(query.shape[:3]):
        scores, values = [], []
        for s in range(key.shape[1]):
            r = int(np.clip(s - t, -limit, limit)) + limit
            k = key[b, s, n] + (0 if a_keys is None else np.asarray(a_keys)[r])
            values.append(value[b, s, n] + (0 if a_values is None else np.asarray(a_values)[r]))
            scores.append(query[b, t, n] @ k / np.sqrt(query.shape[-1]) if mask[b, 0, t, s] else -np.inf)
        weights = np.exp(scores - np.max(scores))
        output[b, t, n] = (weights / weights.sum()) @ np.array(values)
    return output


def test_attention_is_the_papers_formula(projected, mask):
    query, key, value = projected
    found = weighted_values(attention_weights(query, key, mask), value)
    np.testing.assert_allclose(found, naive(query, key, value, mask), atol=1e-5)


def test_it_agrees_with_the_kernel_of_jax(projected, mask):
    query, key, value = projected
    found = weighted_values(attention_weights(query, key, mask), value)
    np.testing.assert_allclose(found, jax.nn.dot_product_attention(query, key, value, mask=mask), atol=1e-5)


@pytest.mark.parametrize("limit", [1, 3, 20])
def test_relative_positions_are_those_of_shaw(projected, mask, limit):
    query, key, value = projected
    a_keys, a_values = jax.random.normal(jax.random.key(2), (2, 2 * limit + 1, H))
    relative = Relative(a_keys, a_values, clipped_distances(jnp.arange(T), jnp.arange(S), limit))
    found = weighted_values(attention_weights(query, key, mask, relative), value, relative)
    np.testing.assert_allclose(found, naive(query, key, value, mask, a_keys, a_values, limit), atol=1e-5)


def test_relative_positions_make_no_tensor_with_both_lengths_and_channels():
    """Nothing as large as B · N · T · S · H appears in the program."""
    b, t, n, h, limit = 4, 32, 2, 16, 4
    x = jnp.zeros((b, t, n, h))
    relative = Relative(*jnp.zeros((2, 2 * limit + 1, h)), clipped_distances(jnp.arange(t), jnp.arange(t), limit))

    def loss(x):
        weights = attention_weights(x, x, jnp.ones((1, 1, t, t), bool), relative)
        return weighted_values(weights, x, relative).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    largest = max(var.aval.size for equation in jaxpr.jaxpr.eqns for var in equation.outvars)
    assert largest < b * t * t * h


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_row_that_may_see_nothing_is_finite(projected, dtype):
    query, key, value = (x.astype(dtype) for x in projected)
    nothing = jnp.zeros((B, 1, T, S), bool)
    found = weighted_values(attention_weights(query, key, nothing), value)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.astype(jnp.float32), np.broadcast_to(value.astype(jnp.float32).mean(1)[:, None], found.shape), atol=2e-2
    )
    gradient = jax.grad(lambda q: weighted_values(attention_weights(q, key, nothing), value).astype(jnp.float32).sum())(
        query
    )
    assert np.isfinite(gradient.astype(jnp.float32)).all()


def test_scaling_keeps_the_variance_of_scores_at_1():
    """Section 3.2.1, footnote 4: q · k of unit-variance vectors has variance H."""
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 400, 1, 64))
    weights = attention_weights(query, key, jnp.ones((1, 1, 1, 400), bool))[0, 0]
    scores = jnp.log(weights) - jnp.log(weights).mean(axis=-1, keepdims=True)
    assert 0.9 < float(scores.var()) < 1.1


def test_weights_are_a_distribution_over_the_visible_keys(projected, mask):
    weights = attention_weights(projected[0], projected[1], mask)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not np.asarray(weights)[~np.broadcast_to(mask, weights.shape)].any()


@pytest.mark.parametrize("options", [{}, {"relative_distance": 2}, {"rotary": True}, {"bias": True}])
def test_asking_for_the_weights_does_not_change_the_output(options):
    attention = MultiHeadAttention(heads=2, width=8, **options)
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    mask = jnp.tril(jnp.ones((6, 6), bool))[None, None]
    params = attention.init(jax.random.key(1), x, x, mask)
    plain = attention.apply(params, x, x, mask)
    with_weights = attention.apply(params, x, x, mask, return_weights=True)
    assert plain.weights is None
    assert with_weights.weights.shape == (2, 2, 6, 6)
    np.testing.assert_allclose(with_weights.output, plain.output, atol=1e-5)


def test_heads_are_independent_slices_of_the_projections():
    """Concat(head_1, head_2) W^O: two heads equal the sum of two one-head attentions with half the kernels."""
    x = jax.random.normal(jax.random.key(0), (1, 4, 8))
    mask = jnp.ones((1, 1, 4, 4), bool)
    both = MultiHeadAttention(heads=2, width=8)
    params = both.init(jax.random.key(1), x, x, mask)["params"]
    one = MultiHeadAttention(heads=1, width=8, key_width=4, value_width=4)

    def head(index: int) -> jax.Array:
        columns = slice(4 * index, 4 * index + 4)
        part = {name: {"kernel": params[name]["kernel"][:, columns]} for name in ("query", "key", "value")}
        part["output"] = {"kernel": params["output"]["kernel"][columns]}
        return one.apply({"params": part}, x, x, mask).output

    np.testing.assert_allclose(both.apply({"params": params}, x, x, mask).output, head(0) + head(1), atol=1e-5)
