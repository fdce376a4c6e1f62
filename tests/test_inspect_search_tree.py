"""The recording of a beam search against the model and against the compiled search."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `inspect`")

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import SearchConfig, SearchMethod, TransformerConfig
from transformer_jax.decoding.search import beam_search
from transformer_jax.errors import UserError
from transformer_jax.inspect.search_tree import (
    Fate,
    Recording,
    SearchStep,
    record_search,
    search_figure,
    search_tree,
)
from transformer_jax.nn.transformer import Transformer

SOURCE = [5, 6, 7, EOS]
SEED = 19  # of parameters with which some hypotheses end, some are given up
SEARCH = SearchConfig(beam_size=3, top_beams=2, extra_length=4)


@functools.cache
def build():
    config = TransformerConfig(
        encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16, source_vocab=9, target_vocab=9
    )
    model = Transformer(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), unpacked(jnp.array([SOURCE]), jnp.array([SOURCE])))
    rng = np.random.default_rng(SEED)
    return model, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.4).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def recording(model):
    return record_search(*model, SOURCE, SEARCH)


@functools.partial(jax.jit, static_argnums=0)
def all_log_probs(model, params, target):
    return jax.nn.log_softmax(model.apply(params, unpacked(jnp.array([SOURCE], jnp.int32), target)))[0]


@functools.cache
def next_log_probs(tokens):
    """What follows the tokens, by the parallel forward pass, which does not see what stands behind them."""
    target = jnp.array([[*tokens, *[2] * (9 - len(tokens))]], jnp.int32)
    return np.asarray(all_log_probs(*build(), target)[len(tokens)])


def test_the_recorded_search_finds_what_the_compiled_one_finds(model, recording):
    source = jnp.array([SOURCE], jnp.int32)

    @jax.jit
    def compiled(params):
        encoded = model[0].apply(params, source, method="encode")
        cache = model[0].apply(params, encoded, jnp.ones_like(source), beams=3, length=16, method="init_cache")

        def step(token, parent, position, cache):
            logits, cache = model[0].apply(params, token, parent, position, cache, method="decode_step")
            return jax.nn.log_softmax(logits), cache

        return beam_search(step, cache, limits=jnp.array([8]), max_length=16, beam_size=3, top_beams=2)

    expected = jax.tree.map(lambda field: np.asarray(field)[0], compiled(model[1]))
    tokens = [tuple(row[:length].tolist()) for row, length in zip(expected.tokens, expected.lengths, strict=True)]
    assert list(recording.translations) == tokens
    np.testing.assert_allclose(recording.scores, expected.scores, atol=1e-5)


def test_sums_are_those_of_the_forward_pass(recording):
    nodes = search_tree(recording)
    assert len(nodes) > 8
    for node in nodes:
        found = [next_log_probs(node.tokens[:n])[token] for n, token in enumerate(node.tokens)]
        assert node.log_prob == pytest.approx(sum(map(float, found)), abs=1e-4)


def test_each_step_keeps_the_best_continuations_of_its_live_hypotheses(recording):
    nodes = search_tree(recording)
    last = max(len(node.tokens) for node in nodes)
    for length in range(1, last + 1):
        finished = sum(node.fate == Fate.FINISHED and len(node.tokens) < length for node in nodes)
        live = (
            [((), 0.0)]
            if length == 1
            else [
                (node.tokens, node.log_prob)
                for node in nodes
                if len(node.tokens) == length - 1 and node.fate != Fate.FINISHED
            ]
        )
        grown = [
            ((*tokens, token), log_prob + float(next_log_probs(tokens)[token]))
            for tokens, log_prob in live
            for token in range(1, 9)
        ]
        best = sorted(grown, key=lambda one: -one[1])[: 3 - finished]
        assert {node.tokens for node in nodes if len(node.tokens) == length} == {tokens for tokens, _ in best}


def test_no_two_hypotheses_have_one_slot_at_one_step_and_finished_ones_keep_theirs(recording):
    nodes = search_tree(recording)
    for one, other in itertools.combinations(nodes, 2):
        if one.slot == other.slot:
            assert len(one.tokens) != len(other.tokens)
            earlier = min((one, other), key=lambda node: len(node.tokens))
            assert earlier.fate != Fate.FINISHED


def test_nodes_know_their_fate_and_their_place_in_the_n_best_list(recording):
    nodes = {node.tokens: node for node in search_tree(recording)}
    for rank, (tokens, score) in enumerate(zip(recording.translations, recording.scores, strict=True)):
        assert (nodes[tokens].rank, nodes[tokens].score) == (rank, score)
    prefixes = {tokens[:-1] for tokens in nodes}
    for tokens, node in nodes.items():
        assert (node.fate == Fate.FINISHED) == (tokens[-1] == EOS)
        assert (node.fate == Fate.CONTINUED) == (tokens in prefixes)
        assert tokens[:-1] in nodes or len(tokens) == 1
    assert {node.fate for node in nodes.values()} == set(Fate)


def test_a_search_worked_out_by_hand():
    """Two slots: `2` and `3`; then 2 ends, 2 4 goes on and 3 is given up; then 2 4 ends."""
    steps = (
        SearchStep(np.array([2, 3]), np.array([0, 0]), np.array([-0.5, -1.0])),
        SearchStep(np.array([EOS, 4]), np.array([0, 0]), np.array([-1.5, -0.7])),
        SearchStep(np.array([0, EOS]), np.array([0, 1]), np.array([-1.5, -0.8])),
    )
    recording = Recording(steps, ((2, 4, EOS), (2, EOS)), (-0.7, -1.4))
    nodes = {node.tokens: node for node in search_tree(recording)}
    sums = {tokens: round(node.log_prob, 5) for tokens, node in nodes.items()}
    assert sums == {(2,): -0.5, (3,): -1.0, (2, EOS): -1.5, (2, 4): -0.7, (2, 4, EOS): -0.8}
    assert {tokens: node.slot for tokens, node in nodes.items()} == {
        (2,): 0,
        (3,): 1,
        (2, 1): 0,
        (2, 4): 1,
        (2, 4, 1): 1,
    }
    assert nodes[(3,)].fate == Fate.DEAD
    assert nodes[(2,)].fate == Fate.CONTINUED
    assert [nodes[tokens].rank for tokens in ((2, 4, EOS), (2, EOS), (3,))] == [0, 1, None]
    labels = [f"w{node.tokens[-1]}" for node in nodes.values()]
    shown = [text.get_text() for text in search_figure(list(nodes.values()), labels).axes[0].texts]
    assert "w1\n-0.80   no. 1: -0.700" in shown
    assert "w3\n-1.00 ×" in shown


def test_what_the_search_is_asked_for_holds_in_its_recording(model):
    asked = SearchConfig(beam_size=2, extra_length=0, forced_prefix=(7, 3), suppressed=(5,))
    nodes = search_tree(record_search(*model, SOURCE, asked))
    assert {node.tokens[:2] for node in nodes if len(node.tokens) > 1} == {(7, 3)}
    assert all(5 not in node.tokens for node in nodes)
    assert max(len(node.tokens) for node in nodes) <= len(SOURCE)


def test_samples_have_no_tree(model):
    with pytest.raises(UserError, match=r"search\.method is sample"):
        record_search(*model, SOURCE, SearchConfig(method=SearchMethod.SAMPLE))
