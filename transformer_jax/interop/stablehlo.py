"""A model as compiled programs: a directory which translates without this library.

    parameters.npz      the parameters, once, whatever the number of programs; bfloat16 as its 16 bits
    search_S.stablehlo  encoding and beam search of sources of up to S tokens, for CPUs, NVIDIA GPUs and TPUs, and for
                        any number of rows; `jax.export` reads them, and keeps them readable for six months or more
    tokenizer/          as in a run directory
    artifact.json       lengths, limits and the dtype of the parameters
    translate.py        translates standard input; needs jax and flatbuffers, and sentencepiece or tokenizers

The search is the run's own, as its config says, and can't be changed later.
"""

import dataclasses
import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtyping import Array, Int

from transformer_jax.config import AttentionKernel, Positions, SearchConfig, SearchMethod
from transformer_jax.data.segmenters import WordPieces
from transformer_jax.decoding.pool import Engine, search_batch
from transformer_jax.decoding.search import Asked, Hypotheses
from transformer_jax.decoding.translator import output_limit, search_rules
from transformer_jax.errors import UserError
from transformer_jax.interop import standalone_translate
from transformer_jax.interop.model import Model, Path, new_directory
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import STORED, flat, nested

PLATFORMS = "cpu", "cuda", "tpu"
SHORTEST = 16  # source tokens of the first program; each further one has twice as many


def write(model: Model, directory: Path, *, dtype: str = "float32") -> None:
    """Makes the directory of a model; `dtype` is that of the stored parameters.

    Raises:
      UserError: if the directory exists, or the model's search or tokenizer is one that such a directory can't have.
    """
    search = model.config.search
    _check(model, search)
    if importlib.util.find_spec("flatbuffers") is None:
        raise UserError("JAX writes compiled programs with the library flatbuffers: pip install flatbuffers.")
    lengths = source_lengths(_longest(model))
    with new_directory(directory) as unfinished:
        leaves = {path: np.ascontiguousarray(leaf, STORED[dtype]) for path, leaf in flat(model.params).items()}
        stored = {path: leaf.view(np.uint16) if dtype == "bfloat16" else leaf for path, leaf in leaves.items()}
        np.savez(unfinished / standalone_translate.PARAMETERS, **dict[str, Any](stored))
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        for length in lengths:
            program = exported(searching(model, search, length=length), shapes, length=length)
            (unfinished / standalone_translate.PROGRAM.format(length)).write_bytes(program)
        model.tokenizer.save(unfinished / standalone_translate.TOKENIZER)
        facts = {"lengths": lengths, "dtype": dtype, "tokens": search.tokens // search_rules(search).slots}
        (unfinished / standalone_translate.FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(standalone_translate.__file__, unfinished / "translate.py")


def exported(function: Callable, shapes: Mapping[str, Any], *, length: int) -> bytes:
    """A program of (parameters, sources [any number of rows, length]) for every platform, serialised."""
    (rows,) = export.symbolic_shape("rows")
    source = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return bytes(export.export(jax.jit(function), platforms=PLATFORMS)(shapes, source).serialize())


def searching(model: Model, search: SearchConfig, *, length: int) -> Callable[..., tuple[Array, Array, Array]]:
    """A function of (parameters by their paths, sources): tokens [B, n, T], scores [B, n], lengths [B, n]."""
    # Kernels of one vendor are no part of a program for several.
    config = dataclasses.replace(model.config.model, attention_kernel=AttentionKernel.XLA)
    transformer, rules = Transformer(config), search_rules(search)
    forced = np.asarray(search.forced_prefix, np.int32)
    positions = _positions(model)
    longest = min(max(output_limit(length, search), len(forced) + 1), positions)
    limit_of_length = np.array(
        [0] + [max(min(output_limit(size, search), positions), len(forced) + 1) for size in range(1, length + 1)],
        np.int32,
    )

    def run(leaves: Mapping[str, Array], source: Int[Array, "B S"]) -> tuple[Array, Array, Array]:
        params = nested({path: leaf.astype(jnp.float32) for path, leaf in leaves.items()})
        limits = jnp.asarray(limit_of_length)[(source != 0).sum(axis=1)]
        prefix = jnp.broadcast_to(jnp.asarray(forced)[None], (source.shape[0], len(forced))) if len(forced) else None
        found: Hypotheses = search_batch(
            Engine(transformer, rules), (params,), source, Asked(limits, prefix), length=longest
        )
        return found.tokens, found.scores, found.lengths

    return run


def source_lengths(longest: int) -> list[int]:
    """16, 32, 64, … and the longest: a program for each."""
    count = max(0, math.ceil(math.log2(longest / SHORTEST)))
    return [SHORTEST << power for power in range(count)] + [longest]


def _positions(model: Model) -> int:
    config = model.config.model
    return config.max_positions if config.positions == Positions.LEARNED else 2**31 - 1


def _longest(model: Model) -> int:
    """The most source tokens that a `Translator` gives the model at once."""
    return min(model.config.data.max_length, _positions(model))


def _check(model: Model, search: SearchConfig) -> None:
    if search.method != SearchMethod.BEAM:
        raise UserError("config.search.method is sample, which needs keys. Set it to beam to export programs.")
    sides: Sequence[Any] = (model.tokenizer.source, model.tokenizer.target)
    if any(isinstance(side, WordPieces) for side in sides):
        raise UserError("the tokenizer is a list of merges, which an exported program can't have yet.")
