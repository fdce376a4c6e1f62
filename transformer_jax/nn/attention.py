"""Scaled dot-product and multi-head attention (section 3.2), with relative positions (Shaw et al., 2018)."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.config import AttentionKernel
from transformer_jax.nn.dropout import dropout
from transformer_jax.nn.live import Live
from transformer_jax.nn.positions import clipped_distances, rotate


class KeyValues(NamedTuple):
    """Projected keys and values, ready to be attended to or cached."""

    keys: Float[Array, "B S N H"]
    values: Float[Array, "B S N H"]


class Relative(NamedTuple):
    """Learned embeddings of the clipped distances, and which query–key pair has which distance."""

    keys: Float[Array, "R H"]  # a^K
    values: Float[Array, "R H"]  # a^V
    distances: Float[Array, "*B T S R"]  # one-hot, from `clipped_distances`; without B, the same in every row


FEW = range(2, 9)  # queries: of so few with many keys a sum of products is faster on a CPU than XLA's batched product


class Attended(NamedTuple):
    output: Float[Array, "B T D"]
    weights: Float[Array, "B N T S"] | None  # only when asked for


def attention_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S N H"],
    mask: Bool[Array, "#B #N #T S"],
    relative: Relative | None = None,
) -> Float[Array, "B N T S"]:
    """softmax(q kᵀ / √H) in float32 (eq. 1); with relative positions softmax(q (k + a^K)ᵀ / √H).

    A query that may see no key (a row of padding) weighs all of them alike: finite, never NaN.
    """
    if query.shape[1] in FEW:
        queries, keys = (x.astype(jnp.float32).swapaxes(1, 2) for x in (query, key))
        scores = (queries[:, :, :, None] * keys[:, :, None]).sum(axis=-1)
    else:
        scores = jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)
    if relative is not None:
        by_distance = jnp.einsum(
            "BTNH,RH->BNTR", query, relative.keys.astype(query.dtype), preferred_element_type=jnp.float32
        )
        scores += jnp.einsum(f"BNTR,{_axes(relative)}->BNTS", by_distance, relative.distances)
    scores *= query.shape[-1] ** -0.5
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B S N H"], relative: Relative | None = None
) -> Float[Array, "B T N H"]:
    """Σ_j w_ij v_j; with relative positions Σ_j w_ij (v_j + a^V_ij) (Shaw et al., eq. 3)."""
    if weights.shape[2] in FEW:
        values = value.astype(jnp.float32).swapaxes(1, 2)
        output = (weights[..., None] * values[:, :, None]).sum(axis=-2).swapaxes(1, 2).astype(value.dtype)
    else:
        output = jnp.einsum("BNTS,BSNH->BTNH", weights.astype(value.dtype), value)
    if relative is None:
        return output
    weights = weights.astype(value.dtype)
    by_distance = jnp.einsum(f"BNTS,{_axes(relative)}->BNTR", weights, relative.distances.astype(value.dtype))
    return output + jnp.einsum("BNTR,RH->BTNH", by_distance, relative.values.astype(value.dtype))


def _axes(relative: Relative) -> str:
    return "TSR" if relative.distances.ndim == 3 else "BTSR"


class MultiHeadAttention(nn.Module):
    """Concat(head_1 … head_N) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (section 3.2.2).

    The projections are kernels of two dimensions, [D, N · H], so that optimizers see matrices.

    Attributes:
      heads: N.
      width: D of the output.
      key_width: H of queries and keys; by default D / N.
      value_width: H of values; by default D / N.
      bias: biases on the four projections (the paper has none).
      dropout: rate on the attention weights.
      relative_distance: k, where relative positions are clipped; None for none.
      rotary: turn queries and keys by their positions.
      kernel: implementation of `jax.nn.dot_product_attention`, where that can be used.
    """

    heads: int
    width: int
    key_width: int | None = None
    value_width: int | None = None
    bias: bool = False
    dropout: float = 0.0
    relative_distance: int | None = None
    rotary: bool = False
    dtype: DTypeLike = jnp.float32
    kernel: AttentionKernel = AttentionKernel.XLA

    def setup(self):
        key_width = self.key_width or self.width // self.heads
        value_width = self.value_width or self.width // self.heads
        self.query = self._projection(self.heads * key_width)
        self.key = self._projection(self.heads * key_width)
        self.value = self._projection(self.heads * value_width)
        self.output = self._projection(self.width)
        if self.relative_distance is not None:
            rows, initializer = 2 * self.relative_distance + 1, nn.initializers.glorot_uniform()
            self.relative_keys = self.param("relative_keys", initializer, (rows, key_width))
            self.relative_values = self.param("relative_values", initializer, (rows, value_width))

    def _projection(self, features: int) -> nn.Dense:
        return nn.Dense(features, use_bias=self.bias, dtype=self.dtype, kernel_init=nn.initializers.glorot_uniform())

    def _heads(self, x: Float[Array, "W T NH"], live: Live | None = None) -> Float[Array, "B T N H"]:
        x = x.reshape(*x.shape[:2], self.heads, x.shape[2] // self.heads)
        return x if live is None else live.scattered(x)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B #N #T S"],
        *,
        positions: Int[Array, "B T"] | None = None,
        memory_positions: Int[Array, "B S"] | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """Attends from `x` to `memory` (to itself when they are the same array).

        Positions (0, 1, … by default) matter to rotary positions only; relative distances are those between
        the places in the row, which inside a segment is the same.
        """
        return self.attend(
            x,
            self.keys_values(memory, memory_positions),
            mask,
            positions=positions,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )

    def keys_values(
        self,
        memory: Float[Array, "W S D"],
        positions: Int[Array, "B S"] | None = None,
        live: Live | None = None,
    ) -> KeyValues:
        """What queries attend to: computed once and kept, in a cached decode. `live` puts each in its slot."""
        keys, values = self._heads(self.key(memory), live), self._heads(self.value(memory), live)
        return KeyValues(rotate(keys, _or_counted(positions, keys)) if self.rotary else keys, values)

    def attend(
        self,
        x: Float[Array, "W T D"],
        memory: KeyValues,
        mask: Bool[Array, "#B #N #T S"],
        *,
        positions: Int[Array, "B T"] | None = None,
        places: tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
        live: Live | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """Attends from `x` to projected keys and values. `places` are those of queries and keys in the row,
        between which relative distances are taken: 0, 1, … for both by default. With `live`, `x` and the output
        are of these, side by side."""
        query = self._heads(self.query(x), live)
        if self.rotary:
            query = rotate(query, _or_counted(positions, query))
        relative = self._relative(query, memory, places)
        plain = relative is None and query.shape[-1] == memory.values.shape[-1] and query.shape[1] not in FEW
        if plain and not return_weights and (dropout_rng is None or not self.dropout):
            weights = None
            mixed = jax.nn.dot_product_attention(query, *memory, mask=mask, implementation=self.kernel.value)
        else:
            weights = attention_weights(query, memory.keys, mask, relative)
            mixed = weighted_values(dropout(weights, self.dropout, dropout_rng), memory.values, relative)
        mixed = mixed if live is None else live.gathered(mixed)
        output = self.output(mixed.reshape(*mixed.shape[:2], -1))
        return Attended(output, weights if return_weights else None)

    def _relative(self, query, memory, places) -> Relative | None:
        if self.relative_distance is None:
            return None
        own, others = places or (jnp.arange(query.shape[1]), jnp.arange(memory.keys.shape[1]))
        one_hot = clipped_distances(own, others, self.relative_distance)
        return Relative(self.relative_keys, self.relative_values, one_hot)


def _or_counted(positions: Int[Array, "B T"] | None, x: Float[Array, "B T N H"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]) if positions is None else positions
