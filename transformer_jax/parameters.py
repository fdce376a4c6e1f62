"""Parameters in one file of safetensors, each under its path: `encoder/layers_0/self_attention/query/kernel`."""

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

from transformer_jax.errors import UserError

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
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(
            f"{path}: not a whole file of safetensors ({str(error).splitlines()[0]:.200}). Copy or export it again."
        ) from error
    for name, leaf in leaves.items():
        if leaf.dtype not in STORED.values():
            raise UserError(f"{path}: {name} is {leaf.dtype}; expected float32 or bfloat16. Export it again.")
    return nested({name: leaf.astype(np.float32) for name, leaf in leaves.items()})
