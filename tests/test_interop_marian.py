"""Marian's files: every kind of model gives the logits of an independent reader, and what is wrong is said by name."""

import json
import pathlib
import pickle

import numpy as np
import pytest
from interop_models import (
    LINES,
    PAIRS,
    D,
    joint_pieces,
    marian_options,
    marian_weights,
    own_pieces,
    sentence_model,
    write_marian,
)

from transformer_jax.batch import EOS, UNK
from transformer_jax.config import SearchConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import marian
from transformer_jax.interop.__main__ import main
from transformer_jax.interop.marian import read
from transformer_jax.interop.vocab_yml import read_vocabulary
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import flat

JOINT = (joint_pieces(), joint_pieces())
SEPARATE = (own_pieces("source"), own_pieces("target"))
DATA = pathlib.Path(__file__).parent.parent.parent / "shared" / "data" / "marian_multi30k_de_en"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the real models are not here (shared/data)")

MODELS = {
    "all tied": (JOINT, {"tied": "all"}, {}),
    "inputs tied": (JOINT, {"tied": "src"}, {"transformer_ffn_activation": "relu"}),
    "output tied": (SEPARATE, {"tied": "out", "pre": True}, {}),
    "untied": (SEPARATE, {"tied": "none"}, {"transformer_ffn_activation": "gelu"}),
    "embedding norm": (JOINT, {"embedding_norm": True}, {"transformer_postprocess_emb": "nd"}),
}


def sizes(pieces):
    return len(pieces[0]), len(pieces[1])


def write_model(directory, pieces=JOINT, weights=None, options=None, **others):
    weights = dict(weights or {})
    named = {name: value for name, value in weights.items() if name != "embedding_norm"}
    write_marian(
        directory,
        marian_weights(vocab=sizes(pieces), **weights),
        marian_options(vocab=sizes(pieces), **named, **(options or {})),
        pieces,
        **others,
    )
    return directory


@pytest.mark.parametrize(("pieces", "weights", "options"), MODELS.values(), ids=MODELS.keys())
def test_log_probabilities_equal_those_of_ctranslate2s_reader(tmp_path, monkeypatch, pieces, weights, options):
    """It makes sinusoids of its own, so it is given Marian's."""
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed: pip install -e '.[peers]'")
    from ctranslate2.converters import marian as converter

    def table(dim, num_positions=200):
        angles = np.arange(num_positions)[:, None] * 10_000.0 ** (-np.arange(dim // 2) / (dim // 2 - 1))
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)

    monkeypatch.setattr(converter, "_make_sinusoidal_position_encodings", table)
    write_model(tmp_path / "marian", pieces, weights, options, nuls=1)  # that reader takes off one
    vocabularies = ["vocab.yml"] if pieces[0] == pieces[1] else ["m.src.vocab.yml", "m.trg.vocab.yml"]
    paths = [str(tmp_path / "marian" / name) for name in vocabularies]
    reader = converter.MarianConverter(str(tmp_path / "marian" / "model.npz"), paths)
    reader.convert(str(tmp_path / "ct2"))
    settings = json.loads((tmp_path / "ct2" / "config.json").read_text())
    settings["layer_norm_epsilon"] = 1e-6  # Marian's; that reader leaves it at 1e-5
    (tmp_path / "ct2" / "config.json").write_text(json.dumps(settings))

    model = read(tmp_path / "marian").model
    tokenizer = model.tokenizer
    sources, targets = tokenizer.encode_source(LINES), tokenizer.encode_target([pair.target for pair in PAIRS[:6]])
    in_pieces = [
        [[side.id_to_piece(token) for token in ids[:-1]] for ids in lines]
        for side, lines in ((tokenizer.source, sources), (tokenizer.target, targets))
    ]
    theirs = ctranslate2.Translator(str(tmp_path / "ct2"), compute_type="float32", inter_threads=1, intra_threads=1)
    expected = [sum(one.log_probs) for one in theirs.score_batch(*in_pieces)]
    translator = Translator(Transformer(model.config.model), model.params, tokenizer)
    found = [one.log_prob for one in translator.score(LINES, targets, SearchConfig())]
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_ids_are_ours_and_the_numbers_they_came_with_are_kept(tmp_path):
    tokenizer = read(write_model(tmp_path / "m")).model.tokenizer
    vocabulary = tokenizer.source.vocabulary
    assert vocabulary.pieces[EOS] == "</s>"
    assert vocabulary.pieces[UNK] == "<unk>"
    assert vocabulary.ids[0] is None
    pieces = joint_pieces()
    assert sorted(number for number in vocabulary.ids if number is not None) == list(range(len(pieces)))
    assert all(pieces[n] == piece for piece, n in zip(vocabulary.pieces, vocabulary.ids, strict=True) if n is not None)


def test_layers_tied_in_marian_are_copies(tmp_path):
    weights = {
        name: tensor
        for name, tensor in marian_weights(vocab=sizes(JOINT)).items()
        if not name.startswith("decoder_l1_")  # no layer is this one
    }
    options = marian_options(vocab=sizes(JOINT), transformer_tied_layers=[2, 2])
    write_marian(tmp_path / "m", weights, options, JOINT)
    model = read(tmp_path / "m").model
    leaves = flat(model.params)
    for path in (path for path in leaves if path.startswith("decoder/layers_0/")):
        np.testing.assert_array_equal(leaves[path], leaves[path.replace("layers_0", "layers_1")])


# What is wrong is said by name

REFUSED = {
    "type": "amun",
    "transformer_decoder_autoreg": "rnn",
    "transformer_no_projection": True,
    "transformer_ffn_depth": 3,
    "transformer_postprocess": "dhn",
    "transformer_ffn_activation": "tanh",
    "transformer_postprocess_emb": "nn",
    "lemma_dim_emb": 4,
    "right_left": True,
    "input_types": ["alignment"],
    "dim_vocabs": [9, 9, 9],
    "dim_emb": D + 2,
    "enc_depth": 10**9,
    "transformer_tied_layers": [1],
}


@pytest.mark.parametrize(("option", "value"), REFUSED.items())
def test_options_that_are_not_covered_are_refused_by_name(tmp_path, option, value):
    write_marian(
        tmp_path,
        marian_weights(vocab=sizes(JOINT)),
        {**marian_options(vocab=sizes(JOINT)), option.replace("_", "-"): value},
        JOINT,
    )
    with pytest.raises(UserError, match=rf"special:model\.yml: {option.replace('_', '-')} is "):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("encoder_l1_self_Wq"), "encoder_l1_self_Wq is missing"),
        (lambda weights: weights.update(Wtype=np.ones((2, D))), "has not: Wtype"),
        (lambda weights: weights.update(decoder_l1_ffn_W1=np.ones((D, 7))), "decoder_l1_ffn_W1 has shape"),
        (lambda weights: weights.update(decoder_l1_ffn_b1=np.full((1, 24), np.nan)), "decoder_l1_ffn_b1 .*not finite"),
        (lambda weights: weights.pop("Wemb"), "Wemb is missing"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, change, message):
    weights = marian_weights(vocab=sizes(JOINT))
    change(weights)
    write_marian(tmp_path, weights, marian_options(vocab=sizes(JOINT)), JOINT)
    with pytest.raises(UserError, match=rf"model\.npz: .*{message}"):
        read(tmp_path)


def test_a_pickle_is_not_executed(tmp_path):
    """An array of objects in an .npz is a pickle."""
    mark = tmp_path / "executed"

    class Evil:
        def __reduce__(self):
            return (pathlib.Path.touch, (mark,))

    write_model(tmp_path / "m")
    np.savez(tmp_path / "m" / "model.npz", Wemb=np.array([Evil()], dtype=object))
    mark.unlink(missing_ok=True)  # saving pickles only; to be sure
    with pytest.raises(UserError, match=r"model\.npz: not a whole \.npz"):
        read(tmp_path / "m")
    (tmp_path / "m" / "model.npz").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"model\.npz: not a whole \.npz"):
        read(tmp_path / "m")
    assert not mark.exists()


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_truncated_file_is_refused(tmp_path, size):
    write_model(tmp_path / "m")
    path = tmp_path / "m" / "model.npz"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"model\.npz: not a whole \.npz"):
        read(tmp_path / "m")


@pytest.mark.parametrize("name", ["vocab.yml", "source.spm", "target.spm", "model.npz"])
def test_a_missing_file_is_named(tmp_path, name, capsys):
    write_model(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    if name == "vocab.yml":
        (tmp_path / "m" / "a.vocab.txt").touch()
        (tmp_path / "m" / "source.spm").rename(tmp_path / "m" / "other.spm")
    arguments = ["import", str(tmp_path / "m"), "--workdir", str(tmp_path / "run"), "--kind", "marian"]
    assert main(arguments) == 2
    assert name.split(".")[-1] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Vocabularies


def test_all_that_marian_escapes_comes_back(tmp_path):
    pieces = [
        "</s>",
        "<unk>",
        ":",
        '"',
        "'",
        "\\",
        "#",
        "-",
        "? x",
        "\u2028",
        "\x85",
        "\x01",
        "~",
        "yes",
        "1",
        " ",
        "▁é",
    ]
    quoted = [json.dumps(piece) for piece in pieces]  # JSON's escapes are YAML's
    text = "".join(f"{piece}: {number}\n" for number, piece in enumerate(quoted))
    (tmp_path / "vocab.yml").write_text(text, encoding="utf-8")
    assert read_vocabulary(tmp_path / "vocab.yml") == pieces


def test_other_spellings_are_read(tmp_path):
    text = "</s>: 0\r\n'it''s': 1\n? long\n: 2\n\"\\x41\\u00e9\": 3\n\u2028: 4\na:b: 5\n"
    (tmp_path / "vocab.yml").write_bytes(text.encode())
    assert read_vocabulary(tmp_path / "vocab.yml") == ["</s>", "it's", "long", "Aé", "\u2028", "a:b"]
    (tmp_path / "vocab.spm").write_bytes(sentence_model("source"))
    assert tuple(read_vocabulary(tmp_path / "vocab.spm")) == own_pieces("source")
    (tmp_path / "vocab.txt").write_text("</s>\n<unk>\na\n")
    assert read_vocabulary(tmp_path / "vocab.txt") == ["</s>", "<unk>", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 0\nb: 1\na: 2\n", r"line 3: the piece 'a' comes twice, first in line 1"),
        ("a: 0\nb: 0\n", r"line 2: 'b' has the id 0, which 'a' has"),
        ("a: 0\nb: 2\n", r"no piece has the id 1"),
        ("a: 0\nb\n", r"line 2: expected `piece: id`, found 'b'"),
        ("a: 0\nb: x\n", r"line 2: expected"),
        ("", r"no piece has the id 0"),
        ('"\\q": 0\n', r"line 1: unknown escape"),
    ],
)
def test_a_bad_vocabulary_names_its_line(tmp_path, text, message):
    (tmp_path / "vocab.yml").write_text(text)
    with pytest.raises(UserError, match=rf"vocab\.yml.*{message}"):
        read_vocabulary(tmp_path / "vocab.yml")


def test_the_search_is_that_of_decoder_yml(tmp_path):
    directory = write_model(tmp_path / "m")
    (directory / "decoder.yml").write_text(
        "models:\n  - /there/model.npz\nvocabs:\n  - vocab.yml\n  - vocab.yml\nbeam-size: 6\nnormalize: 0.8\n"
    )
    search = read(directory).model.config.search
    assert (search.beam_size, search.alpha, search.length_factor, search.suppressed) == (6, 0.8, 3.0, (UNK,))


# The real model


@needs_data
@pytest.mark.slow
def test_the_real_model_translates_as_marian_does(tmp_path):
    lines = (DATA.parent / "multi30k" / "test_2016_flickr.de").read_text(encoding="utf-8").split("\n")[:5]
    expected = (DATA / "outputs" / "marian_greedy.en").read_text(encoding="utf-8").split("\n")[:5]
    nbest = (DATA / "outputs" / "marian_greedy.nbest.pieces").read_text(encoding="utf-8").split("\n")[:5]
    assert main(["import", str(DATA / "marian"), "--workdir", str(tmp_path / "run")]) == 0
    translator = Translator.load(str(tmp_path / "run"))
    search = marian.search_config({"beam-size": 1, "normalize": 0})
    found = [n_best[0] for n_best in translator.translate(lines, search)]
    assert [one.text for one in found] == expected
    scores = [float(line.split(" ||| ")[3]) for line in nbest]
    np.testing.assert_allclose([one.score for one in found], scores, atol=1e-3)
