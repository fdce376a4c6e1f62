"""Properties of subword sampling."""

import collections
import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest

from transformer_jax.config import TokenizerConfig, TokenizerKind
from transformer_jax.data.corpus import Pair
from transformer_jax.data.phrasebook import phrases
from transformer_jax.data.segmenters import MODEL
from transformer_jax.data.subwords import UNKNOWN_PENALTY, SubwordSampler, bpe_cut, unigram_cut
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.errors import UserError

PIECES = {"a": -1.0, "b": -2.0, "ab": -2.5, "ba": -2.2, "aba": -3.5, "bb": -4.0}
PAIRS = [Pair(*phrase) for phrase in phrases("en", "de", split="train", size=600)]
ODD = ["", "  ", "中文字 x", "a\u00a0b", "</s> <pad>", "a▁b", "\u2028", "Nummer  7 "]


def segmentations(word: str) -> list[tuple[str, ...]]:
    """Every way to cut the word into one or more parts."""
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(word)), n) for n in range(len(word)))
    return [tuple(word[i:j] for i, j in itertools.pairwise((0, *cut, len(word)))) for cut in cuts]


def model(kind: TokenizerKind) -> bytes:
    return train_tokenizer(PAIRS, TokenizerConfig(kind=kind, vocab=250)).source.files[MODEL]


MODELS = [
    (kind, 500 if byte_fallback else 250, byte_fallback) for kind in TokenizerKind for byte_fallback in (False, True)
]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("word", ["abab", "bbab", "axb"])
def test_unigram_segmentations_come_as_often_as_their_probability_to_the_alpha(word, alpha):
    scores = PIECES | {"x": min(PIECES.values()) - UNKNOWN_PENALTY}
    ways = [way for way in segmentations(word) if all(piece in scores for piece in way)]
    weights = np.array([math.exp(alpha * sum(scores[piece] for piece in way)) for way in ways])
    cut, draw, draws = unigram_cut(PIECES, alpha=alpha), random.Random(0), 20_000
    counts = collections.Counter(tuple(cut(word, draw)) for _ in range(draws))
    assert set(counts) <= set(ways)
    np.testing.assert_allclose([counts[way] / draws for way in ways], weights / weights.sum(), atol=0.012)


def test_bpe_dropout_of_two_letters_has_probability_p():
    cut, draw, draws = bpe_cut({"a": 0.0, "b": 0.0, "ab": -1.0}, dropout=0.3), random.Random(0), 20_000
    apart = sum(cut("ab", draw) == ["a", "b"] for _ in range(draws))
    assert apart / draws == pytest.approx(0.3, abs=0.012)


def test_bpe_dropout_of_one_leaves_characters():
    assert bpe_cut({"ab": 0.0, "abc": -1.0}, dropout=1.0)("abc", random.Random(0)) == ["a", "b", "c"]


@pytest.mark.parametrize(("kind", "vocab", "byte_fallback"), MODELS)
def test_without_randomness_it_is_what_sentencepiece_does(kind, vocab, byte_fallback):
    """No dropout, or α so large that only the best segmentation has weight."""
    tokenizer = train_tokenizer(PAIRS, TokenizerConfig(kind=kind, vocab=vocab, byte_fallback=byte_fallback))
    sampler = SubwordSampler(tokenizer.source.files[MODEL], sampling=1e4 if kind is TokenizerKind.UNIGRAM else 0.0)
    lines = [line for pair in PAIRS for line in pair] + ODD
    assert sampler.encode(lines, seed=0) == tokenizer.encode_source(lines)


@pytest.mark.parametrize(("kind", "vocab", "byte_fallback"), MODELS)
def test_sampled_ids_are_other_ids_of_the_same_text(kind, vocab, byte_fallback):
    tokenizer = train_tokenizer(PAIRS, TokenizerConfig(kind=kind, vocab=vocab, byte_fallback=byte_fallback))
    lines = [pair.target for pair in PAIRS]
    sampled = tokenizer.encode_target(lines, sampling=0.2, seed=1)
    assert sampled != tokenizer.encode_target(lines)
    assert sampled != tokenizer.encode_target(lines, sampling=0.2, seed=2)
    assert tokenizer.decode_target(sampled) == lines


@pytest.mark.parametrize("kind", list(TokenizerKind))
def test_a_seed_means_the_same_in_every_process(tmp_path, kind):
    """SentencePiece's own sampling fails this: it salts the seed in each process."""
    path = tmp_path / "joint.model"
    path.write_bytes(model(kind))
    code = (
        "import pathlib, sys; from transformer_jax.data.subwords import SubwordSampler;"
        "sampler = SubwordSampler(pathlib.Path(sys.argv[1]).read_bytes(), sampling=0.3);"
        "print(sampler.encode(['der big houses number 12'] * 50, seed=4))"
    )
    outputs = {subprocess.check_output([sys.executable, "-c", code, str(path)]) for _ in range(2)}
    assert len(outputs) == 1


def test_other_kinds_of_model_are_refused():
    from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec

    proto = ModelProto.FromString(model(TokenizerKind.UNIGRAM))
    proto.trainer_spec.model_type = TrainerSpec.CHAR
    with pytest.raises(UserError, match=r"config\.data\.tokenizer\.sampling"):
        SubwordSampler(proto.SerializeToString(), sampling=0.1)
