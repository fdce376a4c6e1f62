"""Properties of the tokenizer."""

import dataclasses
import io

import numpy as np
import pytest
import sentencepiece

from transformer_jax.batch import EOS, PAD
from transformer_jax.config import TokenizerConfig, TokenizerKind
from transformer_jax.data import tokenizer as tokenizer_module
from transformer_jax.data.corpus import Pair
from transformer_jax.data.phrasebook import phrases
from transformer_jax.data.tokenizer import Tokenizer, make_tokenizer, train_tokenizer
from transformer_jax.errors import UserError

PAIRS = [
    *(Pair(*phrase) for phrase in phrases("en", "de", split="train", size=600)),
    *(Pair(f"the tree has {n} m², about ½ …", f"Baum Nr. {n} hat {n} m², etwa\u00a0½ …") for n in range(20)),
]
JOINT = TokenizerConfig(vocab=250)
SEPARATE = dataclasses.replace(JOINT, joint=False)


@pytest.fixture(scope="module")
def joint() -> Tokenizer:
    return train_tokenizer(PAIRS, JOINT)


@pytest.fixture(scope="module")
def separate() -> Tokenizer:
    return train_tokenizer(PAIRS, SEPARATE)


def foreign_model(**ids: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(pair.source for pair in PAIRS), model_writer=model, vocab_size=150, minloglevel=2, **ids
    )
    return model.getvalue()


# Text and ids


@pytest.mark.parametrize("kind", list(TokenizerKind))
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_text_comes_back_as_it_went_in(kind, shared, byte_fallback):
    """All of it: NFKC would change ², ½, … and the no-break space."""
    vocab = 500 if byte_fallback else 250
    config = TokenizerConfig(kind=kind, joint=shared, vocab=vocab, byte_fallback=byte_fallback)
    tokenizer = train_tokenizer(PAIRS, config)
    assert (tokenizer.source_vocab, tokenizer.target_vocab) == (vocab, vocab)
    sources, targets = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]
    assert tokenizer.decode_source(tokenizer.encode_source(sources)) == sources
    assert tokenizer.decode_target(tokenizer.encode_target(targets)) == targets


def test_byte_fallback_keeps_characters_never_seen():
    tokenizer = train_tokenizer(PAIRS, TokenizerConfig(vocab=500, byte_fallback=True))
    lines = ["łódź 中文 🙂", "a\u2028b\tc", "\u0085 e\u0301"]
    assert tokenizer.decode_target(tokenizer.encode_target(lines)) == lines


def test_each_sequence_ends_with_the_only_eos_and_has_no_pad(joint):
    lines = ["the tree", "", "  ", "</s> <pad> <unk> \u2047", "never Seen 中文", "a\x00b"]
    for ids in joint.encode_source(lines):
        assert ids[-1] == EOS
        assert EOS not in ids[:-1]
        assert PAD not in ids


def test_runs_of_spaces_count_as_one(joint):
    assert joint.encode_source(["  the   tree "]) == joint.encode_source(["the tree"])


def test_nothing_after_eos_is_decoded(joint):
    (ids,) = joint.encode_target(["Baum"])
    assert joint.decode_target([ids + ids + [PAD, PAD], [EOS], []]) == ["Baum", "", ""]


@pytest.mark.parametrize("sampling", [0.0, 0.2])
def test_pairs_are_encoded_in_order_whatever_the_chunk(joint, monkeypatch, sampling):
    monkeypatch.setattr(tokenizer_module, "CHUNK", 7)
    encoded = list(joint.encode_pairs(iter(PAIRS), sampling=sampling, seed=3))
    assert joint.decode_source(source for source, _ in encoded) == [pair.source for pair in PAIRS]
    assert joint.decode_target(target for _, target in encoded) == [pair.target for pair in PAIRS]


def test_sampling_of_pairs_is_decided_by_the_seed(joint):
    draws = [list(joint.encode_pairs(PAIRS, sampling=0.2, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


# Training


@pytest.mark.parametrize("sample", [400, 2_000_000])
def test_training_is_deterministic(sample):
    config = dataclasses.replace(JOINT, sample=sample)
    assert train_tokenizer(iter(PAIRS), config).hash == train_tokenizer(iter(PAIRS), config).hash


def test_training_looks_at_the_sample_only(monkeypatch):
    """Beyond the first pairs too: the sample is drawn from the whole corpus."""
    config = dataclasses.replace(JOINT, sample=100, vocab=120)
    seen = []
    train = tokenizer_module._train

    def spy(lines, config):
        seen.extend(lines)
        return train(seen, config)

    monkeypatch.setattr(tokenizer_module, "_train", spy)
    train_tokenizer(iter(PAIRS), config)
    assert len(seen) == 100
    assert set(seen) - {line for pair in PAIRS[:50] for line in pair}


def test_every_part_of_the_corpus_is_as_likely_in_the_sample():
    pairs = [Pair(str(number), "") for number in range(20_000)]
    sample = tokenizer_module._sample(pairs, size=4_000)
    assert len(set(sample)) == 4_000
    counts, _ = np.histogram([int(pair.source) for pair in sample], bins=10, range=(0, 20_000))
    np.testing.assert_allclose(counts, 400, rtol=0.15)


def test_an_error_of_the_corpus_comes_through():
    def broken():
        yield PAIRS[0]
        raise UserError("train.en line 2")

    with pytest.raises(UserError, match=r"^train\.en line 2$"):
        train_tokenizer(broken(), JOINT)


@pytest.mark.parametrize("kind", list(TokenizerKind))
def test_a_vocabulary_too_large_names_the_field_and_the_largest(kind):
    config = dataclasses.replace(JOINT, kind=kind, vocab=8000)
    with pytest.raises(UserError, match=r"config\.data\.tokenizer\.vocab is 8,000.* at most [\d,]+") as error:
        train_tokenizer(PAIRS, config)
    most = int(str(error.value).split("at most ")[1].split()[0].replace(",", ""))
    assert train_tokenizer(PAIRS, dataclasses.replace(config, vocab=most)).source_vocab == most


def test_a_vocabulary_too_small_names_the_field():
    with pytest.raises(UserError, match=r"config\.data\.tokenizer\.vocab is 8, .*coverage"):
        train_tokenizer(PAIRS, dataclasses.replace(JOINT, vocab=8))


def test_no_text_is_an_error():
    with pytest.raises(UserError, match="no text"):
        train_tokenizer([], JOINT)


def test_training_is_silent(capfd):
    train_tokenizer(PAIRS, JOINT)
    assert capfd.readouterr() == ("", "")


# Files


@pytest.mark.parametrize("which", ["joint", "separate"])
def test_a_saved_tokenizer_loads_as_it_was(tmp_path, request, which):
    tokenizer = request.getfixturevalue(which)
    tokenizer.save(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    assert loaded.hash == tokenizer.hash
    assert loaded.joint == tokenizer.joint
    assert loaded.files == tokenizer.files
    with pytest.raises(UserError, match="not written over"):
        tokenizer.save(tmp_path / "tokenizer")


def test_separate_models_differ(separate):
    assert separate.files["source.model"] != separate.files["target.model"]
    assert separate.source is not separate.target


def test_a_changed_model_file_is_refused_by_name(tmp_path, joint):
    joint.save(tmp_path / "tokenizer")
    model = tmp_path / "tokenizer" / "joint.model"
    model.write_bytes(train_tokenizer(PAIRS[:100], JOINT).files["joint.model"])
    with pytest.raises(UserError, match=r"joint\.model has sha256 .*Restore it"):
        Tokenizer.load(tmp_path / "tokenizer")
    model.unlink()
    with pytest.raises(UserError, match=r"joint\.model: cannot be read"):
        Tokenizer.load(tmp_path / "tokenizer")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"../x": "0"}'])
def test_a_damaged_list_of_hashes_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_given_files_are_used_instead_of_training(tmp_path, joint, separate):
    joint.save(tmp_path / "joint")
    separate.save(tmp_path / "separate")
    file = str(tmp_path / "joint" / "joint.model")
    assert make_tokenizer([], TokenizerConfig(source_model=file)).hash == joint.hash
    both = {
        side: str(tmp_path / "separate" / f"{side.split('_')[0]}.model") for side in ("source_model", "target_model")
    }
    assert make_tokenizer([], TokenizerConfig(joint=False, **both)).hash == separate.hash
    with pytest.raises(UserError, match="different models"):
        make_tokenizer([], TokenizerConfig(joint=True, **both))
    with pytest.raises(UserError, match="target_model is not given"):
        make_tokenizer([], TokenizerConfig(joint=False, source_model=file))


def test_a_given_model_with_other_ids_is_refused(tmp_path):
    path = tmp_path / "marian.model"
    path.write_bytes(foreign_model(eos_id=0, unk_id=1, bos_id=-1))
    with pytest.raises(UserError, match=r"marian\.model: .* -1, 0, 1, -1; expected 0, 1, 2, -1"):
        make_tokenizer([], TokenizerConfig(source_model=str(path)))


def test_a_given_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    with pytest.raises(UserError, match=r"notes\.txt: not a SentencePiece model"):
        make_tokenizer([], TokenizerConfig(source_model=str(path)))
