"""Parameters in one file of safetensors, each under its path: `encoder/layers_0/self_attention/query/kernel`."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from transformer_jax.batch import unpacked
from transformer_jax.config import TransformerConfig
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer

STORED = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of {"params": …} by their paths."""
    return traverse_util.flatten_dict(params["params"], sep="/")


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    return {"params": traverse_util.unflatten_dict(dict(leaves), sep="/")}


def write_parameters(path: str | os.PathLike, params: Mapping[str, Any], *, dtype: str = "float32") -> None:
    """Writes {"params": …}; `dtype` is float32 or bfloat16. The file appears when it is whole."""
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    leaves = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf, STORED[dtype]), flat(params))
    save_file(leaves, unfinished, metadata={"format": "transformer_jax"})
    unfinished.replace(path)


def read_parameters(path: str | os.PathLike) -> dict[str, Any]:
    """{"params": …}, NumPy float32 whatever they are stored as.

    Raises:
      UserError: if the file is damaged or is of something else.
    """
    try:
        leaves = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, MemoryError) as error:
        raise UserError(
            f"{path}: not a whole file of safetensors ({str(error).partition(chr(10))[0]:.200}). Copy or export it "
            "again."
        ) from error
    for name, leaf in leaves.items():
        if leaf.dtype not in STORED.values():
            raise UserError(f"{path}: {name:.200} is {leaf.dtype}; expected float32 or bfloat16. Export it again.")
        if leaves.keys() & _above(name):
            raise UserError(f"{path}: {name:.200} is below another parameter. Export it again.")
    return nested({name: leaf.astype(np.float32) for name, leaf in leaves.items()})


def _above(name: str) -> set[str]:
    """The paths of what a parameter lies in."""
    parts = name.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path.

    The layers of a stack are alike, so one of each is asked for its parameters; a model is not made.
    """
    one = config if config.scan else dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
    model, tokens = Transformer(one), jax.ShapeDtypeStruct((1, 1), np.int32)

    def init(tokens: jax.Array) -> Any:
        return model.init(jax.random.key(0), unpacked(tokens, tokens))

    found: dict[str, tuple[int, ...]] = {}
    for path, leaf in flat(jax.eval_shape(init, tokens)).items():
        stack, layer, rest = path.partition("/layers_0/")
        count = getattr(config, f"{stack}_layers") if layer else 1
        found |= {f"{stack}/layers_{index}/{rest}" if layer else path: tuple(leaf.shape) for index in range(count)}
    return found


def check_shapes(params: Mapping[str, Any], config: TransformerConfig, *, name: str) -> None:
    """
    Raises:
      UserError: if the parameters are not those of a model of this configuration; it names the first that differs.
    """
    expected = shapes(config)
    found = {path: tuple(np.shape(leaf)) for path, leaf in flat(params).items()} if "params" in params else {}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise UserError(
                f"{name}: the parameter {path:.200} has shape {found.get(path)}, but its configuration asks for "
                f"{expected.get(path)}. The two are not of one model: restore them."
            )
