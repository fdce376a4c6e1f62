import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import Positions, TransformerConfig
from transformer_jax.decoding import pool
from transformer_jax.decoding.batches import stack
from transformer_jax.decoding.filters import Filters
from transformer_jax.decoding.pool import Engine, Pool, Shape, resting, search_all, search_batch, shape_for
from transformer_jax.decoding.sampling import Sampling, sentence_keys
from transformer_jax.decoding.search import Asked, Hypotheses, Rules
from transformer_jax.decoding.translator import on_every_device
from transformer_jax.nn.transformer import Transformer

V = 12
MODEL = Transformer(
    TransformerConfig(
        encoder_layers=1,
        decoder_layers=2,
        width=16,
        heads=2,
        feed_forward=16,
        source_vocab=V,
        target_vocab=V,
        vocab_multiple=4,
    )
)
NO_END = Filters(suppressed=(EOS,))  # every translation is as long as its limit


@functools.cache
def params():
    """Of sharp distributions, so that nothing hangs on the last digit."""
    ids = jnp.ones((1, 2), jnp.int32)
    leaves, tree = jax.tree.flatten(MODEL.init(jax.random.key(3), unpacked(ids, ids)))
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noisy = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    found = jax.tree.unflatten(tree, noisy)
    found["params"]["source_embedding"]["table"] *= 2
    return found


def sentences(lengths) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*draw.integers(3, V, length - 1).tolist(), EOS] for length in lengths]


def found_in_pool(sources, limits, rules: Rules, *, tokens: int, **asked) -> list[Hypotheses]:
    asked = Asked(np.array(limits, np.int32), **asked)
    results = dict(search_all(Engine(MODEL, rules), (params(),), sources, asked, tokens=tokens))
    assert sorted(results) == list(range(len(sources)))
    return [results[index] for index in range(len(sources))]


def tokens_of(found: Hypotheses) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(found.tokens, found.lengths, strict=True)]


LENGTHS = [3, 9, 2, 7, 20, 2, 5, 4, 12, 3, 6, 2, 2]
BEAMS = Rules(beam_size=3, top_beams=2, filters=Filters(no_repeat_ngram=2))


@pytest.mark.parametrize(
    ("rules", "rows"),
    [
        pytest.param(BEAMS, 16, id="13 of 16 rows computed, too few while no hypothesis has ended"),
        pytest.param(BEAMS, 1, id="a row or few", marks=pytest.mark.slow),
        pytest.param(Rules(beam_size=1), 1, id="greedy", marks=pytest.mark.slow),
    ],
)
def test_a_pool_finds_what_one_search_of_all_sentences_finds(rules, rows):
    sources, limits = sentences(LENGTHS * 2), np.array(LENGTHS * 2, np.int32) + 35
    in_pool = found_in_pool(sources, limits, rules, tokens=24 * rows)
    at_once = jax.jit(search_batch, static_argnums=0, static_argnames="length")(
        Engine(MODEL, rules), (params(),), stack(sources, rows=26, length=24), Asked(limits), length=64
    )
    assert int(at_once.lengths.max()) > pool.SHORTEST
    for index, found in enumerate(in_pool):
        expected = Hypotheses(*(np.asarray(field[index]) for field in at_once))
        assert tokens_of(found) == tokens_of(expected)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4)
        np.testing.assert_array_equal(found.finished, expected.finished)


@settings(deadline=None)  # it compiles
@given(st.data())
def test_those_who_are_furthest_go_first_as_far_as_there_is_room(data):
    batch, beams = data.draw(st.sampled_from([1, 5])), data.draw(st.sampled_from([1, 3]))  # few to compile
    live = np.array(data.draw(st.lists(st.booleans(), min_size=batch * beams, max_size=batch * beams)))
    live = live.reshape(batch, beams)
    position = np.array(data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch)))
    rows = data.draw(st.integers(1, batch))
    rests = np.asarray(resting(jnp.asarray(live), jnp.asarray(position), rows))
    going = live[~rests].sum()
    assert going <= rows * beams
    assert going or not live.any()
    for late in np.flatnonzero(rests):
        assert live[(position >= position[late])].sum() > rows * beams
        assert (position[~rests & live.any(axis=1)] >= position[late]).all()


def test_the_samples_prefixes_and_constraints_of_a_sentence_stay_its_own():
    sources, limits = sentences(LENGTHS[:5]), [12] * 5
    prefix = np.array([[3 + index % 9, 4] for index in range(len(sources))], np.int32)
    constraints = np.array([[[11 - index % 9]] for index in range(len(sources))], np.int32)
    for found, own, phrase in zip(
        found_in_pool(sources, limits, Rules(2), tokens=10**6, prefix=prefix, constraints=constraints),
        prefix.tolist(),
        constraints[:, 0, 0].tolist(),
        strict=True,
    ):
        assert tokens_of(found)[0][:2] == own
        assert phrase in tokens_of(found)[0] or not found.satisfied[0]

    rules = Rules(top_beams=2, sampling=Sampling())
    keys = sentence_keys(0, np.arange(len(sources), dtype=np.uint32))
    small, large = (found_in_pool(sources, limits, rules, tokens=tokens, keys=keys) for tokens in (48, 10**6))
    assert list(map(tokens_of, small)) == list(map(tokens_of, large))
    assert len({str(tokens_of(found)) for found in small}) > len(small) // 2  # not one sample for all


def found_on_every_device() -> list:
    """The n-best lists of more sentences than there are devices, with their scores."""
    members = (on_every_device(params()),)
    sources = sentences([*LENGTHS, *LENGTHS])
    asked = Asked(np.full(len(sources), 20, np.int32))
    results = dict(search_all(Engine(MODEL, Rules(2, 2)), members, sources, asked, tokens=64))
    return [(tokens_of(results[index]), results[index].scores.tolist()) for index in range(len(sources))]


def rows_of_a_device() -> int:
    """How many of 16 rows lie on the first device."""
    asked = Asked(np.full(1, 20, np.int32))
    own = Pool(Engine(MODEL, Rules(2)), (on_every_device(params()),), sentences([3]), asked)
    own.bring_to(Shape(16, 8, 32))
    return own.state.tokens.addressable_shards[0].data.shape[0]


@pytest.mark.slow
def test_eight_devices_find_what_one_finds():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = "import json, test_pool as t; print(json.dumps([t.rows_of_a_device(), t.found_on_every_device()]))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=True,
    )
    rows, found = json.loads(done.stdout.splitlines()[-1])
    assert (rows, rows_of_a_device()) == (2, 16)
    expected = found_on_every_device()
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([scores for _, scores in found], [scores for _, scores in expected], rtol=1e-4)


def test_no_sentence_is_padded_beyond_the_models_last_position():
    model = Transformer(dataclasses.replace(MODEL.config, positions=Positions.LEARNED, max_positions=18))
    ids = jnp.ones((1, 2), jnp.int32)
    members = (model.init(jax.random.key(0), unpacked(ids, ids)),)
    asked = Asked(np.full(2, 18, np.int32))  # 17 and 3 tokens, which alone would be padded to 24
    engine, sources = Engine(model, Rules(2)), sentences([17, 3])
    results = dict(search_all(engine, members, sources, asked, tokens=100, positions=18))
    assert all(np.isfinite(results[index].scores).all() for index in range(2))


def row_steps(monkeypatch, lengths) -> int:
    """How many rows times steps are computed for sentences whose translations are as long as themselves."""
    work, run = [], Pool.run

    def counted(self, *, free):
        before = self.position.copy()
        results = run(self, free=free)
        work.append(self.shape.rows * int((self.position - before).max()))
        return results

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "run", counted)
        sources = sentences(lengths)
        found = found_in_pool(sources, lengths, Rules(1, filters=NO_END), tokens=64)
    assert [int(one.lengths[0]) for one in found] == list(lengths)
    return sum(work)


def test_cost_follows_the_tokens_that_are_made(monkeypatch):
    short, long = [5] * 64, [60] * 8
    mixed = [length for pair in itertools.zip_longest(short, long) for length in pair if length]
    apart = row_steps(monkeypatch, short) + row_steps(monkeypatch, long)
    assert row_steps(monkeypatch, mixed) <= 1.15 * apart
    draw = np.random.default_rng(1)
    lengths = draw.integers(4, 16, 200).tolist()
    assert row_steps(monkeypatch, lengths) <= 1.35 * sum(lengths)


shapes = st.builds(Shape, st.integers(1, 64), st.integers(8, 64), st.integers(32, 128))


@given(shapes, st.integers(1, 300), st.integers(0, 300), st.integers(0, 40), st.integers(0, 99), st.integers(1, 4096))
def test_a_shape_has_room_for_all_and_stays_within_the_budget(now, longest, reached, busy, waiting, tokens):
    assume(busy + waiting)
    shape = shape_for(now, longest, reached, busy, waiting, tokens=tokens)
    assert shape.source >= longest
    assert shape.target > reached
    assert shape.rows >= busy
    assert shape.rows * shape.source <= tokens or shape.rows < 2 * max(1, busy)
    assert shape.rows < 2 * (busy + waiting)


def test_few_shapes_serve_many_lengths():
    seen = {
        shape_for(Shape(1, 8, 32), longest, reached, 0, 1000, tokens=1024)
        for longest in range(1, 129)
        for reached in range(0, 128, 7)
    }
    assert len(seen) <= 30
