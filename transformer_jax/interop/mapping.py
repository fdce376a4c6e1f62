"""A mapping as a list of rules: which of another system's tensors becomes which parameter, and how it is changed."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import TransformerConfig
from transformer_jax.errors import UserError
from transformer_jax.interop.model import Mapped
from transformer_jax.parameters import nested, shapes


class Rule(NamedTuple):
    ours: str  # a path below `params`: encoder/layers_0/self_attention/query/kernel
    theirs: str
    change: Callable[[np.ndarray], np.ndarray] = np.asarray


def linear(ours: str, theirs: str) -> list[Rule]:
    """y = W x + b, whose matrix is stored as W."""
    return [Rule(f"{ours}/kernel", f"{theirs}.weight", np.transpose), Rule(f"{ours}/bias", f"{theirs}.bias")]


def norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}/scale", f"{theirs}.weight"), Rule(f"{ours}/bias", f"{theirs}.bias")]


def apply_rules(
    rules: Iterable[Rule],
    tensors: Mapping[str, np.ndarray],
    config: TransformerConfig,
    *,
    path: str,
    unused: str = "",
    added: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, Any], list[Mapped]]:
    """The parameters, float32, that the rules make of tensors, and what became of what.

    Args:
      path: where the tensors come from, for messages.
      unused: a pattern of the names of tensors that need no rule.
      added: parameters that come from no tensor.

    Raises:
      UserError: if a tensor is missing, has another shape than `config` asks for or is not finite, or if one is left
        over: the model then has a part which this library's has not.
    """
    expected = shapes(config)
    params, mapped, left = dict(added or {}), [], set(tensors)
    for ours, theirs, change in rules:
        params[ours] = _changed(tensors, theirs, change, expected.get(ours), path)
        mapped.append(Mapped(theirs, ours, params[ours].shape))
        left.discard(theirs)
    left = sorted(name for name in left if not re.fullmatch(unused, name))
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{path}: the model has parts which this library's Transformer has not: {', '.join(left[:3])}{more}. "
            "It can't be imported."
        )
    return nested(params), mapped


def layer_count(names: Iterable[str], prefix: str) -> int:
    """How many layers there are of names such as `prefix`0.fc1.weight."""
    found = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def vocabulary_rows(order: Sequence[int], *, start: int, multiple: int) -> Callable[[np.ndarray], np.ndarray]:
    """What brings the rows of a table into the order of this library's ids.

    Args:
      order: their ids of our 1, 2, 3, …
      start: their id with which the decoder starts, for our 0.
      multiple: rows of zeros fill the table up to a multiple of this.
    """

    def change(table: np.ndarray) -> np.ndarray:
        rows = table[[start, *order]]
        return np.pad(rows, [(0, -len(rows) % multiple)] + [(0, 0)] * (rows.ndim - 1))

    return change


def _changed(tensors, name: str, change, expected: tuple[int, ...] | None, path: str) -> np.ndarray:
    if name not in tensors:
        raise UserError(f"{path}: the tensor {name} is missing. Give the whole file of a model of this kind.")
    tensor = np.asarray(tensors[name])
    try:
        changed = np.ascontiguousarray(change(tensor), np.float32)
    except (ValueError, IndexError, TypeError):
        changed = None
    if changed is None or changed.shape != expected:
        raise UserError(
            f"{path}: the tensor {name} has shape {list(tensor.shape)}, which does not fit the rest of the model. "
            "Its configuration is of another model, or the file is damaged."
        )
    if not np.isfinite(changed).all():
        raise UserError(f"{path}: the tensor {name} has values that are not finite. Give another checkpoint.")
    return changed
