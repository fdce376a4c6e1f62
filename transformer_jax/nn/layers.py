"""Encoder and decoder layers (section 3.1): attention and feed-forward blocks in their residual frames."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.config import Activation, AttentionKernel, Norm, NormPlace, Positions, TransformerConfig
from transformer_jax.nn.attention import KeyValues, MultiHeadAttention
from transformer_jax.nn.dropout import dropout
from transformer_jax.nn.live import Live
from transformer_jax.parallel import laid

ACTIVATIONS = {
    Activation.RELU: nn.relu,
    Activation.GELU: functools.partial(nn.gelu, approximate=False),
    Activation.GELU_TANH: nn.gelu,
    Activation.SWISH: nn.swish,
}


class FeedForward(nn.Module):
    """max(0, x W₁ + b₁) W₂ + b₂ (eq. 2), or another activation; gated: (act(x W₁) ⊙ x V) W₂ (Shazeer, 2020)."""

    width: int  # D
    hidden: int  # F
    activation: Activation = Activation.RELU
    gated: bool = False
    dropout: float = 0.0  # on the hidden layer
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, dropout_rng: Key[Array, ""] | None = None) -> Float[Array, "B T D"]:
        hidden = ACTIVATIONS[self.activation](self._dense(self.hidden, "hidden")(x))  # [B, T, F]
        if self.gated:
            hidden *= self._dense(self.hidden, "gate")(x)
        return self._dense(self.width, "output")(dropout(hidden, self.dropout, dropout_rng))

    def _dense(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, dtype=self.dtype, kernel_init=nn.initializers.glorot_uniform(), name=name)


def normalization(kind: Norm, *, epsilon: float = 1e-6, dtype: DTypeLike = jnp.float32) -> nn.Module:
    """LayerNorm or RMSNorm over the last axis, with float32 statistics."""
    return nn.RMSNorm(epsilon=epsilon, dtype=dtype) if kind == Norm.RMS else nn.LayerNorm(epsilon=epsilon, dtype=dtype)


class Residual(nn.Module):
    """The frame of a sub-layer f (sections 3.1 and 5.4).

    post: norm(x + dropout(f(x))), as in the paper. pre: x + dropout(f(norm(x))).

        y = residual.enter(x)
        x = residual.leave(x, f(y))
    """

    norm: Norm
    place: NormPlace
    dropout: float
    epsilon: float = 1e-6  # of the norm
    dtype: DTypeLike = jnp.float32

    def setup(self):
        self.normalize = normalization(self.norm, epsilon=self.epsilon, dtype=self.dtype)

    def enter(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.normalize(x) if self.place == NormPlace.PRE else x

    def leave(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], dropout_rng: Key[Array, ""] | None = None
    ) -> Float[Array, "B T D"]:
        x += dropout(laid(y, "B.."), self.dropout, dropout_rng)
        return x if self.place == NormPlace.PRE else self.normalize(x)


def self_attention(config: TransformerConfig) -> MultiHeadAttention:
    """The attention of a layer to its own stack: the one place where a config chooses its kind."""
    relative = config.relative_distance if config.positions == Positions.RELATIVE else None
    return _attention(config, relative_distance=relative, rotary=config.positions == Positions.ROTARY)


def cross_attention(config: TransformerConfig) -> MultiHeadAttention:
    """The attention of the decoder to the encoder: content only, whatever the positions."""
    return _attention(config)


def _attention(config: TransformerConfig, relative_distance: int | None = None, rotary: bool = False):
    return MultiHeadAttention(
        heads=config.heads,
        width=config.width,
        key_width=config.key_width,
        value_width=config.value_width,
        bias=config.attention_bias,
        dropout=config.attention_dropout,
        relative_distance=relative_distance,
        rotary=rotary,
        dtype=jnp.dtype(config.dtype),
        kernel=AttentionKernel(config.attention_kernel),
    )


def feed_forward(config: TransformerConfig) -> FeedForward:
    """The position-wise block of a layer: the one place where a config chooses its kind."""
    return FeedForward(
        width=config.width,
        hidden=config.feed_forward,
        activation=Activation(config.activation),
        gated=config.gated,
        dropout=config.feed_forward_dropout,
        dtype=jnp.dtype(config.dtype),
    )


def residual(config: TransformerConfig) -> Residual:
    return Residual(
        norm=Norm(config.norm),
        place=NormPlace(config.norm_place),
        dropout=config.dropout,
        epsilon=config.norm_epsilon,
        dtype=jnp.dtype(config.dtype),
    )


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: TransformerConfig

    def setup(self):
        self.self_attention = self_attention(self.config)
        self.self_attention_residual = residual(self.config)
        self.feed_forward = feed_forward(self.config)
        self.feed_forward_residual = residual(self.config)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Bool[Array, "#B #N #S S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B N S S"] | None]:
        """The layer's output, and its attention weights if asked for."""
        rngs = _split(dropout_rng, 4)
        y = self.self_attention_residual.enter(x)
        attended = self.self_attention(
            y,
            y,
            mask,
            positions=positions,
            memory_positions=positions,
            dropout_rng=rngs[0],
            return_weights=return_weights,
        )
        x = self.self_attention_residual.leave(x, attended.output, rngs[1])
        y = self.feed_forward(self.feed_forward_residual.enter(x), dropout_rng=rngs[2])
        return self.feed_forward_residual.leave(x, y, rngs[3]), attended.weights


class Step(NamedTuple):
    """The cached decode of one position: where its keys go, and the places of what is seen."""

    position: Int[Array, "B"]  # of the token that is read, from 0
    past: KeyValues  # [B, N, T, K, H] each: keys and values of every beam at every position
    live: Live | None  # the hypotheses that are computed; None: all


class DecoderExtras(NamedTuple):
    """What a decoder layer computes beside its output, each only when asked for."""

    past: KeyValues | None
    self_weights: Float[Array, "B N T T"] | None
    cross_weights: Float[Array, "B N T S"] | None


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, then feed-forward."""

    config: TransformerConfig

    def setup(self):
        self.self_attention = self_attention(self.config)
        self.self_attention_residual = residual(self.config)
        self.cross_attention = cross_attention(self.config)
        self.cross_attention_residual = residual(self.config)
        self.feed_forward = feed_forward(self.config)
        self.feed_forward_residual = residual(self.config)

    def encoder_keys_values(self, encoded: Float[Array, "B S D"]) -> KeyValues:
        """Keys and values of the encoder's output: once a sentence, whatever the number of beams and steps."""
        return self.cross_attention.keys_values(encoded)

    def __call__(
        self,
        x: Float[Array, "W T D"],
        encoder: KeyValues,
        self_mask: Bool[Array, "#B #N #T _"],
        cross_mask: Bool[Array, "#B #N #T S"],
        *,
        positions: Int[Array, "B T"] | None = None,
        step: Step | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "W T D"], DecoderExtras]:
        """Without `step`, all positions at once. With it, one position: the axis T holds the K beams, which
        attend to the cached keys of all beams as far as `self_mask` (from `ancestry_mask`) lets them. With
        `step.live`, `x` and the output are those hypotheses side by side, [W, K, D]."""
        live = None if step is None else step.live
        rngs = _split(dropout_rng, 6)
        y = self.self_attention_residual.enter(x)
        seen, past, places = self._self_keys_values(y, positions, step)
        own = self.self_attention.attend(
            y,
            seen,
            self_mask,
            positions=positions,
            places=places,
            live=live,
            dropout_rng=rngs[0],
            return_weights=return_weights,
        )
        x = self.self_attention_residual.leave(x, own.output, rngs[1])
        y = self.cross_attention_residual.enter(x)
        cross = self.cross_attention.attend(
            y, encoder, cross_mask, live=live, dropout_rng=rngs[2], return_weights=return_weights
        )
        x = self.cross_attention_residual.leave(x, cross.output, rngs[3])
        y = self.feed_forward(self.feed_forward_residual.enter(x), dropout_rng=rngs[4])
        x = self.feed_forward_residual.leave(x, y, rngs[5])
        return x, DecoderExtras(past, own.weights, cross.weights)

    def _self_keys_values(self, y, positions: Any, step: Step | None):
        """What the self-attention sees, the cache with this position in it, and the places of queries and keys."""
        if step is None:
            return self.self_attention.keys_values(y, positions), None, None
        new = self.self_attention.keys_values(y, positions, step.live)
        write = jax.vmap(functools.partial(jax.lax.dynamic_update_index_in_dim, axis=1))
        past = jax.tree.map(lambda old, x: write(old, x.swapaxes(1, 2), step.position), step.past, new)
        batch, heads, length, beams = past.keys.shape[:4]
        seen = jax.tree.map(lambda x: x.reshape(batch, heads, length * beams, -1).swapaxes(1, 2), past)
        key_places = jnp.broadcast_to(jnp.repeat(jnp.arange(length), beams), (batch, length * beams))
        return seen, past, (positions, key_places)


def _split(rng: Key[Array, ""] | None, count: int):
    return [None] * count if rng is None else jax.random.split(rng, count)
