"""Rules on next-token log-probabilities, against their definitions in words and against Hugging Face's processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_jax.batch import EOS, PAD
from transformer_jax.decoding.filters import Filters, filtered, forced

VOCAB, LENGTH, HYPOTHESES = 7, 8, 5
LOG_PROBS = np.array(jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (1, HYPOTHESES, VOCAB))))
LOG_PROBS[:, :, PAD] = -np.inf

hypotheses = st.integers(0, LENGTH - 1).flatmap(
    lambda size: st.lists(st.lists(st.integers(2, 4), min_size=size, max_size=size), min_size=5, max_size=5)
)
checked = settings(max_examples=30, deadline=None, derandomize=True, database=None)
apply = jax.jit(filtered, static_argnames="filters")


def under(filters, tokens):
    """The log-probabilities after the tokens of five hypotheses of equal length."""
    ids = np.full((1, HYPOTHESES, LENGTH), PAD, np.int32)
    ids[0, :, : len(tokens[0])] = tokens
    return np.asarray(apply(LOG_PROBS, ids, jnp.array([len(tokens[0])]), filters=filters))[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@checked
@given(tokens=hypotheses)
def test_no_n_gram_comes_twice_and_nothing_else_is_forbidden(size, tokens):
    found = under(Filters(no_repeat_ngram=size), tokens)
    for row, sequence in enumerate(tokens):
        n_grams = {tuple(sequence[start : start + size]) for start in range(len(sequence) - size + 1)}
        for token in range(1, VOCAB):
            after = [*sequence, token]
            again = len(after) >= size and tuple(after[-size:]) in n_grams
            assert found[row, token] == (-np.inf if again else LOG_PROBS[0, row, token])


@checked
@given(tokens=hypotheses)
def test_tokens_that_are_there_cost_more_by_the_penalty(tokens):
    found = under(Filters(repetition_penalty=1.5), tokens)
    for row, sequence in enumerate(tokens):
        for token in range(1, VOCAB):
            factor = 1.5 if token in sequence else 1.0
            assert found[row, token] == pytest.approx(factor * LOG_PROBS[0, row, token])


@pytest.mark.parametrize("length", range(5))
def test_nothing_ends_before_the_minimum_length_which_counts_the_end(length):
    found = under(Filters(min_length=3), [[3] * length] * HYPOTHESES)
    assert (found[:, EOS] == -np.inf).all() == (length + 1 < 3)
    np.testing.assert_array_equal(found[:, 2:], LOG_PROBS[0, :, 2:])


def test_suppressed_ids_are_forbidden_and_no_others():
    found = under(Filters(suppressed=(2, 5)), [[3]] * HYPOTHESES)
    assert (found == -np.inf).all(axis=0).tolist() == [True, False, True, False, False, True, False]


def test_a_forced_token_costs_what_the_model_says_and_none_forces_nothing():
    model = np.broadcast_to(LOG_PROBS, (2, HYPOTHESES, VOCAB))
    costs = np.full_like(model, -np.inf)
    costs[1] = -7.0
    found = np.asarray(forced(jnp.asarray(costs), jnp.asarray(model), jnp.array([4, PAD])))
    np.testing.assert_array_equal(found[0, :, 4], model[0, :, 4])
    assert np.isinf(found[0]).sum() == HYPOTHESES * (VOCAB - 1)
    np.testing.assert_array_equal(found[1], costs[1])


def test_they_are_those_of_hugging_face():
    """The start of the decoder, which their functions count among the tokens, is left out."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
    theirs = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")
    tokens = np.random.default_rng(0).integers(2, 5, size=(HYPOTHESES, 6)).tolist()
    ids, scores = torch.tensor(tokens), torch.tensor(LOG_PROBS[0])
    pairs = [
        (Filters(repetition_penalty=1.7), theirs.RepetitionPenaltyLogitsProcessor(1.7)),
        (Filters(repetition_penalty=0.6), theirs.RepetitionPenaltyLogitsProcessor(0.6)),
        (Filters(no_repeat_ngram=1), theirs.NoRepeatNGramLogitsProcessor(1)),
        (Filters(no_repeat_ngram=2), theirs.NoRepeatNGramLogitsProcessor(2)),
        (Filters(no_repeat_ngram=3), theirs.NoRepeatNGramLogitsProcessor(3)),
        (Filters(suppressed=(2, 6)), theirs.SuppressTokensLogitsProcessor([2, 6])),
    ]
    for ours, processor in pairs:
        np.testing.assert_allclose(under(ours, tokens), processor(ids, scores.clone()).numpy(), rtol=1e-6)
