import jax.numpy as jnp
import numpy as np

from transformer_jax.nn.masks import ancestry_mask, attention_mask, causal_mask


def test_tokens_see_their_own_segment_only_and_never_padding():
    query, key = jnp.array([[1, 1, 2, 0]]), jnp.array([[1, 2, 2, 0]])
    expected = [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(attention_mask(query, key)[0, 0], np.array(expected, bool))


def test_causal_mask_is_the_lower_triangle():
    np.testing.assert_array_equal(causal_mask(3)[0, 0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_a_hypothesis_sees_its_ancestors_keys_as_far_as_they_are_written():
    ancestry = jnp.array([[[0, 1, 0], [1, 1, 1]]] * 2)  # beam 0 descends from 0, then 1; beam 1 from 1, then 1
    mask = ancestry_mask(ancestry, jnp.array([1, 0])).reshape(2, 2, 3, 2)  # [B, K, T, K]
    np.testing.assert_array_equal(mask[0, 0], [[1, 0], [0, 1], [0, 0]])
    np.testing.assert_array_equal(mask[0, 1], [[0, 1], [0, 1], [0, 0]])
    np.testing.assert_array_equal(mask[1, 0], [[1, 0], [0, 0], [0, 0]])
