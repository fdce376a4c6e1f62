"""Lengths of sentences → batches within a budget of tokens, in few shapes, each of which is one compiled program."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.batch import PAD


class SentenceBatch(NamedTuple):
    sentences: list[int]  # index of each row's sentence; further rows are padding
    rows: int  # B
    length: int  # S


def sentence_batches(lengths: Sequence[int], *, tokens: int, longest: int | None = None) -> list[SentenceBatch]:
    """Batches of sentences of similar length, the longest first, with rows × padded length ≤ `tokens`.

    A sentence which alone is longer gets a batch of its own. None is padded beyond `longest`.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches = []
    while order:
        length = padded_length(lengths[order[0]])
        length = length if longest is None else min(length, longest)
        most = max(1, tokens // length)
        taken, order = order[:most], order[most:]
        batches.append(SentenceBatch(taken, min(power_of_two(len(taken)), most), length))
    return batches


def padded_length(length: int) -> int:
    """The next of 8, 16, 24, 32, 48, 64, 96, 128, …: powers of two and their halfway points."""
    power = max(8, power_of_two(length))
    halfway = power * 3 // 4
    return halfway if power > 16 and length <= halfway else power


def stack(sequences: Sequence[Sequence[int]], *, rows: int, length: int) -> np.ndarray:
    """Sequences of ids as int32 [rows, length], padded on the right and below."""
    ids = np.full((rows, length), PAD, np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return ids


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
