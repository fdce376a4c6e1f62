"""Ensembles of the checkpoints of run directories."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, EnsembleMean, RunConfig, SearchConfig, TokenizerConfig, TransformerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.ensemble import mean_log_probs
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import CHECKPOINTS, save_config, tokenizer_path

SEARCH = SearchConfig(beam_size=2, top_beams=2, extra_length=3)
MODEL = TransformerConfig(encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16)


def make_run(workdir, *, steps=(1,), vocab=16, **changes):
    """A run directory with a checkpoint of each step, whose parameters are drawn with the step as seed."""
    pairs = [Pair("the cat sees a dog", "a dog sees the cat"), Pair("a cat and a dog", "the dog and the cat")]
    tokenizer = train_tokenizer(pairs * 20, TokenizerConfig(vocab=vocab))
    model = dataclasses.replace(MODEL, **changes)
    sized = dataclasses.replace(model, source_vocab=vocab, target_vocab=vocab)
    ids = jnp.ones((1, 4), jnp.int32)
    for step in steps:
        params = jax.device_get(jax.jit(Transformer(sized).init)(jax.random.key(step), unpacked(ids, ids)))
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(workdir.resolve() / CHECKPOINTS / str(step) / "params", params)
    save_config(workdir, Config(model=model, run=RunConfig(checkpoint_every=1)))
    tokenizer.save(tokenizer_path(workdir))
    return str(workdir)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(runs):
    return make_run(runs / "run", steps=(1, 2))


def test_several_checkpoints_and_several_directories_are_one_ensemble(runs, run):
    other = make_run(runs / "other", steps=(3,), dropout=0.3)
    one, two, three = (Translator.load(where, which) for where, which in ((run, "1"), (run, "2"), (other, "3")))
    of_checkpoints = Translator.load(run, ["1", "2"])
    of_directories = Translator.load([run, other])  # the newest of each
    assert (len(of_checkpoints.members), len(of_directories.members), len(one.members)) == (2, 2, 1)
    assert len(Translator.load([run, run], ["1", "2"]).members) == 4
    for ensemble, members in ((of_checkpoints, (one, two)), (of_directories, (two, three))):
        built = dataclasses.replace(members[0], others=(members[1].params,))
        assert ensemble.translate(["a cat"], SEARCH) == built.translate(["a cat"], SEARCH)
        assert ensemble.translate(["a cat"], SEARCH) != members[0].translate(["a cat"], SEARCH)


def test_members_have_one_tokenizer_and_one_configuration(runs, run):
    wider = make_run(runs / "wider", width=32)
    with pytest.raises(UserError, match=r"run and .*wider have models of different configurations"):
        Translator.load([run, wider])
    larger = make_run(runs / "larger", vocab=17)
    with pytest.raises(UserError, match=r"run and .*larger have different tokenizers"):
        Translator.load([run, larger])
    with pytest.raises(UserError, match="no model to translate with"):
        Translator.load([])


@pytest.mark.parametrize("mean", EnsembleMean)
def test_means_are_distributions_even_where_a_token_is_masked(mean):
    members = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (3, 2, 4, 9)).at[:, :, :, 5].set(-1e30))
    found = np.asarray(mean_log_probs(list(members), mean))
    np.testing.assert_allclose(np.exp(found).sum(axis=2), 1.0, rtol=1e-5)
    assert not np.isnan(found).any()
    assert (found[:, :, 5] < -1e9).all()
    assert mean_log_probs([members[0]], mean) is not found
    np.testing.assert_array_equal(mean_log_probs([members[0]], mean), members[0])
