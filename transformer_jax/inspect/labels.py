"""What stands on the axes: the pieces of a vocabulary, one for each token."""

from collections.abc import Sequence

import numpy as np

from transformer_jax.batch import EOS, PAD
from transformer_jax.data.segmenters import BytePieces, Segmenter
from transformer_jax.data.subwords import SPACE
from transformer_jax.data.tokenizer import Tokenizer

BOS_LABEL, EOS_LABEL = "<bos>", "<eos>"


def source_labels(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The source pieces of these ids; a leading `▁` stands for a space, as in SentencePiece."""
    return [_label(tokenizer.source, int(token)) for token in ids]


def target_labels(tokenizer: Tokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The target pieces of these ids; id 0, with which the decoder starts, is `<bos>`."""
    return [_label(tokenizer.target, int(token)) for token in ids]


def _label(segmenter: Segmenter, token: int) -> str:
    named = {PAD: BOS_LABEL, EOS: EOS_LABEL}
    if token in named:
        return named[token]
    if isinstance(segmenter, BytePieces):  # whose pieces are bytes in disguise
        return segmenter.decode([[token]])[0].replace(" ", SPACE)
    return segmenter.id_to_piece(token)


def find_token(labels: Sequence[str], word: str) -> int:
    """The place of the last token that reads `word` or begins with it; −1 if there is none."""
    bare = [label.removeprefix(SPACE) for label in labels]
    for matches in (lambda text: text == word, lambda text: bool(text) and word.startswith(text)):
        places = [place for place, text in enumerate(bare) if matches(text)]
        if places:
            return places[-1]
    return -1
