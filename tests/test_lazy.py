"""Translators for workers: threads, copies and pickles."""

import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, SearchConfig, TokenizerConfig, TransformerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.lazy import LazyTranslator
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.model import Model, write_run
from transformer_jax.nn.transformer import Transformer

WORDS = ["a", "the", "cat", "dog", "sees", "see", "big", "small", "and"]


def write_tiny_run(directory):
    """A run directory of a tiny model with random parameters."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, size=rng.integers(1, 9))) for _ in range(300)]
    tokenizer = train_tokenizer([Pair(line, line) for line in lines], TokenizerConfig(vocab=25))
    size = tokenizer.source_vocab
    config = TransformerConfig(
        encoder_layers=1,
        decoder_layers=1,
        width=16,
        heads=2,
        feed_forward=16,
        vocab_multiple=8,
        source_vocab=size,
        target_vocab=size,
    )
    ids = jnp.ones((1, 4), jnp.int32)
    params = jax.tree.map(np.asarray, jax.jit(Transformer(config).init)(jax.random.key(0), unpacked(ids, ids)))
    params["params"]["source_embedding"]["table"] = 3 * params["params"]["source_embedding"]["table"]
    write_run(directory, Model(Config(model=config, search=SearchConfig(extra_length=5)), params, tokenizer))
    return str(directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


def requests():
    """Lists of mixed sizes, with blank lines."""
    rng = np.random.default_rng(1)
    line = lambda: " ".join(rng.choice(WORDS, size=rng.integers(0, 12)))  # noqa: E731
    return [[line() for _ in range(size)] for size in (1, 9, 2, 5, 1, 13, 3, 0)]


@pytest.mark.slow
def test_several_threads_get_what_one_gets_and_the_model_is_loaded_once(run, monkeypatch):
    loads, load = [], Translator.load
    monkeypatch.setattr(Translator, "load", lambda *arguments: loads.append(arguments) or load(*arguments))
    translator, all_lines = LazyTranslator(run), requests()
    found: dict[int, list[list[str]]] = {}
    start = threading.Barrier(4)

    def work(thread):
        start.wait()
        order = all_lines[thread:] + all_lines[:thread]
        found[thread] = [translator(lines) for lines in order]

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    expected = [Translator.load(run).best(lines, SearchConfig(extra_length=5)) for lines in all_lines]
    for thread in range(4):
        assert found[thread] == expected[thread:] + expected[:thread]


def test_a_pickle_holds_the_path_alone_and_translates_alike(run):
    translator = LazyTranslator(run, SearchConfig(beam_size=2, extra_length=3))
    fresh = pickle.dumps(translator)
    expected = translator.translate(["a cat", "", "the dog"])
    assert len(expected[0][0].tokens) > 0
    used = pickle.dumps(translator)
    assert used == fresh
    assert pickle.loads(used).translate(["a cat", "", "the dog"]) == expected


def test_a_path_without_a_model_is_an_error_where_it_is_used(tmp_path):
    translator = LazyTranslator(tmp_path / "none")
    with pytest.raises(UserError, match="no run here"):
        translator(["a cat"])
