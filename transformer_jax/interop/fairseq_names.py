"""Stacks whose tensors have the names that fairseq gave them, and Hugging Face kept (BART).

encoder.layers.0.self_attn.q_proj.weight …, self_attn_layer_norm, fc1, fc2, final_layer_norm
decoder.layers.0. as these, with encoder_attn and encoder_attn_layer_norm
encoder.layernorm_embedding, and encoder.layer_norm where norms come first
"""

import functools
from collections.abc import Iterator

import numpy as np

from transformer_jax.config import NormPlace, TransformerConfig
from transformer_jax.interop.mapping import Rule, linear, norm

PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


def rules_of_stacks(config: TransformerConfig) -> Iterator[Rule]:
    """Both stacks with their norms, all but embeddings and positions.

    A feed-forward layer that is narrower than the widest is filled up with units of zeros, which change nothing.
    """
    for name, side, layers in (
        ("encoder", "source", config.encoder_layers),
        ("decoder", "target", config.decoder_layers),
    ):
        for index in range(layers):
            ours, theirs = f"{name}/layers_{index}", f"{name}.layers.{index}"
            yield from _attention(f"{ours}/self_attention", f"{theirs}.self_attn")
            if name == "decoder":
                yield from _attention(f"{ours}/cross_attention", f"{theirs}.encoder_attn")
            yield from _feed_forward(f"{ours}/feed_forward", theirs, config.feed_forward)
            yield from norm(f"{ours}/feed_forward_residual/normalize", f"{theirs}.final_layer_norm")
        if config.embedding_norm:
            yield from norm(f"{side}_embedding_norm", f"{name}.layernorm_embedding")
        if config.norm_place == NormPlace.PRE:
            yield from norm(f"{name}/final_norm", f"{name}.layer_norm")


def _attention(ours: str, theirs: str) -> Iterator[Rule]:
    for our, their in PROJECTIONS.items():
        yield from linear(f"{ours}/{our}", f"{theirs}.{their}")
    yield from norm(f"{ours}_residual/normalize", f"{theirs}_layer_norm")


def _feed_forward(ours: str, theirs: str, width: int) -> Iterator[Rule]:
    last = functools.partial(_widened, width=width)
    yield Rule(f"{ours}/hidden/kernel", f"{theirs}.fc1.weight", lambda tensor: last(tensor.T))
    yield Rule(f"{ours}/hidden/bias", f"{theirs}.fc1.bias", last)
    yield Rule(f"{ours}/output/kernel", f"{theirs}.fc2.weight", lambda tensor: last(tensor).T)
    yield Rule(f"{ours}/output/bias", f"{theirs}.fc2.bias")


def _widened(tensor: np.ndarray, width: int) -> np.ndarray:
    """Zeros at the end of the last axis."""
    return np.pad(tensor, [(0, 0)] * (tensor.ndim - 1) + [(0, width - tensor.shape[-1])])
