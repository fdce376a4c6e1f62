"""Search against brute force, over a model in which every prefix has next-token probabilities of its own."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_model import (
    PrefixTree,
    assert_same,
    brute_force,
    child,
    divisor,
    full_beam,
    n_best,
    patient_beam,
    random_tables,
    tree_step,
)

from transformer_jax.batch import EOS, PAD
from transformer_jax.config import Beam, LengthPenalty
from transformer_jax.decoding.candidates import top_k
from transformer_jax.decoding.search import beam_search, greedy, length_penalty

PENALTIES = [(LengthPenalty.GNMT, 0.6), (LengthPenalty.GNMT, -1.0), (LengthPenalty.POWER, 1.0)]
PENALTIES += [(LengthPenalty.POWER, -2.0), (LengthPenalty.POWER, 0.0), (LengthPenalty.NONE, 0.6)]


@functools.partial(jax.jit, static_argnames=("max_length", "beam_size", "top_beams", "penalty", "beam"))
def jitted_search(tables, limits, *, beam_size, **options):
    cache = PrefixTree(tables, jnp.zeros((len(tables), beam_size), jnp.int32))
    return beam_search(tree_step, cache, limits=limits, beam_size=beam_size, **options)


def search(tables, limits, *, max_length=5, **options):
    hypotheses = jitted_search(jnp.asarray(tables), jnp.asarray(limits, jnp.int32), max_length=max_length, **options)
    return jax.device_get(hypotheses)


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_a_wide_beam_finds_what_brute_force_finds(penalty, alpha):
    tables = random_tables(0, batch=60, vocab=4, depth=3)
    limits = [1 + row % 3 for row in range(60)]
    widest = 1 + 2 + 4 + 8  # every sequence of up to 3 tokens has a slot
    hypotheses = search(tables, limits, max_length=3, beam_size=widest, top_beams=3, penalty=penalty, alpha=alpha)
    for row, limit in enumerate(limits):
        assert_same(n_best(hypotheses, row), brute_force(tables[row], limit, penalty, alpha)[:3])


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_stopping_early_never_changes_the_n_best_list_of_any_size(penalty, alpha):
    tables = random_tables(1, batch=64, vocab=5, depth=5)
    expected = [patient_beam(table, 5, 3, penalty, alpha) for table in tables]
    for top_beams in (1, 2, 3):
        hypotheses = search(tables, [5] * 64, beam_size=3, top_beams=top_beams, penalty=penalty, alpha=alpha)
        for row in range(64):
            assert_same(n_best(hypotheses, row), expected[row][:top_beams])


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [2, 3])
@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_a_full_beam_follows_as_many_hypotheses_whatever_has_ended(penalty, alpha, beam_size):
    tables = random_tables(3, batch=60, vocab=5, depth=5)
    limits = [1 + row % 5 for row in range(60)]
    options = {"beam_size": beam_size, "penalty": penalty, "alpha": alpha, "beam": Beam.FULL}
    for top_beams in (1, 2):
        hypotheses = search(tables, limits, top_beams=top_beams, **options)
        for row in range(60):
            expected = full_beam(tables[row], limits[row], beam_size, penalty, alpha)
            assert_same(n_best(hypotheses, row), expected[:top_beams])
    shrinking = search(tables, limits, **(options | {"beam": Beam.SHRINKING}))
    assert (np.asarray(hypotheses.scores[:, 0]) != np.asarray(shrinking.scores[:, 0])).any()


def test_a_full_beam_of_one_is_greedy_search_all_the_same():
    tables = random_tables(4, batch=60, vocab=5, depth=5)
    one, other = (search(tables, [5] * 60, beam_size=1, beam=beam) for beam in Beam)
    np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_longer_hypothesis_wins_over_the_first_one_that_ends():
    table = np.full((1, 31, 5), -20.0, np.float32)
    table[0, 0, [EOS, 2]] = -0.9, -1.0
    table[0, child(0, 2, 5), 3] = 0.0
    table[0, child(child(0, 2, 5), 3, 5), EOS] = 0.0
    (best,) = n_best(search(table, [5], beam_size=2, penalty=LengthPenalty.POWER, alpha=1.0), 0)
    assert best.tokens == (2, 3, EOS)


def test_search_stops_when_the_bound_proves_the_n_best_list():
    """Confident in EOS at the first step: the second step can't come, unless the list still wants a second one."""
    table = np.full((1, 31, 5), np.log(0.01 / 3), np.float32)
    table[0, :, EOS] = np.log(0.99)
    positions = []

    def counting_step(token, parent, position, cache):
        positions.append(int(position[0]))
        return tree_step(token, parent, position, cache)

    def steps_taken(top_beams):
        positions.clear()
        cache = PrefixTree(jnp.asarray(table), jnp.zeros((1, 2), jnp.int32))
        beam_search(counting_step, cache, limits=jnp.array([30]), max_length=30, beam_size=2, top_beams=top_beams)
        return len(positions)

    with jax.disable_jit():
        assert steps_taken(top_beams=1) == 1
        assert steps_taken(top_beams=2) == 2


def test_beams_wider_than_the_vocabulary_find_what_brute_force_finds():
    """V = 5 with a beam of 8, and of 13, which holds every sequence of up to two tokens."""
    tables = random_tables(2, batch=50, vocab=5, depth=2)
    for limit, beam_size in ((1, 8), (2, 13)):
        hypotheses = search(tables, [limit] * 50, beam_size=beam_size, top_beams=beam_size)
        for row in range(50):
            assert_same(n_best(hypotheses, row), brute_force(tables[row], limit, LengthPenalty.GNMT, 0.6))


def test_a_beam_of_one_is_greedy_to_the_token():
    tables = random_tables(3, batch=64, vocab=5, depth=5)
    beam = search(tables, [5] * 64, beam_size=1)
    cache = PrefixTree(jnp.asarray(tables), jnp.zeros((64, 1), jnp.int32))
    argmax = greedy(tree_step, cache, limits=jnp.full(64, 5), max_length=5)
    np.testing.assert_array_equal(argmax.tokens, beam.tokens)
    np.testing.assert_allclose(argmax.scores, beam.log_probs)
    for row, table in enumerate(tables):
        tokens, node = [], 0
        while len(tokens) < 5 and EOS not in tokens:
            tokens.append(1 + int(table[node, 1:].argmax()))
            node = child(node, tokens[-1], 5)
        assert n_best(beam, row)[0].tokens == tuple(tokens)


def test_a_sentence_has_the_same_n_best_list_in_any_batch_order_and_company():
    tables = random_tables(4, batch=64, vocab=5, depth=5)
    limits = np.arange(64) % 5 + 1
    options = dict(beam_size=3, top_beams=3)
    whole = search(tables, limits, **options)
    order = np.random.default_rng(0).permutation(64)
    shuffled = search(tables[order], limits[order], **options)
    for row in range(64):
        assert_same(n_best(shuffled, list(order).index(row)), n_best(whole, row))
    for size in (1, 7):
        for first in range(0, 21, size):
            part = search(tables[first : first + size], limits[first : first + size], **options)
            for row in range(size):
                assert_same(n_best(part, row), n_best(whole, first + row))


def test_the_room_for_longer_outputs_changes_nothing():
    tables = random_tables(5, batch=7, vocab=5, depth=5)
    tight = search(tables, [5] * 7, beam_size=3, top_beams=3)
    roomy = search(tables, [5] * 7, beam_size=3, top_beams=3, max_length=9)
    for row in range(7):
        assert_same(n_best(roomy, row), n_best(tight, row))


@pytest.mark.parametrize(("penalty", "alpha"), PENALTIES)
def test_scores_are_log_probabilities_over_the_penalty_of_the_length(penalty, alpha):
    tables = random_tables(6, batch=64, vocab=5, depth=5)
    hypotheses = search(tables, [5] * 64, beam_size=3, top_beams=3, penalty=penalty, alpha=alpha)
    seen = set()
    for row in range(64):
        for one in n_best(hypotheses, row):
            nodes = itertools.accumulate(one.tokens[:-1], lambda node, token: child(node, token, 5), initial=0)
            log_prob = sum(float(tables[row, node, token]) for node, token in zip(nodes, one.tokens, strict=True))
            assert one.log_prob == pytest.approx(log_prob, abs=1e-5)
            expected = log_prob / divisor(len(one.tokens), penalty, alpha)
            assert one.score == pytest.approx(expected, rel=1e-5, abs=1e-5)
            seen.add(one.finished)
    assert seen == {True, False}


def test_hypotheses_are_distinct_and_end_once_with_only_pads_behind():
    tables = random_tables(7, batch=64, vocab=5, depth=5)
    hypotheses = search(tables, [5] * 64, beam_size=3, top_beams=3)
    for row in range(64):
        found = n_best(hypotheses, row)
        assert len({one.tokens for one in found}) == len(found)
        for one, tokens in zip(found, hypotheses.tokens[row], strict=False):
            assert one.finished == (EOS in one.tokens)
            assert EOS not in one.tokens[:-1]
            assert PAD not in one.tokens
            assert not tokens[len(one.tokens) :].any()


def test_pad_is_never_generated_even_where_it_is_most_probable():
    tables = random_tables(8, batch=64, vocab=5, depth=5)
    tables[:, :, PAD] = 0.0
    hypotheses = search(tables, [5] * 64, beam_size=3, top_beams=3)
    for row in range(64):
        assert all(PAD not in one.tokens for one in n_best(hypotheses, row))


def test_unfinished_hypotheses_fill_the_list_after_finished_ones_and_are_marked():
    table = np.full((1, 31, 5), np.log(0.33), np.float32)
    table[0, :, EOS] = np.log(0.01)
    table[0, 0, EOS] = np.log(0.34)
    found = n_best(search(table, [2], beam_size=3, top_beams=3), 0)
    assert [one.finished for one in found] == [True, False, False]
    assert [len(one.tokens) for one in found] == [1, 2, 2]


def test_entries_that_do_not_exist_have_length_zero_and_no_score():
    table = np.full((2, 31, 5), -1e30, np.float32)  # a finite mask is a mask
    table[:, :, EOS] = 0.0
    hypotheses = search(table, [3, 0], beam_size=4, top_beams=4)
    assert hypotheses.lengths.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert hypotheses.finished.tolist() == [[True, False, False, False], [False] * 4]
    missing = hypotheses.lengths == 0
    assert (hypotheses.scores[missing] == -np.inf).all()
    assert not hypotheses.tokens[missing].any()


@pytest.mark.parametrize("alpha", [-1.0, 0.6])
def test_missing_entries_have_no_nan_under_any_penalty(alpha):
    tables = random_tables(9, batch=2, vocab=5, depth=2)
    hypotheses = search(tables, [1, 0], beam_size=8, top_beams=8, penalty=LengthPenalty.POWER, alpha=alpha)
    assert not np.isnan(hypotheses.scores).any()


def test_nan_in_one_sentence_does_not_touch_its_neighbours():
    tables = random_tables(10, batch=7, vocab=5, depth=5)
    broken = tables.copy()
    broken[1, 1:] = np.nan
    whole = search(tables, [5] * 7, beam_size=3, top_beams=3)
    beside = search(broken, [5] * 7, beam_size=3, top_beams=3)
    for row in (0, 2, 3, 4, 5, 6):
        assert_same(n_best(beside, row), n_best(whole, row))
    assert all(np.isfinite(one.score) for one in n_best(beside, 1))


def test_sums_are_float32_whatever_the_step_returns():
    tables = random_tables(11, batch=7, vocab=5, depth=5).astype(jnp.bfloat16)
    hypotheses = search(tables, [5] * 7, beam_size=3, top_beams=3)
    assert hypotheses.log_probs.dtype == hypotheses.scores.dtype == jnp.float32
    exact = search(tables.astype(np.float32), [5] * 7, beam_size=3, top_beams=3)
    np.testing.assert_array_equal(hypotheses.log_probs, exact.log_probs)


@pytest.mark.parametrize(
    ("penalty", "alpha", "expected"),
    [
        (LengthPenalty.GNMT, 0.6, [1.0, (7 / 6) ** 0.6, 2.0**0.6]),
        (LengthPenalty.POWER, 2.0, [1.0, 4.0, 49.0]),
        (LengthPenalty.POWER, -1.0, [1.0, 1 / 2, 1 / 7]),
        (LengthPenalty.NONE, 0.6, [1.0, 1.0, 1.0]),
    ],
)
def test_length_penalties_worked_out_by_hand(penalty, alpha, expected):
    lengths = jnp.array([1, 2, 7], jnp.int32)
    np.testing.assert_allclose(length_penalty(lengths, penalty=penalty, alpha=alpha), expected, rtol=1e-6)


@pytest.mark.parametrize("top_beams", [0, 5])
def test_an_n_best_list_longer_than_the_beam_is_an_error(top_beams):
    with pytest.raises(ValueError, match=f"top_beams is {top_beams}; expected 1 to beam_size"):
        search(random_tables(0, batch=1, vocab=4, depth=1), [1], beam_size=4, top_beams=top_beams)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_the_highest_of_a_long_row_are_those_of_a_sort_and_of_equals_the_first(k):
    draw = np.random.default_rng(k)
    rows = np.stack([draw.normal(size=2500), draw.integers(0, 3, 2500), np.full(2500, -np.inf), np.zeros(2500)])
    values, places = top_k(jnp.asarray(rows, jnp.float32), k)
    expected = np.argsort(-rows.astype(np.float32), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(rows.astype(np.float32), expected, axis=1))
