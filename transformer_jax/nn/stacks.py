"""Stacks of layers: encoder and decoder over embedded inputs, looped over or scanned."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.config import Norm, NormPlace, TransformerConfig
from transformer_jax.nn.attention import KeyValues
from transformer_jax.nn.layers import DecoderExtras, DecoderLayer, EncoderLayer, Step, normalization
from transformer_jax.nn.live import Live
from transformer_jax.nn.masks import causal_mask


class Cache(NamedTuple):
    """What a step-by-step decode keeps. Each leaf leads with the batch axis and is never moved between beams.

    With `config.scan` the layers of `past` and `encoder` are one tree stacked on axis 1, else a tuple.
    """

    past: Any  # KeyValues [B, N, T, K, H] of each layer: what each beam wrote at each position
    encoder: Any  # KeyValues [B, N, S, H] of each layer, shared by the beams
    source_segments: Int[Array, "B S"]
    ancestry: Int[Array, "B K T"]  # the beam in which a hypothesis' ancestor stood at each position

    def resized(self, *, source: int, length: int) -> "Cache":
        """The cache with room for so many source tokens and positions: cut, or padded with what no mask shows."""
        return Cache(
            past=jax.tree.map(lambda x: resized(x, length, axis=-3), self.past),
            encoder=jax.tree.map(lambda x: resized(x, source, axis=-2), self.encoder),
            source_segments=resized(self.source_segments, source, axis=1),
            ancestry=resized(self.ancestry, length, axis=2),
        )


def resized(x: Array, size: int, *, axis: int) -> Array:
    """An array cut or padded with zeros at the end of one axis."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, max(0, size - x.shape[axis]))
    return jax.lax.slice_in_dim(jnp.pad(x, missing), 0, size, axis=axis)


class Encoder(nn.Module):
    """A stack of encoder layers over embedded inputs."""

    config: TransformerConfig

    def setup(self):
        self.layers = _layers(EncoderLayer, self.config, self.config.encoder_layers)
        self.final_norm = _final_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Bool[Array, "#B #N #S S"] | None = None,
        *,
        positions: Int[Array, "B S"] | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B S D"], Float[Array, "B L N S S"] | None]:
        """The stack's output, and each layer's attention weights if asked for. Without a mask all see all."""
        mask = jnp.ones((1, 1, 1, x.shape[1]), bool) if mask is None else mask

        def layer_output(layer, x, rng, _):
            return layer(x, mask, positions=positions, dropout_rng=rng, return_weights=return_weights)

        x, weights = _run(layer_output, self.layers, x, self.config, dropout_rng)
        return self.final_norm(x), _stacked(weights) if return_weights else None


class Decoder(nn.Module):
    """A stack of decoder layers over embedded inputs and the encoder's output.

    It is causal if its mask is; `Transformer` makes that mask.
    """

    config: TransformerConfig

    def setup(self):
        self.layers = _layers(DecoderLayer, self.config, self.config.decoder_layers)
        self.final_norm = _final_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        self_mask: Bool[Array, "#B #N #T T"] | None = None,
        cross_mask: Bool[Array, "#B #N #T S"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        dropout_rng: Key[Array, ""] | None = None,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], DecoderExtras]:
        """The stack's output, and its attention weights if asked for. Masks: by default causal, and all."""
        self_mask = causal_mask(x.shape[1]) if self_mask is None else self_mask
        cross_mask = jnp.ones((1, 1, 1, encoded.shape[1]), bool) if cross_mask is None else cross_mask

        def layer_output(layer, x, rng, _):
            x, extras = layer(
                x,
                layer.encoder_keys_values(encoded),
                self_mask,
                cross_mask,
                positions=positions,
                dropout_rng=rng,
                return_weights=return_weights,
            )
            return x, extras._replace(past=None)

        x, extras = _run(layer_output, self.layers, x, self.config, dropout_rng)
        return self.final_norm(x), _stacked(extras) if return_weights else DecoderExtras(None, None, None)

    def encoder_keys_values(self, encoded: Float[Array, "B S D"]) -> Any:
        """The cross-attention keys and values of every layer, as `Cache.encoder` holds them."""

        def layer_keys_values(layer, x, rng, _):
            return x, _heads_swapped(layer.encoder_keys_values(encoded))

        return _run(layer_keys_values, self.layers, encoded, self.config)[1]

    def step(
        self,
        x: Float[Array, "W K D"],
        position: Int[Array, "B"],
        cache: Cache,
        self_mask: Bool[Array, "B 1 K _"],
        cross_mask: Bool[Array, "B 1 1 S"],
        live: Live | None = None,
    ) -> tuple[Float[Array, "W K D"], Any]:
        """One position of every beam, or of the live: the output, and `Cache.past` with this position written."""
        positions = jnp.broadcast_to(position[:, None], (position.shape[0], x.shape[1]))

        def layer_output(layer, x, rng, item):
            past, encoder = item
            step = Step(position, past, live)
            x, extras = layer(x, _heads_swapped(encoder), self_mask, cross_mask, positions=positions, step=step)
            return x, extras.past

        items = (cache.past, cache.encoder) if self.config.scan else tuple(zip(cache.past, cache.encoder, strict=True))
        x, past = _run(layer_output, self.layers, x, self.config, items=items)
        return self.final_norm(x), past


def _heads_swapped(memory: KeyValues) -> KeyValues:
    """[B, S, N, H] ↔ [B, N, S, H], in which a step reads the cache."""
    return KeyValues(*(x.swapaxes(1, 2) for x in memory))


def stack_layers(params: dict) -> dict:
    """Parameters of a model without `scan` → of the same model with it: layers_0, layers_1, … → layers, stacked."""
    params = {**params}
    for name in ("encoder", "decoder"):
        stack = {**params[name]}
        count = sum(key.startswith("layers_") for key in stack)
        layers = [stack.pop(f"layers_{index}") for index in range(count)]
        params[name] = stack | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
    return params


def unstack_layers(params: dict) -> dict:
    """The inverse of `stack_layers`."""
    params = {**params}
    for name in ("encoder", "decoder"):
        stack = {**params[name]}
        layers = stack.pop("layers")
        count = jax.tree.leaves(layers)[0].shape[0]
        params[name] = stack | {
            f"layers_{index}": jax.tree.map(lambda leaf, index=index: leaf[index], layers) for index in range(count)
        }
    return params


def _layers(kind: type[nn.Module], config: TransformerConfig, count: int):
    return kind(config) if config.scan else [kind(config) for _ in range(count)]


def _final_norm(config: TransformerConfig) -> Callable:
    """Pre-norm stacks end in a norm; post-norm layers have already ended in one."""
    if config.norm_place == NormPlace.POST:
        return lambda x: x
    return normalization(Norm(config.norm), epsilon=config.norm_epsilon, dtype=jnp.dtype(config.dtype))


def _run(body: Callable, layers, x, config: TransformerConfig, dropout_rng=None, items=None) -> tuple:
    """Runs `body(layer, x, rng, item) -> (x, result)` through a stack, looped over or scanned; x and the results.

    Layer i gets the i-th key of `dropout_rng` and the i-th of `items`. The results are a tuple, or one tree
    stacked on axis 1 when scanned.
    """
    if config.remat:
        body = nn.remat(body, prevent_cse=not config.scan)
    if config.scan:
        length = _stack_length(layers, config)
        rngs = None if dropout_rng is None else jax.random.split(dropout_rng, length)
        scan = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, 1),  # type: ignore[arg-type]  # a tree of axes is allowed
            out_axes=1,
            length=length,
        )
        return scan(layers, x, rngs, items)
    rngs = [None] * len(layers) if dropout_rng is None else jax.random.split(dropout_rng, len(layers))
    results = []
    for index, layer in enumerate(layers):
        x, result = body(layer, x, rngs[index], None if items is None else items[index])
        results.append(result)
    return x, tuple(results)


def _stack_length(layer: nn.Module, config: TransformerConfig) -> int:
    return config.encoder_layers if isinstance(layer, EncoderLayer) else config.decoder_layers


def _stacked(results):
    """Results of `_run` with the layers on axis 1."""
    if type(results) is tuple:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *results)
    return results
