"""Samples against exact probabilities, and against Hugging Face's warpers; with what they may depend on."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_model import Wishes, asked_for, n_best, random_tables, table_search, tree_cache, tree_step

from transformer_jax.batch import EOS, PAD
from transformer_jax.decoding.filters import Filters
from transformer_jax.decoding.sampling import Sampling, draw, sentence_keys, truncated
from transformer_jax.decoding.search import Asked, Rules, sample

VOCAB, DRAWS = 6, 4000
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0),
    Sampling(top_k=2),
    Sampling(top_p=0.7),
    Sampling(min_p=0.3),
    Sampling(epsilon=0.1),
    Sampling(1.5, 4, 0.9, 0.05, 0.1),
]
# 1 in 10,000 draws from the true distribution has a greater χ², by the number of outcomes less one
CHI_SQUARE = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7}


def distribution(log_probs, sampling):
    """What is drawn from, as one would say it in words: token → probability."""
    left = {token: np.exp(log_probs[token] / sampling.temperature) for token in range(1, len(log_probs))}

    def normalised(some):
        return {token: prob / sum(some.values()) for token, prob in some.items()}

    left = normalised(left)
    if sampling.top_k:
        left = normalised(dict(collections.Counter(left).most_common(sampling.top_k)))
    kept, mass = {}, 0.0
    for token, prob in collections.Counter(left).most_common():
        if mass < sampling.top_p:
            kept[token] = prob
        mass += prob
    left = normalised(kept)
    best = max(left.values())
    left = normalised({token: prob for token, prob in left.items() if prob >= sampling.min_p * best})
    best = max(left.values())
    return normalised({token: prob for token, prob in left.items() if prob >= sampling.epsilon or prob == best})


def chi_square(counts, expected):
    """Pearson's statistic; nothing but what is expected may have come."""
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    return sum((counts[one] - total * prob) ** 2 / (total * prob) for one, prob in expected.items())


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_come_as_often_as_they_are_probable(sampling):
    log_probs = np.array(jax.nn.log_softmax(jax.random.normal(jax.random.key(2), (VOCAB,))))
    log_probs[PAD] = -np.inf
    keys, many = sentence_keys(1, np.array([5], np.uint32)), np.broadcast_to(log_probs, (1, DRAWS, VOCAB))
    found = jax.jit(draw, static_argnames="sampling")(many, keys, jnp.array([0]), sampling=sampling)
    expected = distribution(log_probs.astype(np.float64), sampling)
    assert len(expected) > 1
    counts = collections.Counter(np.asarray(found)[0].tolist())
    assert chi_square(counts, expected) < CHI_SQUARE[len(expected) - 1]


def test_whole_sequences_come_as_often_as_they_are_probable():
    """Draws at one position do not depend on those at another."""
    tables = random_tables(4, batch=1, vocab=3, depth=2, sharpness=0.5)
    asked = Asked(jnp.array([2]), keys=sentence_keys(1, np.array([9], np.uint32)))
    found = table_search(tables, asked, rules=Rules(top_beams=2000, sampling=Sampling()), max_length=2)
    first, second = (np.exp(row[1:]) / np.exp(row[1:]).sum() for row in (tables[0, 0], tables[0, 3]))
    expected = {(EOS,): first[0], (2, EOS): first[1] * second[0], (2, 2): first[1] * second[1]}
    counts = collections.Counter(one.tokens for one in n_best(found, 0))
    assert chi_square(counts, expected) < CHI_SQUARE[2]


def test_log_probabilities_are_the_models_own_whatever_was_drawn_from():
    tables = random_tables(5, batch=4, vocab=5, depth=4)
    rules = Rules(top_beams=6, alpha=1.0, filters=Filters(2, 1.5, 2), sampling=Sampling(3.0, 4, 0.9))
    asked = Asked(jnp.array([4] * 4), keys=sentence_keys(0, np.arange(4, dtype=np.uint32)))
    found = table_search(tables, asked, rules=rules, max_length=4)
    for row in range(4):
        assert len(n_best(found, row)) == 6
        for one in n_best(found, row):
            node, total = 0, 0.0
            for token in one.tokens:
                total, node = total + tables[row, node, token], node * 5 + token + 1
            assert one.log_prob == pytest.approx(total, abs=1e-5)
            assert one.score == pytest.approx(total / ((5 + len(one.tokens)) / 6), abs=1e-5)
            assert len(one.tokens) >= 2
            assert len(set(zip(one.tokens, one.tokens[1:], strict=False))) == len(one.tokens) - 1


def test_samples_of_a_sentence_do_not_depend_on_its_batch_or_how_many_there_are():
    tables = random_tables(6, batch=8, vocab=5, depth=4, sharpness=0.5)
    asked = asked_for([4] * 8, [Wishes((2, 3)[: row % 3]) for row in range(8)])
    asked = asked._replace(constraints=None, keys=sentence_keys(7, np.arange(8, dtype=np.uint32)))
    rules = Rules(top_beams=4, sampling=Sampling(top_p=0.9))
    whole = table_search(tables, asked, rules=rules, max_length=4)
    rows = np.array([6, 1, 3])
    part = jax.tree.map(lambda leaf: leaf[rows], asked)
    fewer = table_search(tables[rows], part, rules=rules._replace(top_beams=2), max_length=4)
    for place, row in enumerate(rows):
        assert n_best(fewer, place) == n_best(whole, row)[:2]
        assert all(one.tokens[: row % 3] == (2, 3)[: row % 3] for one in n_best(whole, row))
    assert len({one.tokens for row in range(8) for one in n_best(whole, row)}) > 8


def test_the_seed_the_sentence_and_the_number_of_the_sample_make_the_difference():
    table = np.full((1, 1, 50), -np.log(50.0), np.float32)

    @jax.jit
    def tokens(keys):
        limits = jnp.array([3])
        cache = tree_cache(table, 8)
        return sample(tree_step, cache, keys=keys, limits=limits, max_length=3, samples=8).tokens

    def drawn(seed, sentence):
        return np.asarray(tokens(sentence_keys(seed, np.array([sentence], np.uint32)))).tolist()

    assert drawn(0, 3) == drawn(0, 3)
    assert drawn(0, 3) != drawn(1, 3)
    assert drawn(0, 3) != drawn(0, 4)
    assert len({tuple(tokens) for tokens in drawn(0, 3)[0]}) > 4


def test_a_sample_that_can_not_go_on_is_none():
    broken = np.full((1, 1, 5), np.nan, np.float32)
    asked = Asked(jnp.array([3]), keys=sentence_keys(0, np.zeros(1, np.uint32)))
    found = table_search(broken, asked, rules=Rules(top_beams=2, sampling=Sampling(top_p=0.5)), max_length=3)
    assert n_best(found, 0) == []


def test_truncations_are_those_of_hugging_face():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
    theirs = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")
    log_probs = np.array(jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (1, 50, 30))))
    log_probs[:, :, PAD] = -np.inf
    pairs = [
        (Sampling(temperature=0.7), [theirs.TemperatureLogitsWarper(0.7)]),
        (Sampling(top_k=5), [theirs.TopKLogitsWarper(5)]),
        (Sampling(top_k=99), [theirs.TopKLogitsWarper(99)]),
        (Sampling(top_p=0.8), [theirs.TopPLogitsWarper(0.8)]),
        (Sampling(top_p=0.1), [theirs.TopPLogitsWarper(0.1)]),
        (Sampling(min_p=0.2), [theirs.MinPLogitsWarper(0.2)]),
        (Sampling(epsilon=0.05), [theirs.EpsilonLogitsWarper(0.05)]),
        (Sampling(epsilon=0.9), [theirs.EpsilonLogitsWarper(0.9)]),
        (
            Sampling(1.3, 9, 0.95, 0.05, 0.02),
            [
                theirs.TemperatureLogitsWarper(1.3),
                theirs.TopKLogitsWarper(9),
                theirs.TopPLogitsWarper(0.95),
                theirs.MinPLogitsWarper(0.05),
                theirs.EpsilonLogitsWarper(0.02),
            ],
        ),
    ]
    for ours, warpers in pairs:
        scores = torch.tensor(log_probs[0])
        for warper in warpers:
            scores = warper(None, scores)
        found = jax.jit(truncated, static_argnames="sampling")(log_probs, sampling=ours)
        np.testing.assert_allclose(np.asarray(found)[0], scores.numpy(), rtol=1e-6)
