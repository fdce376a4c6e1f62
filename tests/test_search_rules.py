"""All that can be asked of a search, alone and together, against brute force and against beam search in words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import (
    Wishes,
    asked_for,
    assert_same,
    brute_force,
    child,
    full_beam,
    n_best,
    patient_beam,
    random_tables,
    table_search,
    tree_cache,
    tree_step,
)

from transformer_jax.batch import EOS
from transformer_jax.config import Beam, LengthPenalty
from transformer_jax.decoding.filters import Filters
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Asked, Rules, advance, beam_search, finish, init, search

VOCAB, DEPTH, ROWS = 4, 4, 16
WIDEST = 1 + 2 + 4 + 8 + 16  # every sequence of up to 4 tokens has a slot: many more than the vocabulary has tokens
COMBINATIONS = [  # penalty, α, filters
    (LengthPenalty.GNMT, 0.6, Filters()),
    (LengthPenalty.GNMT, -1.0, Filters(min_length=3, repetition_penalty=1.7)),
    (LengthPenalty.POWER, -2.0, Filters(repetition_penalty=0.4, no_repeat_ngram=3)),
    (LengthPenalty.NONE, 0.0, Filters(no_repeat_ngram=1)),
    (LengthPenalty.POWER, 1.0, Filters(3, 1.3, 2, (2,))),
]

tokens = st.integers(EOS + 1, VOCAB - 1)
sentences = st.tuples(
    st.integers(1, DEPTH),  # limit
    st.lists(tokens, max_size=2).map(tuple),  # prefix
    st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple),  # phrases
)


def wishes_of(prefix, phrases, filters):
    return Wishes(prefix, phrases, *filters)


@functools.cache
def tables(seed, rows=ROWS, vocab=VOCAB, depth=DEPTH):
    return random_tables(seed, batch=rows, vocab=vocab, depth=depth)


@pytest.mark.parametrize(("penalty", "alpha", "filters"), COMBINATIONS)
def test_a_wide_beam_finds_what_brute_force_finds_whatever_is_asked(penalty, alpha, filters):
    rules = Rules(WIDEST, 5, penalty, alpha, filters)

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 3), st.lists(sentences, min_size=ROWS, max_size=ROWS))
    def check(seed, drawn):
        wishes = [wishes_of(prefix, phrases, filters) for _, prefix, phrases in drawn]
        limits = [limit for limit, *_ in drawn]
        found = table_search(tables(seed), asked_for(limits, wishes), rules=rules, max_length=DEPTH)
        for row in range(ROWS):
            assert_same(
                n_best(found, row), brute_force(tables(seed)[row], limits[row], penalty, alpha, wishes[row])[:5]
            )

    check()


@pytest.mark.parametrize(
    ("beam_size", "filters", "beam"),
    [
        (1, Filters(), Beam.SHRINKING),
        (3, Filters(2, 1.5, 2, (4,)), Beam.SHRINKING),
        (6, Filters(), Beam.SHRINKING),
        (3, Filters(2, 1.5, 2, (4,)), Beam.FULL),
    ],
)
def test_a_narrow_beam_finds_what_beam_search_in_words_finds(beam_size, filters, beam):
    rng, vocab, depth, rows = np.random.default_rng(beam_size), 6, 5, 40
    table = random_tables(beam_size, batch=rows, vocab=vocab, depth=depth)

    def drawn(most, size):
        return tuple(tuple(rng.integers(2, vocab, size=rng.integers(1, size + 1)).tolist()) for _ in range(most))

    wishes = [wishes_of(drawn(row % 2, 2)[0] if row % 2 else (), drawn(row % 3, 2), filters) for row in range(rows)]
    limits = rng.integers(1, depth + 1, size=rows).tolist()
    n = min(beam_size, 3)
    rules = Rules(beam_size, n, LengthPenalty.GNMT, 1.0, filters, beam=beam)
    in_words = full_beam if beam == Beam.FULL else patient_beam
    found = table_search(table, asked_for(limits, wishes), rules=rules, max_length=depth)
    for row in range(rows):
        expected = in_words(table[row], limits[row], beam_size, LengthPenalty.GNMT, 1.0, wishes[row])
        assert_same(n_best(found, row), expected[:n])


@pytest.mark.parametrize(("groups", "beam_size", "diversity", "n"), [(2, 4, 0.8, 1), (3, 6, 0.0, 6), (4, 4, 2.0, 4)])
def test_groups_find_what_they_find_in_words(groups, beam_size, diversity, n):
    """With early stopping, and with what a sentence asks for, in a vocabulary larger than a group."""
    vocab, depth, rows = 6, 4, 30
    table = random_tables(7, batch=rows, vocab=vocab, depth=depth, sharpness=1.5)
    wishes = [
        Wishes(prefix=(2, 3)[: row % 3], phrases=((4,), (5, 2))[: row % 2], repetition_penalty=1.2)
        for row in range(rows)
    ]
    filters = Filters(repetition_penalty=1.2)
    limits = [1 + row % depth for row in range(rows)]
    rules = Rules(beam_size, n, LengthPenalty.POWER, 0.7, filters, groups, diversity)
    found = table_search(table, asked_for(limits, wishes), rules=rules, max_length=depth)
    for row in range(rows):
        options = {"groups": groups, "diversity": diversity}
        expected = patient_beam(table[row], limits[row], beam_size, "power", 0.7, wishes[row], **options)
        assert_same(n_best(found, row), expected[:n])
        assert len({one.tokens for one in n_best(found, row)}) == len(n_best(found, row))


def test_groups_differ_more_the_more_diversity_is_asked_for():
    table = jnp.asarray(random_tables(8, batch=50, vocab=6, depth=4, sharpness=1.0))

    @jax.jit
    def diverse(diversity):
        return beam_search(
            tree_step,
            tree_cache(table, 4),
            limits=jnp.full(50, 4),
            max_length=4,
            beam_size=4,
            top_beams=4,
            groups=4,
            diversity=diversity,
        )

    def first_tokens(diversity):
        found = diverse(diversity)
        return np.mean([len({one.tokens[0] for one in n_best(found, row)}) for row in range(50)])

    assert first_tokens(0.0) < first_tokens(0.5) < first_tokens(5.0) == 4


def test_the_prefix_is_whole_in_every_hypothesis_and_they_differ_behind_it():
    """Prefixes of different length in one batch, which the model finds improbable."""
    prefixes = [(), (4,), (4, 3), (2, 2, 4)]
    table = random_tables(9, batch=4, vocab=6, depth=5)
    for row, prefix in enumerate(prefixes):
        node = 0
        for token in prefix:
            table[row, node, token] = -30.0
            node = child(node, token, 6)
    asked = asked_for([5] * 4, [Wishes(prefix) for prefix in prefixes], prefix=3)._replace(constraints=None)
    found = table_search(table, asked, rules=Rules(4, 4), max_length=5)
    for row, prefix in enumerate(prefixes):
        one_by_one = n_best(found, row)
        assert len({one.tokens for one in one_by_one}) == 4
        for one in one_by_one:
            assert one.tokens[: len(prefix)] == prefix
            assert one.log_prob < -30.0 * len(prefix)


def test_a_prefix_is_forced_against_all_other_rules():
    table = random_tables(10, batch=1, vocab=5, depth=5)
    filters = Filters(no_repeat_ngram=1, suppressed=(2,), repetition_penalty=3.0)
    wishes = Wishes((2, 2), (), *filters)
    found = table_search(table, asked_for([5], [wishes]), rules=Rules(4, 2, filters=filters), max_length=5)
    best, second = n_best(found, 0)
    assert best.tokens[:2] == second.tokens[:2] == (2, 2)
    assert 2 not in (*best.tokens[2:], *second.tokens[2:])


def test_what_can_not_be_had_leaves_the_best_unfinished_hypotheses_and_says_so():
    """A phrase that is suppressed, one that repeats itself, one longer than the limit; and one that can be had."""
    table = random_tables(11, batch=4, vocab=5, depth=4)
    filters = Filters(no_repeat_ngram=2, suppressed=(4,))
    phrases = [((4,),), ((2, 3), (2, 3)), ((2, 3), (3, 3)), ((3, 2),)]
    asked = asked_for([4, 4, 3, 4], [Wishes(phrases=some) for some in phrases])
    asked = asked._replace(limits=jnp.array([4, 4, 2, 4]))
    found = table_search(table, asked, rules=Rules(6, 3, filters=filters), max_length=4)
    for row in range(3):
        assert [(one.finished, one.satisfied) for one in n_best(found, row)] == [(False, False)] * 3
    assert n_best(found, 3)[0].finished
    assert all(one.satisfied for one in n_best(found, 3) if one.finished)


def test_of_unfinished_hypotheses_satisfied_ones_come_first():
    table = np.full((1, 31, 5), np.log(0.001), np.float32)
    table[0, :, 2], table[0, :, 3] = np.log(0.9), np.log(0.05)
    table[0, 0, 3] = np.log(0.06)
    asked = asked_for([2], [Wishes(phrases=((3,),))])
    found = n_best(table_search(table, asked, rules=Rules(9, 6, filters=Filters(min_length=9)), max_length=2), 0)
    assert [one.tokens for one in found] == [(3, 2), (2, 3), (3, 3), (3, 4), (4, 3), (2, 2)]
    assert [one.satisfied for one in found] == [True] * 5 + [False]
    assert found[5].score > found[0].score


def test_a_beam_of_one_meets_its_constraints():
    """Each phrase costs, and nothing but the banks keeps a beam of one from putting it off until there is no room."""
    table = random_tables(12, batch=50, vocab=6, depth=5)
    asked = asked_for([5] * 50, [Wishes(phrases=((4, 5), (2,)))] * 50)
    found = table_search(table, asked, rules=Rules(1, 1), max_length=5)
    assert all(one.satisfied for row in range(50) for one in n_best(found, row))


def test_a_sentence_has_the_same_n_best_list_in_any_batch_order_and_company():
    """Whether its neighbours ask for anything, and whether the program has what they ask for."""
    rows = 12
    table = random_tables(13, batch=rows, vocab=5, depth=4)
    limits = [1 + row % 4 for row in range(rows)]
    wishes = [Wishes((3, 2)[: row % 3], ((4, 4), (2,))[: row % 2]) for row in range(rows)]
    rules = Rules(4, 4, filters=Filters(2, 1.3, 2))
    whole = table_search(table, asked_for(limits, wishes), rules=rules, max_length=4)
    order = np.random.default_rng(1).permutation(rows)
    asked = asked_for([limits[row] for row in order], [wishes[row] for row in order], prefix=3, phrases=(3, 3))
    shuffled = table_search(table[order], asked, rules=rules, max_length=4)
    for place, row in enumerate(order):
        assert_same(n_best(shuffled, place), n_best(whole, row))
    for row in range(0, rows, 6):  # these ask for nothing
        alone = table_search(table[[row]], Asked(jnp.array(limits[row : row + 1])), rules=rules, max_length=4)
        assert_same(n_best(alone, 0), n_best(whole, row))


def test_steps_may_be_taken_in_chunks_and_sentences_that_are_done_taken_out():
    rows, rules = 6, Rules(4, 4, LengthPenalty.POWER, 1.0, Filters(2, 1.3, 2))
    table = random_tables(14, batch=rows, vocab=5, depth=6)
    wishes = [Wishes((2,), ((3,),)[: row % 2]) for row in range(rows)]
    asked = asked_for([2, 6, 2, 6, 4, 6], wishes)
    whole = table_search(table, asked, rules=rules, max_length=6)

    @jax.jit
    def three_steps(state, asked):
        state = jax.lax.fori_loop(0, 3, lambda _, state: advance(tree_step, state, asked, rules), state)
        return state, finish(state, asked, rules)

    rest, found = np.arange(rows), {}
    state = jax.jit(lambda asked: init(tree_cache(table, 4), asked, rules, max_length=6))(asked)
    while len(rest):
        state, ended = jax.device_get(three_steps(state, asked))
        found |= {row: n_best(ended, place) for place, row in enumerate(rest) if state.done[place]}
        left = ~state.done
        state, asked = jax.tree.map(lambda leaf: leaf[left] if leaf.ndim else leaf, (state, jax.device_get(asked)))  # noqa: B023
        rest = rest[left]
    assert sorted(found) == list(range(rows))
    for row in range(rows):
        assert_same(found[row], n_best(whole, row))


def test_neutral_rules_are_not_in_the_program():
    def program(**options):
        def of(limits, table):
            return beam_search(tree_step, tree_cache(table, 4), limits=limits, max_length=3, **options)

        return str(jax.make_jaxpr(of)(jnp.array([3]), jnp.asarray(tables(0)[:1])))

    plain = program()
    assert program(filters=Filters(1, 1.0, 0, ()), groups=1, diversity=0.7) == plain
    for filters in (Filters(2), Filters(0, 1.1), Filters(0, 1.0, 2), Filters(suppressed=(2,))):
        assert len(program(filters=filters)) > len(plain)


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        (Rules(4, 5), r"top_beams is 5; expected 1 to beam_size \(4\)"),
        (Rules(4, 1, groups=3), "groups is 3, which does not divide the beam of 4"),
        (Rules(top_beams=2, sampling=Sampling()), "samples need keys"),
    ],
)
def test_rules_that_do_not_go_together_are_an_error(rules, wrong):
    with pytest.raises(ValueError, match=wrong):
        search(tree_step, tree_cache(tables(0), 4), asked_for([3] * ROWS, [Wishes()] * ROWS), rules, max_length=3)
