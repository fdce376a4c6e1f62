"""Every intermediate of a forward pass, by name, of any model and without a change to it.

The model's own modules are run; Flax hands over what goes into and comes out of their methods. So a trace cannot
differ from what the model computes, and costs nothing where none is made.

    seen = trace(model, params, source=[5, 6, 1], target=[8, 9, 1])
    seen.encoder.layers[0].self_attention.weights  # [N, S, S]
    named(seen)["decoder.layers.1.cross_attention.scores"]  # [N, T, S]
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from transformer_jax.batch import PAD, Batch, unpacked
from transformer_jax.errors import UserError
from transformer_jax.nn.attention import Relative
from transformer_jax.nn.stacks import unstack_layers
from transformer_jax.nn.transformer import Transformer

Array = np.ndarray


class AttentionTrace(NamedTuple):
    """One attention sub-layer, from T queries to S keys."""

    queries: Array  # [N, T, H]; rotary ones are turned
    keys: Array  # [N, S, H]
    values: Array  # [N, S, H]
    scores: Array  # [N, T, S] q kᵀ; with relative positions q (k + a^K)ᵀ
    scaled_scores: Array  # [N, T, S] scores / √H
    mask: Array  # bool [T, S]: which query may see which key
    masked_scores: Array  # [N, T, S] scaled_scores, −∞ where the mask is False
    weights: Array  # [N, T, S] softmax of masked_scores
    heads: Array  # [N, T, H] what each head gives: Σ weights · values
    relative: Relative | None  # a^K [R, H], a^V [R, H] and the one-hot distances [T, S, R]
    frame: "FrameTrace"


class FeedForwardTrace(NamedTuple):
    hidden: Array  # [T, F] before the activation
    activated: Array  # [T, F] after it, and after the gate where there is one
    frame: "FrameTrace"


class FrameTrace(NamedTuple):
    """The residual frame of a sub-layer f. Each [T, D].

    post: after = norm(before + update), entered = before. pre: after = before + update, entered = norm(before).
    """

    before: Array  # the residual stream
    entered: Array  # what f gets
    update: Array  # what f gives
    after: Array  # the residual stream behind it


class LayerTrace(NamedTuple):
    self_attention: AttentionTrace
    cross_attention: AttentionTrace | None  # none in the encoder
    feed_forward: FeedForwardTrace


class StackTrace(NamedTuple):
    """Encoder or decoder."""

    tokens: Array  # [T, D] embeddings of the ids, as scaled by the model
    positions: Array | None  # [T, D] what is added for the positions; none where they enter in the attention
    embedded: Array  # [T, D] what enters the first layer
    layers: tuple[LayerTrace, ...]
    output: Array  # [T, D] what leaves the last layer, and its final norm where there is one


class Trace(NamedTuple):
    """A pair's way through the model. There is no batch axis."""

    source: Array  # int32 [S], EOS included
    target: Array  # int32 [T], EOS included: what each position shall predict
    target_input: Array  # int32 [T]: what each position reads, BOS first
    encoder: StackTrace
    decoder: StackTrace
    logits: Array  # [T, V], the padded part of the vocabulary cut off
    probabilities: Array  # [T, V] softmax of the logits

    @property
    def encoder_weights(self) -> Float[Array, "L N S S"]:
        return np.stack([layer.self_attention.weights for layer in self.encoder.layers])

    @property
    def decoder_weights(self) -> Float[Array, "L N T T"]:
        return np.stack([layer.self_attention.weights for layer in self.decoder.layers])

    @property
    def cross_weights(self) -> Float[Array, "L N T S"]:
        return np.stack([layer.cross_attention.weights for layer in self.decoder.layers if layer.cross_attention])


def trace(model: Transformer, params: Any, source: Sequence[int], target: Sequence[int]) -> Trace:
    """The forward pass of one pair of ids, both with their EOS, without dropout.

    It is compiled once for a pair of lengths. A model with `scan` is run as the same model without.

    Raises:
      UserError: if a side is empty, or has padding or an id outside its vocabulary.
    """
    config = model.config
    _check("source", source, config.source_vocab)
    _check("target", target, config.target_vocab)
    batch = unpacked(jnp.asarray([list(source)], jnp.int32), jnp.asarray([list(target)], jnp.int32))
    calls = jax.tree.map(_plain, jax.device_get(recorded_calls(*_without_scan(model, params), batch)))
    logits = calls["__call__"].output[0, :, : config.target_vocab]
    return Trace(
        source=np.asarray(batch.source[0]),
        target=np.asarray(batch.target[0]),
        target_input=np.asarray(batch.target_input[0]),
        encoder=_stack(calls, "encoder", "source", layers=config.encoder_layers),
        decoder=_stack(calls, "decoder", "target", layers=config.decoder_layers),
        logits=logits,
        probabilities=softmax(logits),
    )


def named(trace: Trace) -> dict[str, Array]:
    """The arrays of a trace by their dotted names, those that are there: `encoder.layers.0.self_attention.scores`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(trace)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def softmax(scores: Float[Array, "..."]) -> Float[Array, "..."]:
    """Over the last axis."""
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


class Call(NamedTuple):
    """One call of a module's method."""

    arguments: tuple
    output: Any


WATCHED = {"__call__", "attend", "_relative", "enter", "leave", "embed_source", "embed_target"}


@functools.partial(jax.jit, static_argnums=0)
def recorded_calls(model: Transformer, params: Any, batch: Batch) -> dict[str, Call]:
    """The calls of a forward pass by module and method: `encoder.layers_0.self_attention.attend`.

    Of a module that is called twice, a tied embedding, the second is named `again.…`.
    """
    calls: dict[str, Call] = {}

    def record(method, arguments, options, context):
        if context.method_name == "attend":
            options = {**options, "return_weights": True}
        output = method(*arguments, **options)
        if context.method_name in WATCHED:
            name = ".".join((*context.module.path, context.method_name))
            calls[f"again.{name}" if name in calls else name] = Call(arguments, output)
        return output

    with nn.intercept_methods(record):
        model.apply(params, batch)
    return calls


def _without_scan(model: Transformer, params: Any) -> tuple[Transformer, Any]:
    config = model.config
    if config.scan:
        params = {**params, "params": unstack_layers(params["params"])}
    return Transformer(dataclasses.replace(config, scan=False, remat=False)), params


def _plain(x: Array) -> Array:
    return x.astype(np.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _stack(calls: Mapping[str, Call], stack: str, side: str, *, layers: int) -> StackTrace:
    tied = "again.source_embedding.__call__" if side == "target" else None
    tokens = calls.get(f"{side}_embedding.__call__") or calls[tied or ""]
    embedded = calls[f"embed_{side}"].output
    norm = calls.get(f"{side}_embedding_norm.__call__")
    added = (norm.arguments[0] if norm else embedded) - tokens.output
    return StackTrace(
        tokens=tokens.output[0],
        positions=added[0] if added.any() else None,
        embedded=embedded[0],
        layers=tuple(_layer(calls, f"{stack}.layers_{index}") for index in range(layers)),
        output=calls[f"{stack}.__call__"].output[0][0],
    )


def _layer(calls: Mapping[str, Call], layer: str) -> LayerTrace:
    cross = f"{layer}.cross_attention"
    return LayerTrace(
        _attention(calls, f"{layer}.self_attention"),
        _attention(calls, cross) if f"{cross}.attend" in calls else None,
        FeedForwardTrace(
            calls[f"{layer}.feed_forward.hidden.__call__"].output[0],
            calls[f"{layer}.feed_forward.output.__call__"].arguments[0][0],
            _frame(calls, f"{layer}.feed_forward"),
        ),
    )


def _attention(calls: Mapping[str, Call], name: str) -> AttentionTrace:
    _, memory, mask = calls[f"{name}.attend"].arguments
    asked = calls[f"{name}._relative"]  # its query is the one that is compared with keys
    queries, keys, values = (_by_head(x) for x in (asked.arguments[0], memory.keys, memory.values))
    relative = asked.output
    scores = np.einsum("NTH,NSH->NTS", queries, keys, dtype=np.float32)
    if relative is not None:
        scores += np.einsum("NTH,RH,TSR->NTS", queries, relative.keys, relative.distances, dtype=np.float32)
    scaled = scores / np.float32(np.sqrt(queries.shape[-1]))
    heads = calls[f"{name}.output.__call__"].arguments[0][0]  # [T, N · H]
    return AttentionTrace(
        queries=queries,
        keys=keys,
        values=values,
        scores=scores,
        scaled_scores=scaled,
        mask=mask[0, 0],
        masked_scores=np.where(mask[0], scaled, -np.inf),
        weights=calls[f"{name}.attend"].output.weights[0],
        heads=heads.reshape(len(heads), len(values), -1).swapaxes(0, 1),
        relative=relative,
        frame=_frame(calls, name),
    )


def _by_head(x: Float[Array, "1 T N H"]) -> Float[Array, "N T H"]:
    return x[0].swapaxes(0, 1)


def _frame(calls: Mapping[str, Call], name: str) -> FrameTrace:
    enter, leave = calls[f"{name}_residual.enter"], calls[f"{name}_residual.leave"]
    before, update = leave.arguments[:2]
    return FrameTrace(before[0], enter.output[0], update[0], leave.output[0])


def _check(side: str, ids: Sequence[int] | Int[Array, "_"], vocab: int | None) -> None:
    if not len(ids):
        raise UserError(f"the {side} has no tokens. Give at least its EOS.")
    wrong = next((int(token) for token in ids if not (PAD < token < (vocab or 0))), None)
    if wrong is not None:
        raise UserError(f"{side} id {wrong}: expected ids from 1 to {(vocab or 0) - 1}, without padding, EOS last.")
