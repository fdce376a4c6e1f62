"""Texts which translations shall have, forced prefixes and constraints → tokens → arrays of few shapes."""

from collections.abc import Sequence

import numpy as np

from transformer_jax.batch import EOS, PAD
from transformer_jax.data.tokenizer import Tokenizer

Phrase = tuple[int, ...]

ANCHOR = "a"  # a word for a phrase to stand behind


def prefix_tokens(text: str, tokenizer: Tokenizer) -> Phrase:
    """The tokens of a text with which a translation begins. Space at its end is lost, as in any text."""
    return _tokens(text, tokenizer) if text.strip() else ()


def phrase_tokens(text: str, tokenizer: Tokenizer) -> Phrase:
    """The tokens of a text as it stands inside a sentence, behind a word and a space.

    At the beginning of a sentence other tokenizers than SentencePiece may cut it in another way.
    """
    if not text.strip():
        return ()
    anchor, behind = _tokens(ANCHOR, tokenizer), _tokens(f"{ANCHOR} {text.strip()}", tokenizer)
    return behind[len(anchor) :] if behind[: len(anchor)] == anchor else _tokens(text.strip(), tokenizer)


def stack_prefixes(prefixes: Sequence[Phrase], *, rows: int) -> np.ndarray | None:
    """int32 [rows, P], padded; None if there are none."""
    if not any(prefixes):
        return None
    ids = np.full((rows, _padded(max(map(len, prefixes)))), PAD, np.int32)
    for row, prefix in enumerate(prefixes):
        ids[row, : len(prefix)] = prefix
    return ids


def stack_constraints(constraints: Sequence[Sequence[Phrase]], *, rows: int) -> np.ndarray | None:
    """The phrases of each sentence as int32 [rows, C, P], padded; None if there are none."""
    if not any(constraints):
        return None
    longest = max(len(phrase) for phrases in constraints for phrase in phrases)
    ids = np.full((rows, _padded(max(map(len, constraints))), _padded(longest)), PAD, np.int32)
    for row, phrases in enumerate(constraints):
        for number, phrase in enumerate(phrases):
            ids[row, number, : len(phrase)] = phrase
    return ids


def _tokens(text: str, tokenizer: Tokenizer) -> Phrase:
    (ids,) = tokenizer.encode_target([text])
    return tuple(int(token) for token in ids if token != EOS)


def _padded(size: int) -> int:
    """The next power of two, so that few programs are compiled."""
    return 1 << (size - 1).bit_length()
