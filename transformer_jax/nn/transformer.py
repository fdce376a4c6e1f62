"""The encoder–decoder Transformer (figure 1): two stacks between embeddings and logits."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from transformer_jax.batch import Batch, segments_and_positions
from transformer_jax.config import Norm, Positions, SinusoidLayout, TransformerConfig, Tying
from transformer_jax.errors import UserError
from transformer_jax.nn.attention import KeyValues
from transformer_jax.nn.dropout import dropout
from transformer_jax.nn.layers import normalization
from transformer_jax.nn.live import Live
from transformer_jax.nn.masks import ancestry_mask, attention_mask, causal_mask
from transformer_jax.nn.positions import sinusoids
from transformer_jax.nn.stacks import Cache, Decoder, Encoder
from transformer_jax.parallel import laid


class AttentionWeights(NamedTuple):
    """Every head's weights; each row sums to 1. Layers are the second axis."""

    encoder: Float[Array, "B L N S S"]
    decoder: Float[Array, "B L N T T"]
    cross: Float[Array, "B L N T S"]


class Embedding(nn.Module):
    """Token embeddings times √D (section 3.4); `logits` is the pre-softmax projection by the same matrix."""

    vocab: int
    multiple: int  # the matrix has rows for the vocabulary padded up to this
    width: int
    scale: bool = True  # by √D
    dtype: DTypeLike = jnp.float32

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(self.width**-0.5), (self.rows, self.width))

    @property
    def rows(self) -> int:
        return -(-self.vocab // self.multiple) * self.multiple

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Ids outside the vocabulary are an error, or NaN where their values are not known: never clamped."""
        _check_ids(ids, self.vocab)
        table = laid(self.table.astype(self.dtype), "V.")
        embedded = laid(jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan), "B..")
        return embedded * jnp.asarray(self.width**0.5, self.dtype) if self.scale else embedded

    def logits(self, x: Float[Array, "B T D"], bias: Float[Array, "V"] | None = None) -> Float[Array, "B T V"]:
        """float32, with the padded part of the vocabulary masked."""
        logits = jnp.einsum("BTD,VD->BTV", x, self.table.astype(self.dtype), preferred_element_type=jnp.float32)
        logits = logits if bias is None else logits + bias[None, None]
        if self.rows == self.vocab:  # no padding, and a pass over all logits less
            return logits
        return jnp.where(jnp.arange(logits.shape[-1]) < self.vocab, logits, jnp.finfo(jnp.float32).min)


class Transformer(nn.Module):
    """The whole model: `encode`, `decode`, and `__call__` for both; `init_cache` and `decode_step` for search.

    Dropout is on if and only if a `dropout_rng` is given. Masks come from segments, so packed rows and
    unpacked ones are one case.
    """

    config: TransformerConfig

    def setup(self):
        config = self.config
        self.source_embedding = _embedding(config, config.source_vocab, "source_vocab")
        if config.tying == Tying.ALL:
            if config.source_vocab != config.target_vocab:
                raise UserError(
                    f"config.model.tying is all, but source_vocab is {config.source_vocab} and target_vocab "
                    f"{config.target_vocab}: use a joint tokenizer, or tying=decoder."
                )
            self.target_embedding = self.source_embedding
        else:
            self.target_embedding = _embedding(config, config.target_vocab, "target_vocab")
        untied = config.tying == Tying.NONE
        self.projection = _embedding(config, config.target_vocab, "target_vocab") if untied else self.target_embedding
        if config.positions == Positions.LEARNED:
            shape, initializer = (config.max_positions, config.width), nn.initializers.normal(config.width**-0.5)
            self.source_positions = self.param("source_positions", initializer, shape)
            self.target_positions = self.param("target_positions", initializer, shape)
        if config.output_bias:
            self.output_bias = self.param("output_bias", nn.initializers.zeros, (self.projection.rows,))
        if config.embedding_norm:
            self.source_embedding_norm = _norm(config)
            self.target_embedding_norm = _norm(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def __call__(self, batch: Batch, *, dropout_rng: Key[Array, ""] | None = None) -> Float[Array, "B T V"]:
        """Logits of every target position, float32, given the target before it."""
        encoder_rng, decoder_rng = _split(dropout_rng)
        encoded = self.encode(batch.source, batch.source_segments, batch.source_positions, dropout_rng=encoder_rng)
        return self.decode(
            batch.target_input,
            encoded,
            batch.source_segments,
            batch.target_segments,
            batch.target_positions,
            dropout_rng=decoder_rng,
        )

    def encode(
        self,
        source: Int[Array, "B S"],
        segments: Int[Array, "B S"] | None = None,
        positions: Int[Array, "B S"] | None = None,
        *,
        dropout_rng: Key[Array, ""] | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output. Segments and positions: by default one segment a row, as far as it is not padding."""
        default_segments, default_positions = segments_and_positions(source)
        segments = default_segments if segments is None else segments
        positions = default_positions if positions is None else positions
        embedding_rng, stack_rng = _split(dropout_rng)
        x = self.embed_source(source, positions, dropout_rng=embedding_rng)
        return self.encode_embedded(x, segments, positions, dropout_rng=stack_rng)

    def decode(
        self,
        target_input: Int[Array, "B T"],
        encoded: Float[Array, "B S D"],
        source_segments: Int[Array, "B S"],
        target_segments: Int[Array, "B T"] | None = None,
        target_positions: Int[Array, "B T"] | None = None,
        *,
        causal: bool = True,
        dropout_rng: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits from the shifted target (BOS first). By default a row is one segment."""
        counted = jnp.broadcast_to(jnp.arange(target_input.shape[1]), target_input.shape)
        segments = jnp.ones_like(target_input) if target_segments is None else target_segments
        positions = counted if target_positions is None else target_positions
        embedding_rng, stack_rng = _split(dropout_rng)
        x = self.embed_target(target_input, positions, dropout_rng=embedding_rng)
        x = self.decode_embedded(x, encoded, source_segments, segments, positions, causal=causal, dropout_rng=stack_rng)
        return self.logits(x)

    def embed_source(self, ids, positions=None, *, dropout_rng=None) -> Float[Array, "B S D"]:
        """Embedding, plus the position where positions are added, with dropout (section 5.4)."""
        table = self.source_positions if self.config.positions == Positions.LEARNED else None
        norm = self.source_embedding_norm if self.config.embedding_norm else None
        return self._embed(self.source_embedding, table, norm, ids, positions, dropout_rng)

    def embed_target(self, ids, positions=None, *, dropout_rng=None) -> Float[Array, "B T D"]:
        table = self.target_positions if self.config.positions == Positions.LEARNED else None
        norm = self.target_embedding_norm if self.config.embedding_norm else None
        return self._embed(self.target_embedding, table, norm, ids, positions, dropout_rng)

    def encode_embedded(self, x, segments, positions=None, *, dropout_rng=None) -> Float[Array, "B S D"]:
        """The encoder over inputs that are already embedded, [B, S, D]."""
        mask = attention_mask(segments, segments)
        return self.encoder(x, mask, positions=positions, dropout_rng=dropout_rng)[0]

    def decode_embedded(
        self, x, encoded, source_segments, target_segments, positions=None, *, causal=True, dropout_rng=None
    ) -> Float[Array, "B T D"]:
        """The decoder over inputs that are already embedded, [B, T, D], up to the logits."""
        masks = _decoder_masks(source_segments, target_segments, causal)
        return self.decoder(x, encoded, *masks, positions=positions, dropout_rng=dropout_rng)[0]

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The final linear layer: float32, padded vocabulary masked."""
        return self.projection.logits(x, self.output_bias if self.config.output_bias else None)

    def attention_weights(self, batch: Batch) -> AttentionWeights:
        """The weights of every head of every layer, for a batch in which the target is given."""
        x = self.embed_source(batch.source, batch.source_positions)
        mask = attention_mask(batch.source_segments, batch.source_segments)
        encoded, encoder = self.encoder(x, mask, positions=batch.source_positions, return_weights=True)
        x = self.embed_target(batch.target_input, batch.target_positions)
        masks = _decoder_masks(batch.source_segments, batch.target_segments)
        extras = self.decoder(x, encoded, *masks, positions=batch.target_positions, return_weights=True)[1]
        weights: tuple[Any, ...] = encoder, extras.self_weights, extras.cross_weights  # none is None
        return AttentionWeights(*weights)

    def init_cache(
        self, encoded: Float[Array, "B S D"], source_segments: Int[Array, "B S"], *, beams: int, length: int
    ) -> Cache:
        """An empty cache for `length` positions of `beams` hypotheses a sentence."""
        config, batch = self.config, encoded.shape[0]
        stack = (config.decoder_layers,) if config.scan else ()
        shape = (batch, *stack, config.heads, length, beams)
        past = KeyValues(
            jnp.zeros((*shape, config.key_width or config.width // config.heads), encoded.dtype),
            jnp.zeros((*shape, config.value_width or config.width // config.heads), encoded.dtype),
        )
        return Cache(
            past if config.scan else (past,) * config.decoder_layers,
            self.decoder.encoder_keys_values(encoded),
            source_segments,
            jnp.zeros((batch, beams, length), jnp.int32),
        )

    def decode_step(
        self,
        token: Int[Array, "B K"],
        parent: Int[Array, "B K"],
        position: Int[Array, "*B"],
        cache: Cache,
        live: Live | None = None,
    ) -> tuple[Float[Array, "B K V"], Cache]:
        """Logits of what follows `token`, float32.

        `position` is that of `token`, of each sentence its own or the same for all. `parent` says which hypothesis
        of the last step each one continues; at position 0 the token is BOS and the parent does not matter. Keys
        stay where they were written: a hypothesis finds its own by `ancestry`. With `live` no others are computed,
        and what is returned for others is not to be looked at.
        """
        position = jnp.broadcast_to(position, token.shape[:1])
        ancestry = jnp.take_along_axis(cache.ancestry, parent[:, :, None], axis=1)
        beams = jnp.arange(token.shape[1], dtype=jnp.int32)
        written = jnp.arange(ancestry.shape[2])[None, :] == position[:, None]  # [B, T]
        ancestry = jnp.where(written[:, None, :], beams[None, :, None], ancestry)
        positions = jnp.broadcast_to(position[:, None], token.shape)
        if live is not None:
            token, positions = live.gathered(token), live.gathered(positions)
        x = self.embed_target(token, positions)
        cross_mask = (cache.source_segments != 0)[:, None, None]
        x, past = self.decoder.step(x, position, cache, ancestry_mask(ancestry, position), cross_mask, live)
        logits = self.logits(x) if live is None else live.scattered(self.logits(x))
        return logits, cache._replace(past=past, ancestry=ancestry)

    def _embed(self, embedding: Embedding, table, norm, ids, positions, dropout_rng) -> Float[Array, "B T D"]:
        x = embedding(ids)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape) if positions is None else positions
        if self.config.positions == Positions.LEARNED:
            _check_ids(positions, self.config.max_positions, "position", "config.model.max_positions")
            x += jnp.take(table, positions, axis=0, mode="fill", fill_value=jnp.nan).astype(x.dtype)
        if self.config.positions == Positions.SINUSOIDAL:
            layout = SinusoidLayout(self.config.sinusoid_layout)
            x += sinusoids(positions + self.config.first_position, self.config.width, layout).astype(x.dtype)
        return dropout(x if norm is None else norm(x), self.config.dropout, dropout_rng)


def _decoder_masks(source_segments, target_segments, causal: bool = True) -> tuple[jax.Array, jax.Array]:
    own = attention_mask(target_segments, target_segments)
    if causal:
        own &= causal_mask(target_segments.shape[1])
    return own, attention_mask(target_segments, source_segments)


def _embedding(config: TransformerConfig, vocab: int | None, field: str) -> Embedding:
    if vocab is None:
        raise UserError(f"config.model.{field} is not set: give the number of ids of the vocabulary.")
    return Embedding(
        vocab=vocab,
        multiple=config.vocab_multiple,
        width=config.width,
        scale=config.embedding_scale,
        dtype=jnp.dtype(config.dtype),
    )


def _norm(config: TransformerConfig) -> nn.Module:
    return normalization(Norm(config.norm), epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype))


def _check_ids(ids, size: int, name: str = "token id", what: str = "the vocabulary") -> None:
    """Refuses ids outside [0, size) where their values are known, that is outside `jit`."""
    if isinstance(ids, Tracer) or not ids.size:
        return
    known = np.asarray(ids)  # NumPy's minimum has a value inside a traced function too
    low, high = int(known.min()), int(known.max())
    if low < 0 or high >= size:
        raise UserError(f"{name} {low if low < 0 else high} is outside {what} of size {size}.")


def _split(rng: Key[Array, ""] | None):
    return (None, None) if rng is None else jax.random.split(rng)
