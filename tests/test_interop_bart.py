"""BART against Hugging Face's own, with random weights and a byte-level BPE of a few lines."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import unpacked
from transformer_jax.config import Tying
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import bart
from transformer_jax.interop.__main__ import main
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import load_config, tokenizer_path

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are transformers' own

LINES = ["The cat sat on the mat.", " two  spaces ", "ein Käse für 3 €", "日本", "cats", "<mask> sat"]
SIZES = dict(d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)


def write_tokenizer(directory):
    trained = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(LINES * 3, vocab_size=290, min_frequency=1, special_tokens=special)
    trained.save_model(str(directory))
    return trained.get_vocab_size()


def make_theirs(vocab, **changes):
    options = dict(encoder_ffn_dim=24, decoder_ffn_dim=20, max_position_embeddings=40)
    config = transformers.BartConfig(vocab_size=vocab, **(SIZES | options | changes))
    torch.manual_seed(1)
    model = transformers.BartForConditionalGeneration(config).eval()
    model.generation_config.forced_bos_token_id = 0
    with torch.no_grad():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        model.final_logits_bias.normal_(std=0.5)
        model.final_logits_bias[0, 2] += 2.0  # so that some hypotheses end
    return model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bart")
    make_theirs(write_tokenizer(directory)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(directory):
    return transformers.BartForConditionalGeneration.from_pretrained(directory).eval()


@pytest.fixture(scope="module")
def their_tokenizer(directory):
    return transformers.BartTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def run(directory, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    assert main(["import", str(directory), "--workdir", str(run)]) == 0
    return run


def to_ours(ids):
    """Their ids as this library's: EOS 1, <unk> 2, <s> 3, <pad> 4, others moved by one."""
    return [{0: 3, 1: 4, 2: 1, 3: 2}.get(token, token + 1) for token in ids]


def test_text_has_the_ids_of_their_tokenizer_and_comes_back(run, their_tokenizer):
    ours = Tokenizer.load(tokenizer_path(run))
    expected = [to_ours(ids) for ids in their_tokenizer(LINES)["input_ids"]]
    assert ours.encode_source(LINES) == expected
    assert all(row[0] == 3 and row[-1] == 1 for row in expected)
    assert ours.decode_target(expected)[:5] == LINES[:5]


def assert_same_logits(model, theirs):
    config, params, _ = model
    rng = np.random.default_rng(0)
    source = [[0, *rng.integers(4, 250, size=size), 2] for size in (7, 3)]
    target = [[0, *rng.integers(4, 250, size=size), 2] for size in (3, 6)]
    found = jax.jit(Transformer(config.model).apply)(
        params, unpacked(*(jnp.asarray(padded(map(to_ours, rows)), jnp.int32) for rows in (source, target)))
    )
    for row, (one, other) in enumerate(zip(source, target, strict=True)):
        with torch.no_grad():
            expected = theirs(torch.tensor([one]), decoder_input_ids=torch.tensor([[2, *other[:-1]]])).logits[0]
        columns = to_ours(range(expected.shape[-1]))
        np.testing.assert_allclose(np.asarray(found)[row, : len(other), columns].T, expected.numpy(), atol=1e-4)


def padded(rows):
    rows = list(rows)
    return [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]


def test_logits_are_theirs(directory, theirs):
    assert_same_logits(bart.read(directory).model, theirs)


@pytest.mark.parametrize("kind", ["untied", "base_model_in_a_pickle", "scaled", "fewer_rows"])
def test_other_forms_of_the_model_have_their_logits_too(kind, directory, tmp_path):
    vocab = write_tokenizer(tmp_path)
    changes = {"untied": dict(tie_word_embeddings=False), "scaled": dict(scale_embedding=True)}
    theirs = make_theirs(vocab - (kind == "fewer_rows"), activation_function="gelu_new", **changes.get(kind, {}))
    theirs.save_pretrained(tmp_path)
    if kind == "base_model_in_a_pickle":
        theirs.final_logits_bias.zero_()
        (tmp_path / "model.safetensors").unlink()
        torch.save(theirs.model.state_dict(), tmp_path / "pytorch_model.bin")
    model = bart.read(tmp_path).model
    assert model.config.model.tying == (Tying.NONE if kind == "untied" else Tying.ALL)
    assert_same_logits(model, theirs)


def generated(theirs, their_tokenizer, line, **options):
    """What `generate` writes after the start, EOS included."""
    ids = torch.tensor([their_tokenizer(line)["input_ids"]])
    ids = theirs.generate(ids, do_sample=False, length_penalty=1.0, **options)[0].tolist()[1:]
    return ids[: ids.index(2) + 1] if 2 in ids else ids


def test_translations_are_those_of_generate(run, theirs, their_tokenizer):
    search = dataclasses.replace(load_config(run).search, extra_length=12)
    assert (search.beam_size, search.forced_prefix) == (1, (3,))
    found = Translator.load(str(run)).translate(LINES, search)
    for line, (best,) in zip(LINES, found, strict=True):
        expected = generated(theirs, their_tokenizer, line, max_length=14)
        expected = expected if best.finished else expected[:-1]  # they force EOS at the limit
        assert list(best.tokens) == to_ours(expected)
        assert best.text == their_tokenizer.decode(expected, skip_special_tokens=True)


def test_a_beam_finds_what_theirs_finds(tmp_path):
    theirs = make_theirs(write_tokenizer(tmp_path), tie_word_embeddings=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in theirs.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        theirs.lm_head.weight.normal_(std=1.0)
        theirs.final_logits_bias[0, 2] = 5.5
    # Forced tokens cost nothing there, and their log-probability here.
    theirs.generation_config.forced_bos_token_id = theirs.generation_config.forced_eos_token_id = None
    theirs.config.forced_eos_token_id = None
    theirs.save_pretrained(tmp_path)
    their_tokenizer = transformers.BartTokenizer.from_pretrained(tmp_path)
    config, params, tokenizer = bart.read(tmp_path).model
    search = dataclasses.replace(config.search, beam_size=4, extra_length=12)
    # Theirs keeps four hypotheses alive when some have ended, which makes a difference to 日本.
    lines = [line for line in LINES if line != "日本"]
    found = Translator(Transformer(config.model), params, tokenizer).translate(lines, search)
    assert {best.finished for (best,) in found} == {True}
    for line, (best,) in zip(lines, found, strict=True):
        options = dict(max_length=13, num_beams=4, early_stopping="never")
        assert list(best.tokens) == to_ours(generated(theirs, their_tokenizer, line, **options))
        assert len(best.tokens) > 2


def test_the_search_is_that_of_the_generation_config(directory, tmp_path):
    generation = dict(num_beams=4, length_penalty=2.0, max_length=142, min_length=56, no_repeat_ngram_size=3)
    edited(directory, tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    search = bart.read(tmp_path).model.config.search
    assert (search.beam_size, search.alpha, search.penalty, search.no_repeat_ngram) == (4, 2.0, "power", 3)
    assert (search.length_factor, search.forced_prefix) == (0.0, (3,))


@pytest.mark.parametrize("least", [3, 6])
def test_the_least_length_is_theirs(least, directory, theirs, their_tokenizer, tmp_path):
    edited(directory, tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"min_length": least, "max_length": 14}))
    config, params, tokenizer = bart.read(tmp_path).model
    params["params"]["output_bias"][1] += 9  # EOS, which is now the best everywhere
    theirs.final_logits_bias[0, 2] += 9
    try:
        expected = generated(theirs, their_tokenizer, "cats", min_length=least, max_length=14)
    finally:
        theirs.final_logits_bias[0, 2] -= 9
    ((best,),) = Translator(Transformer(config.model), params, tokenizer).translate(["cats"], config.search)
    assert list(best.tokens) == to_ours(expected)
    assert len(best.tokens) == least


def edited(directory, target, **changes):
    """A copy of the directory with other fields in its config.json."""
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="mbart"), "model_type is 'mbart'"),
        (dict(normalize_before=True), "normalize_before is True"),
        (dict(activation_function="tanh"), "activation_function is 'tanh'"),
        (dict(decoder_attention_heads=4), "decoder_attention_heads is 4"),
        (dict(encoder_layers=3), "encoder_layers is 3; the weights have 2"),
        (dict(vocab_size=12), "vocab_size and d_model"),
        (dict(max_position_embeddings=41), "embed_positions.weight has shape .42, 16."),
        (dict(encoder_ffn_dim=20), "fc1.weight has shape .24, 16."),
        (dict(eos_token_id=7), "eos_token_id is 7; the tokenizer gives </s> the id 2"),
        (dict(d_model="wide"), "d_model is 'wide'"),
    ],
)
def test_a_configuration_of_another_model_is_refused_by_its_field(changes, message, directory, tmp_path):
    with pytest.raises(UserError, match=message):
        bart.read(edited(directory, tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", "model.safetensors"),
        ("vocab.json", b"{}", "vocab.json: not BART's tokenizer"),
        ("vocab.json", b'{"a": 1, "a": 2}', "comes twice"),
        ("merges.txt", b"#version: 0.2\na b c\n", "merges.txt line 2"),
        ("tokenizer.json", b"{}", "tokenizer.json: not BART's"),
        ("config.json", b"[", "config.json: not JSON"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(name, content, message, directory, tmp_path):
    edited(directory, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        bart.read(tmp_path)
