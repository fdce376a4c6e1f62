import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.nn.dropout import dropout


def test_without_a_key_or_a_rate_nothing_happens():
    x = jax.random.normal(jax.random.key(0), (3, 5))
    np.testing.assert_array_equal(dropout(x, 0.5, None), x)
    np.testing.assert_array_equal(dropout(x, 0.0, jax.random.key(1)), x)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
def test_elements_are_zeroed_at_the_rate_and_the_others_scaled(rate):
    dropped = np.asarray(dropout(jnp.ones((500, 401)), rate, jax.random.key(0)))  # an odd last axis too
    kept = dropped != 0
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / dropped.size)
    np.testing.assert_allclose(dropped[kept], 1 / (1 - rate), rtol=1e-6)


def test_neighbours_are_dropped_independently():
    """Two elements share a random word: their fates must not be linked."""
    kept = np.asarray(dropout(jnp.ones((2000, 64)), 0.5, jax.random.key(3))) != 0
    correlation = np.corrcoef(kept[:, 0::2].ravel(), kept[:, 1::2].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(kept.size / 2)
