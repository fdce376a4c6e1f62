"""The one batch type, for packed and unpacked pairs alike."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

PAD, EOS, UNK = 0, 1, 2
BOS = PAD  # the decoder starts from the pad id and never generates it

Ids = Any  # jax.Array or np.ndarray, which type checkers hold for strangers


class Batch(NamedTuple):
    """Rows of source and target ids. Each row holds one pair, or several packed one after another.

    Segment ids say which pair of its row a token belongs to: 1, 2, …, and 0 for padding. A source segment
    and the target segment of the same number are a pair. Positions count from 0 in each segment.
    """

    source: Ids  # int32 [B, S]; each segment ends with EOS
    source_segments: Ids  # int32 [B, S]
    source_positions: Ids  # int32 [B, S]
    target: Ids  # int32 [B, T]; each segment ends with EOS: what the decoder shall predict
    target_segments: Ids  # int32 [B, T]
    target_positions: Ids  # int32 [B, T]

    @property
    def target_input(self) -> jax.Array:
        """What the decoder reads, int32 [B, T]: the target shifted right inside each segment, BOS first."""
        shifted = jnp.pad(self.target, ((0, 0), (1, 0)))[:, :-1]
        return jnp.where(self.target_positions == 0, BOS, shifted)


def unpacked(source: Ids, target: Ids) -> Batch:
    """A batch with one pair a row from ids [B, S] and [B, T] in which only padding is 0."""
    return Batch(source, *segments_and_positions(source), target, *segments_and_positions(target))


def segments_and_positions(ids: Ids) -> tuple[jax.Array, jax.Array]:
    """Segments (1 where there is a token, 0 on padding) and positions (0, 1, …) of unpacked ids [B, S]."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return (jnp.asarray(ids) != PAD).astype(jnp.int32), positions


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of a batch a process gathers: its rows are cut into `count` equal parts, and these are taken.

    Empty rows are added to the last parts until all are equal, and `multiple` divides their rows.
    """

    parts: tuple[int, ...] = (0,)
    count: int = 1
    multiple: int = 1

    def rows(self, of: int) -> Int[np.ndarray, " B"]:
        """The numbers of the rows that are taken of a batch of so many; those from `of` on are empty ones."""
        in_part = -(-of // (self.count * self.multiple)) * self.multiple
        return (np.array(self.parts)[:, None] * in_part + np.arange(in_part)).reshape(-1)


ALL = Share()
