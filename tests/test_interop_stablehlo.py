"""Exported programs translate as the library does, in a process that can't import it."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import (
    AttentionKernel,
    Config,
    DataConfig,
    Positions,
    SearchConfig,
    SearchMethod,
    TokenizerConfig,
    TransformerConfig,
)
from transformer_jax.data.corpus import Pair
from transformer_jax.data.segmenters import BytePieces, NumberedPieces, renumbered
from transformer_jax.data.tokenizer import Tokenizer, train_tokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import stablehlo, standalone_translate
from transformer_jax.interop.model import Model
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import STORED

pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: pip install -e '.[interop]'")

WORDS = ["a", "the", "cat", "dog", "sees", "see", "big", "small", "and"]
LINES = ["a cat", "the dog sees a cat", "", "dog", " \t ", "a big dog and a small cat", "the cat sees " * 9]
SEARCH = SearchConfig(beam_size=3, extra_length=6)
ALONE = "import sys; sys.modules['transformer_jax'] = None; import runpy; runpy.run_path({!r}, run_name='__main__')"


@pytest.fixture(scope="module")
def tokenizer():
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, size=rng.integers(1, 9))) for _ in range(300)]
    return train_tokenizer([Pair(line, line) for line in lines], TokenizerConfig(vocab=25))


def make_model(tokenizer, search=SEARCH, **options):
    config = TransformerConfig(
        encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16, vocab_multiple=8,
        source_vocab=tokenizer.source_vocab, target_vocab=tokenizer.target_vocab, **options,
    )  # fmt: skip
    ids = jnp.ones((1, 4), jnp.int32)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), unpacked(ids, ids))
    table = params["params"]["source_embedding"]["table"]
    params["params"]["source_embedding"]["table"] = (3 * table).at[EOS].multiply(2)
    whole = Config(model=config, data=DataConfig(max_length=24), search=search)
    return Model(whole, jax.tree.map(np.asarray, params), tokenizer)


def translated_alone(directory, lines):
    command = [sys.executable, "-c", ALONE.format(str(directory / "translate.py"))]
    done = subprocess.run(command, input="\n".join(lines).encode() + b"\n", capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split("\n")[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16_with_a_table_of_positions_and_a_forced_prefix"])
def test_a_directory_translates_alone_as_the_library_does(kind, tokenizer, tmp_path):
    dtype = kind.partition("_")[0]
    if dtype == "float32":
        model = make_model(tokenizer)
    else:
        search = SearchConfig(beam_size=2, forced_prefix=(7, 5), suppressed=(9,), min_length=4)
        model = make_model(tokenizer, search, positions=Positions.LEARNED, max_positions=20)
    stablehlo.write(model, tmp_path / "artifact", dtype=dtype)
    params = jax.tree.map(lambda leaf: leaf.astype(STORED[dtype]).astype(np.float32), model.params)
    translator = Translator(Transformer(model.config.model), params, tokenizer, model.config.data.max_length)
    expected = translator.best(LINES, model.config.search)
    assert len(set(expected)) > 2
    assert translated_alone(tmp_path / "artifact", LINES) == expected
    size = (tmp_path / "artifact" / "parameters.npz").stat().st_size
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert size < total * (1 if dtype == "float32" else 0.5) + 20_000


def test_a_program_is_for_three_platforms_and_any_number_of_rows(tokenizer, tmp_path):
    stablehlo.write(make_model(tokenizer, attention_kernel=AttentionKernel.CUDNN), tmp_path / "artifact")
    programs = sorted(tmp_path.glob("artifact/*.stablehlo"))
    assert [path.name for path in programs] == ["search_16.stablehlo", "search_24.stablehlo"]
    for path in programs:
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        assert program.platforms == ("cpu", "cuda", "tpu")
        assert not isinstance(program.in_avals[-1].shape[0], int)


@pytest.mark.parametrize(("longest", "expected"), [(8, [8]), (16, [16]), (17, [16, 17]), (64, [16, 32, 64])])
def test_lengths_double_up_to_the_longest(longest, expected):
    assert stablehlo.source_lengths(longest) == expected


def test_a_search_that_needs_keys_and_a_path_that_exists_are_refused(tokenizer, tmp_path):
    model = make_model(tokenizer)
    with pytest.raises(UserError, match="exists and is not written over"):
        stablehlo.write(model, tmp_path)
    config = dataclasses.replace(model.config, search=SearchConfig(method=SearchMethod.SAMPLE))
    with pytest.raises(UserError, match=r"search.method is sample"):
        stablehlo.write(model._replace(config=config), tmp_path / "artifact")
    assert not pathlib.Path(tmp_path, "artifact").exists()


def saved(tokenizer, directory):
    tokenizer.save(directory)
    return tokenizer


def numbered(tokenizer, directory):
    """The pieces of a model in another order, with a language tag."""
    model = tokenizer.source.files["model"]
    pieces = ["<unk>", "</s>", ">>de<<", *tokenizer.source.pieces[:2:-1]]
    vocabulary = renumbered(pieces, eos=1, unk=0, pad=None)
    return saved(Tokenizer(*[NumberedPieces(model, vocabulary, name="model")] * 2), directory)


def of_bytes(tokenizer, directory):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(LINES * 3, vocab_size=280, special_tokens=["<s>", "<pad>", "</s>", "<unk>"])
    post = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    trained._tokenizer.post_processor = post
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocabulary = renumbered(pieces[:-3], eos=2, unk=3, pad=None)
    return saved(Tokenizer(*[BytePieces(trained.to_str().encode(), vocabulary, name="bytes")] * 2), directory)


@pytest.mark.parametrize("kind", [saved, numbered, of_bytes])
def test_the_ids_and_texts_of_every_tokenizer_are_the_librarys(kind, tokenizer, tmp_path):
    library = kind(tokenizer, tmp_path / "tokenizer")
    lines = [*LINES, ">>de<< a cat", "Ein Käse für 3 €", "</s> <s>"]
    source, target = (standalone_translate.Side(tmp_path / "tokenizer", side) for side in ("source", "target"))
    ids = library.encode_source(lines)
    assert [source.encode(line) for line in lines] == ids
    assert [target.decode(one) for one in ids] == library.decode_target(ids)
