"""Which source words a translation looks at: cross-attention of a forced pass, soft or as links.

The weights of target token t are those with which the model predicts it, that is of the decoder's position t, whose
input is token t − 1.
"""

import enum
import functools
import itertools
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_jax.batch import EOS, Batch, unpacked
from transformer_jax.config import Positions, TransformerConfig
from transformer_jax.decoding.batches import sentence_batches, stack
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer

UNKNOWN = " ⁇ "  # how SentencePiece writes the unknown token: the spaces are none of the text's


class Unit(enum.StrEnum):
    """What is aligned: words, as spaces separate them, or tokens of the vocabulary."""

    WORDS = "words"
    TOKENS = "tokens"


class Link(NamedTuple):
    source: int  # from 0
    target: int


def cross_attention(
    model: Transformer,
    members: Sequence[Any],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    tokens: int = 4096,
    layer: int | None = None,
    head: int | None = None,
) -> list[np.ndarray]:
    """The weights of each pair of source and target ids, float32 [T, S]; each row sums to 1.

    They are those of one layer and one head, or the mean over those for which None is given, and over the members of an
    ensemble, each of which is given by its parameters. A pair without tokens has
    an array without elements. Batches hold up to `tokens` tokens of each side.
    """
    found: list[np.ndarray] = [np.zeros((0, 0), np.float32)] * len(pairs)
    present = [index for index, pair in enumerate(pairs) if all(map(len, pair))]
    longest = model.config.max_positions if model.config.positions == Positions.LEARNED else None
    for batch in sentence_batches([max(map(len, pairs[index])) for index in present], tokens=tokens, longest=longest):
        rows = [pairs[present[index]] for index in batch.sentences]
        source, target = (stack([pair[side] for pair in rows], rows=batch.rows, length=batch.length) for side in (0, 1))
        weights = np.asarray(_mean_weights(model, tuple(members), unpacked(source, target), layer=layer, head=head))
        for row, index in enumerate(batch.sentences):
            source_length, target_length = map(len, rows[row])
            found[present[index]] = weights[row, :target_length, :source_length]
    return found


def check_layer_and_head(config: TransformerConfig, *, layer: int | None, head: int | None) -> None:
    """Raises:
    UserError: if the decoder has no such layer or head.
    """
    for flag, number, count in (("layer", layer, config.decoder_layers), ("head", head, config.heads)):
        if number is not None and not 0 <= number < count:
            raise UserError(
                f"--attention_{flag} is {number}, but the decoder has {count}. Give one of 0 to {count - 1}, or none "
                "for the mean of all."
            )


def links(weights: Float[np.ndarray, "T S"], source: Sequence[int], target: Sequence[int]) -> list[Link]:
    """The link of each target word, in order: to the source word that one of its tokens looks at most.

    `source` and `target` say which word each token belongs to; −1: none. Of equals the first is taken.
    """
    source_words, target_words = np.asarray(source), np.asarray(target)
    of_words = np.full((max(target, default=-1) + 1, max(source, default=-1) + 1), -1.0)
    if not of_words.size:
        return []
    rows, columns = np.nonzero((target_words[:, None] >= 0) & (source_words >= 0))
    np.maximum.at(of_words, (target_words[rows], source_words[columns]), weights[rows, columns])
    return [Link(int(of_word.argmax()), word) for word, of_word in enumerate(of_words)]


def pharaoh(found: Iterable[Link]) -> str:
    """`0-0 1-2`: source-target, as Moses, fast_align and Marian write it."""
    return " ".join(f"{link.source}-{link.target}" for link in found)


def tokens_as_words(ids: Sequence[int]) -> list[int]:
    """Each token a word of its own; EOS is none."""
    return [-1 if token == EOS else place for place, token in enumerate(ids)]


def words_of_tokens(ids: Sequence[int], decode: Callable[[list[list[int]]], list[str]]) -> list[int]:
    """Which word of the text each token belongs to, from 0; EOS: −1. Words are what spaces (U+0020) separate.

    It is found by decoding ever more of the tokens, so that it holds for any vocabulary.
    """
    ids = [int(token) for token in ids]
    inner = [token for token in ids if token != EOS]
    texts = decode([inner[: count + 1] for count in range(len(inner))]) if inner else []
    words = iter(max(0, len([word for word in text.replace(UNKNOWN, "⁇").split(" ") if word]) - 1) for text in texts)
    return [-1 if token == EOS else next(words) for token in ids]


def write_arrays(stream: BinaryIO, arrays: Iterable[np.ndarray]) -> None:
    """One .npy after another, which `arrays_to_npz` makes a .npz file of."""
    for array in arrays:
        np.lib.format.write_array(stream, np.ascontiguousarray(array, np.float32), version=(1, 0))


def arrays_to_npz(written: pathlib.Path, target: pathlib.Path) -> None:
    """Arrays one after another → a .npz file of arrays `1`, `2`, …, which appears when it is whole."""
    unfinished = target.with_name(f"{written.name}.npz")
    with written.open("rb") as stream, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        size = written.stat().st_size
        for number in itertools.count(1):
            if stream.tell() == size:
                break
            array = np.lib.format.read_array(stream)
            with archive.open(f"{number}.npy", "w") as entry:
                np.lib.format.write_array(entry, array, version=(1, 0))
    unfinished.replace(target)
    written.unlink()


@functools.partial(jax.jit, static_argnames=("model", "layer", "head"))
def _mean_weights(
    model: Transformer, members: tuple[Any, ...], batch: Batch, *, layer: int | None, head: int | None
) -> Float[Array, "B T S"]:
    layers, heads = (slice(None) if one is None else slice(one, one + 1) for one in (layer, head))

    def of_member(params: Any) -> Float[Array, "B T S"]:
        weights: Any = model.apply(params, batch, method="attention_weights")
        return weights.cross[:, layers, heads].mean(axis=(1, 2))

    return jnp.stack([of_member(params) for params in members]).mean(axis=0)
