"""Every file in configs/ builds, and counts the parameters that its source published."""

import dataclasses
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, TransformerConfig, difference, from_json, to_json, with_vocabularies
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer

CONFIGS = sorted(path.stem for path in (pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))
PUBLISHED = {  # millions of parameters
    "wmt14_en_de_base": 65,  # table 3, base
    "wmt14_en_de_big": 213,  # table 3, big
}
TABLE_3 = {  # each row of the paper's table 3 with a published count, and how it differs from the base model
    "base": (65, {}),
    "dk16": (58, {"key_width": 16}),
    "dk32": (60, {"key_width": 32}),
    "N2": (36, {"encoder_layers": 2, "decoder_layers": 2}),
    "N4": (50, {"encoder_layers": 4, "decoder_layers": 4}),
    "N8": (80, {"encoder_layers": 8, "decoder_layers": 8}),
    "D256": (28, {"width": 256, "key_width": 32, "value_width": 32}),
    "D1024": (168, {"width": 1024, "key_width": 128, "value_width": 128}),
    "F1024": (53, {"feed_forward": 1024}),
    "F4096": (90, {"feed_forward": 4096}),
    "big": (213, {"width": 1024, "feed_forward": 4096, "heads": 16}),
}


def parameters(config: TransformerConfig) -> int:
    """How many parameters the model has; none is allocated."""
    ids = jnp.ones((1, 2), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # Flax's layers promote bfloat16 implicitly
        shapes = jax.eval_shape(lambda key: Transformer(config).init(key, unpacked(ids, ids)), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def load(name: str) -> Config:
    return importlib.import_module(f"configs.{name}").get_config()


@pytest.mark.parametrize("row", TABLE_3)
def test_parameters_are_within_7_percent_of_table_3(row):
    published, changes = TABLE_3[row]
    config = dataclasses.replace(TransformerConfig(source_vocab=37_000, target_vocab=37_000), **changes)
    assert parameters(config) / 1e6 == pytest.approx(published, rel=0.07)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_builds(name):
    config = load(name)
    vocab = config.data.tokenizer.vocab
    assert config.data.tokenizer.joint
    count = parameters(dataclasses.replace(config.model, source_vocab=vocab, target_vocab=vocab))
    if name in PUBLISHED:
        assert count / 1e6 == pytest.approx(PUBLISHED[name], rel=0.07)
    assert count > 100_000


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_says_how_to_run_it(name):
    text = importlib.import_module(f"configs.{name}").__doc__
    assert "python3 train.py" in text
    assert name == "phrases" or f"--config=configs/{name}.py" in text


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_survive_the_way_to_json_and_back(name):
    config = load(name)
    assert from_json(to_json(config), path="config.json") == config


def test_a_model_has_the_vocabularies_of_its_tokenizer_or_is_refused():
    given = with_vocabularies(TransformerConfig(target_vocab=8), source=7, target=8)
    assert (given.source_vocab, given.target_vocab) == (7, 8)
    with pytest.raises(UserError, match=r"config\.model\.target_vocab is 9, but the tokenizer has 8 pieces"):
        with_vocabularies(TransformerConfig(target_vocab=9), source=7, target=8)


def test_differences_are_named():
    one, other = load("phrases"), load("phrases")
    other.optimizer.warmup, other.data.train = 7, ("a.tsv",)
    assert difference(one, other) == [
        "data.train: ('phrasebook',) → ('a.tsv',)",
        f"optimizer.warmup: {one.optimizer.warmup} → 7",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"modle": {}}', "unknown field 'modle'; Config has model,"),
        ('{"model": {"width": "wide"}}', "run/config.json: model: width is 'wide'; expected"),
        ('{"model": {"norm": "batch"}}', "norm is 'batch'; expected layer, rms"),
        ('{"data": {"train": [1]}}', "train is 1; expected"),
        ("[]", "expected an object with the fields of Config"),
        ("{", "run/config.json: not JSON"),
    ],
)
def test_a_wrong_config_file_is_refused_with_its_field(change, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        from_json(change, path="run/config.json")
