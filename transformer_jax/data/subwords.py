"""Subword sampling: a line is cut into the pieces of its SentencePiece model at random, for training.

Unigram models: a segmentation x is drawn with probability ∝ P(x)^α from all of them (Kudo, 2018, section 3.2).
BPE models: before each merge, every merge that could be made is left out with probability p (BPE-dropout: Provilkov
et al., 2020, algorithm 1. SentencePiece leaves it out for good, so the same p cuts finer there).

SentencePiece can do both, but its generator of random numbers is salted by each process: after a resume, or on another
host, the same seed would cut the same corpus in another way, and the batches would differ.
"""

import bisect
import functools
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # type: ignore[attr-defined]

from transformer_jax.errors import UserError

Cut = Callable[[str, random.Random], list[str]]  # a word → pieces that make it up

SPACE = "▁"  # what SentencePiece writes for a space
CACHED_WORDS = 1 << 16
LONGEST_WORD = 256  # characters that merges look at together: the time they take grows with the square of that
UNKNOWN_PENALTY = 10.0  # an unknown character scores this much below the least likely piece, as in SentencePiece


class SubwordSampler:
    """Draws segmentations from a model; `sampling` is α of a unigram model or p of a BPE model.

    Raises:
      UserError: if the model is of another kind.
    """

    def __init__(self, model: bytes, *, sampling: float):
        proto = ModelProto.FromString(model)
        usable = {proto.SentencePiece.NORMAL, proto.SentencePiece.USER_DEFINED}
        self._scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in usable}
        self._processor = SentencePieceProcessor(model_proto=model)
        self._bytes = proto.trainer_spec.byte_fallback
        self._ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        # No piece goes over the end of a word, so that the words of a line are drawn apart; if one does, a line is one.
        across_words = any(SPACE in piece[1:] for piece in self._scores)
        self._words = re.compile(".+" if across_words else f"{SPACE}?[^{SPACE}]+|{SPACE}", re.DOTALL)
        self._cut = _cut(proto.trainer_spec.model_type, self._scores, sampling)

    def encode(self, lines: Sequence[str], *, seed: int) -> list[list[int]]:
        """The ids of each line, EOS last: the same for the same lines and seed, on every machine."""
        draw = random.Random(seed)
        return [self._encode(line, draw) for line in lines]

    def _encode(self, line: str, draw: random.Random) -> list[int]:
        words = self._words.findall(self._processor.normalize(line))
        ids = [token for word in words for piece in self._cut(word, draw) for token in self._piece_ids(piece)]
        unknown = self._processor.unk_id()  # a run of unknown characters is one token
        ids = [token for token, before in zip(ids, [None, *ids], strict=False) if not token == before == unknown]
        return [*ids, self._processor.eos_id()]

    def _piece_ids(self, piece: str) -> list[int]:
        if piece in self._scores:
            return [self._ids[piece]]
        if self._bytes:
            return [self._ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return [self._processor.unk_id()]


def _cut(model_type: int, scores: dict[str, float], sampling: float) -> Cut:
    if model_type == TrainerSpec.UNIGRAM:
        return unigram_cut(scores, alpha=sampling)
    if model_type == TrainerSpec.BPE:
        return bpe_cut(scores, dropout=sampling)
    raise UserError(
        "config.data.tokenizer.sampling needs a unigram or BPE model, but the given one is of another kind. "
        "Set it to 0, or give another model."
    )


def unigram_cut(scores: dict[str, float], *, alpha: float) -> Cut:
    """Forward filtering, backward sampling. `scores` are the log-probabilities of the pieces."""
    longest = max(map(len, scores))
    unknown = min(scores.values()) - UNKNOWN_PENALTY

    @functools.lru_cache(CACHED_WORDS)
    def last_pieces(word: str) -> list[tuple[list[int], list[float]]]:
        """For each end in the word: where its last piece may start, and the cumulative probabilities of that."""
        total = [0.0]  # log of the summed weight of all segmentations up to each end
        table: list[tuple[list[int], list[float]]] = [([], [])]
        for end in range(1, len(word) + 1):
            starts, weights = [], []
            for start in range(max(0, end - longest), end):
                score = scores.get(word[start:end], unknown if start == end - 1 else None)
                if score is not None:
                    starts.append(start)
                    weights.append(total[start] + alpha * score)
            highest = max(weights)
            cumulative = list(itertools.accumulate(math.exp(weight - highest) for weight in weights))
            total.append(highest + math.log(cumulative[-1]))
            table.append((starts, cumulative))
        return table

    def cut(word: str, draw: random.Random) -> list[str]:
        table, pieces, end = last_pieces(word), [], len(word)
        while end:
            starts, cumulative = table[end]
            start = starts[bisect.bisect(cumulative, draw.random() * cumulative[-1], hi=len(starts) - 1)]
            pieces.append(word[start:end])
            end = start
        return pieces[::-1]

    return cut


def bpe_cut(scores: dict[str, float], *, dropout: float) -> Cut:
    """BPE-dropout. The merge with the highest of `scores` goes first, the leftmost of equal ones."""

    def cut(word: str, draw: random.Random) -> list[str]:
        parts = (word[start : start + LONGEST_WORD] for start in range(0, len(word), LONGEST_WORD))
        return [piece for part in parts for piece in merged(part, draw)]

    def merged(word: str, draw: random.Random) -> list[str]:
        pieces = list(word)
        while True:
            merges = [
                (-scores[merged], place)
                for place, merged in enumerate(map("".join, itertools.pairwise(pieces)))
                if merged in scores and draw.random() >= dropout
            ]
            if not merges:
                return pieces
            _, place = min(merges)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]

    return cut
