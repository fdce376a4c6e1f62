import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import SinusoidLayout
from transformer_jax.nn.positions import clipped_distances, rotate, sinusoids


def test_sinusoids_follow_the_formula_of_the_paper():
    width, found = 8, sinusoids(jnp.arange(50), 8)
    for position in (0, 1, 7, 49):
        for i in range(width // 2):
            angle = position / 10_000 ** (2 * i / width)
            np.testing.assert_allclose(found[position, 2 * i], np.sin(angle), atol=1e-5)
            np.testing.assert_allclose(found[position, 2 * i + 1], np.cos(angle), atol=1e-5)


def test_the_concatenated_layout_is_the_interleaved_one_with_its_channels_permuted():
    interleaved = sinusoids(jnp.arange(9), 6)
    concatenated = sinusoids(jnp.arange(9), 6, SinusoidLayout.CONCATENATED)
    np.testing.assert_array_equal(concatenated, interleaved[:, jnp.array([0, 2, 4, 1, 3, 5])])


def test_the_t2t_layout_ends_at_a_wavelength_of_ten_thousand():
    found = sinusoids(jnp.arange(9), 6, SinusoidLayout.T2T)
    rates = 10_000.0 ** (-np.arange(3) / 2)
    np.testing.assert_allclose(
        found, np.concatenate([f(np.arange(9)[:, None] * rates) for f in (np.sin, np.cos)], 1), atol=1e-6
    )


def test_sinusoids_have_no_last_position():
    far = sinusoids(jnp.array([1_000_000]), 4)
    assert np.isfinite(far).all()
    assert abs(float(far[0, 0]) - np.sin(1_000_000)) < 0.1


def test_odd_widths_are_refused():
    with pytest.raises(ValueError, match="even width, not 5"):
        sinusoids(jnp.arange(3), 5)


def test_products_of_rotated_vectors_depend_on_their_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(i: int, j: int) -> float:
        return float((rotate(query, jnp.array([[i]])) * rotate(key, jnp.array([[j]]))).sum())

    assert product(3, 5) == pytest.approx(product(10, 12), abs=1e-5)
    assert product(3, 5) != pytest.approx(product(3, 6), abs=1e-3)


def test_rotation_keeps_lengths_and_turns_nothing_at_position_0():
    x = jax.random.normal(jax.random.key(1), (2, 3, 2, 8))
    positions = jnp.array([[0, 5, 9], [0, 1, 2]])
    np.testing.assert_allclose(jnp.linalg.norm(rotate(x, positions), axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(rotate(x, positions)[:, 0], x[:, 0], atol=1e-6)


def test_distances_are_clipped_on_both_sides():
    found = clipped_distances(jnp.arange(4), jnp.arange(6), 2).argmax(-1) - 2
    np.testing.assert_array_equal(found, np.clip(np.arange(6)[None] - np.arange(4)[:, None], -2, 2))


def test_rows_may_have_distances_of_their_own():
    queries, keys = jnp.array([[0, 3], [5, 1]]), jnp.broadcast_to(jnp.arange(6), (2, 6))
    found = clipped_distances(queries, keys, 2)
    for row in range(2):
        np.testing.assert_array_equal(found[row], clipped_distances(queries[row], keys[row], 2))
