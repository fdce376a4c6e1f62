"""The mesh of devices, and what is split over which of its axes.

`data` and `fsdp` split the rows of a batch. `fsdp` also splits every matrix along D, to be put together where it is
used (fully sharded data parallelism; ZeRO, Rajbhandari et al., 2020). `tensor` splits heads, the feed-forward layer
and the vocabulary, whose parts are never put together (Megatron-LM, Shoeybi et al., 2019).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.batch import Batch, Share
from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = (DATA, FSDP)  # of a batch

MESH_AXIS = {"B": ROWS, "V": TENSOR, "N": TENSOR, "F": TENSOR, "D": FSDP}  # all other axes are whole

# The last axes of the parameters by the end of their paths; N is N · H, heads side by side. What is not here (norms,
# biases of width D, relative positions: vectors and small tables) is whole on every device.
PARAMETER_AXES = {
    "embedding/table": "VD",
    "projection/table": "VD",
    "output_bias": "V",
    "_positions": "PD",
    **{f"attention/{name}/kernel": "DN" for name in ("query", "key", "value")},
    **{f"attention/{name}/bias": "N" for name in ("query", "key", "value")},
    "attention/output/kernel": "ND",
    **{f"feed_forward/{name}/kernel": "DF" for name in ("hidden", "gate")},
    **{f"feed_forward/{name}/bias": "F" for name in ("hidden", "gate")},
    "feed_forward/output/kernel": "FD",
}
REMEDIES = {"V": "model.vocab_multiple", "N": "model.heads", "F": "model.feed_forward", "D": "model.width"}


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices of all processes, or over the first of one process if the config says fewer.

    Raises:
      UserError: if there are fewer devices, or it leaves devices of other processes out.
    """
    devices = jax.devices()
    sizes = {DATA: config.data, FSDP: config.fsdp, TENSOR: config.tensor}
    given = math.prod(size for size in sizes.values() if size != -1)
    sizes = {axis: len(devices) // given if size == -1 else size for axis, size in sizes.items()}
    count = math.prod(sizes.values())
    whole = -1 in (config.data, config.fsdp, config.tensor) or jax.process_count() > 1
    if not 1 <= count <= len(devices) or (whole and count != len(devices)):
        raise UserError(
            f"mesh.data is {config.data}, mesh.fsdp {config.fsdp} and mesh.tensor {config.tensor}, but there are "
            f"{len(devices)} devices. Set one of them to -1 for the rest, and the others so that their product divides "
            f"{len(devices)}."
        )
    # Auto: the layers of Flax fail on explicitly sharded axes, which are jax.make_mesh's default.
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), devices=devices[:count], axis_types=(AxisType.Auto,) * len(sizes)
    )


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """How parameters, or anything that holds them under their paths (optimizer state, averages), lie on the mesh.

    `tree` has arrays or `jax.ShapeDtypeStruct`s; the result has a `NamedSharding` in the place of each.

    Raises:
      UserError: if an axis of the mesh does not divide one of a parameter.
    """
    return jax.tree.map_with_path(lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree)


def shard(tree: Any, mesh: Mesh) -> Any:
    """The tree, each array split over the devices as `shardings` says. All processes have the same tree."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings(tree, mesh))
    return jax.tree.map(lambda x, sharding: _pieces(np.asarray(x), sharding), tree, shardings(tree, mesh))


def unshard(tree: Any, mesh: Mesh) -> Any:
    """A tree that lies on the mesh, whole in the memory of each process (NumPy). All processes must call it."""
    return jax.tree.map(np.asarray, _everywhere(mesh)(tree))


def share(mesh: Mesh, *, multiple: int = 1) -> Share:
    """The rows of a batch that this process gathers: those which its devices hold, as one of its `tensor` axis does.

    Which parts there are depends on the mesh alone and not on the number of processes.
    """
    parts = mesh.shape[DATA] * mesh.shape[FSDP]
    indices: Any = NamedSharding(mesh, PartitionSpec(ROWS)).addressable_devices_indices_map((parts,)).values()
    return Share(tuple(sorted({index[0].indices(parts)[0] for index in indices})), parts, multiple)


def shard_batch(batch: Batch, mesh: Mesh, *, multiple: int = 1) -> Batch:
    """This process' `share` of a batch (NumPy, [B, …]) → the whole batch of all processes on the devices.

    Rows of padding are added until every part has the same number of rows, a multiple of `multiple`; they weigh 0.
    """
    parts = share(mesh).parts
    missing = -batch.target.shape[0] % (len(parts) * multiple)
    sharding = NamedSharding(mesh, PartitionSpec(ROWS))
    padded = Batch(*(np.pad(np.asarray(ids), ((0, missing), (0, 0))) for ids in batch))
    return Batch(*(_put_together(ids, parts, sharding) for ids in padded))


def _put_together(ids: np.ndarray, parts: Sequence[int], sharding: NamedSharding) -> jax.Array:
    """The array of which this process has some of the equal parts [rows, …], one after another."""
    rows = len(ids) // len(parts)  # of a part
    count = sharding.mesh.shape[DATA] * sharding.mesh.shape[FSDP]

    def piece(index: Any) -> np.ndarray:
        place = parts.index((index[0].start or 0) // rows) * rows
        return ids[place : place + rows]

    return jax.make_array_from_callback((rows * count, *ids.shape[1:]), sharding, piece)


@functools.cache
def _everywhere(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _pieces(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.array(x[index]))


def on_mesh(function: Callable, mesh: Mesh) -> Callable:
    """The function, when it is compiled, with every array that is `laid` in it over this mesh."""

    @functools.wraps(function)
    def meshed(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments)

    return meshed


def laid(x: jax.Array, axes: str) -> jax.Array:
    """`x` with its axes split as MESH_AXIS says, "." being whole; outside `on_mesh`, `x` itself.

    What lies between a few such places the compiler finds out by itself. Without any, it would rather split D of
    everything over `fsdp` than put the parameters together, and add up activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not {DATA, FSDP, TENSOR} <= set(mesh.auto_axes):  # no mesh, or one of a program around this library
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*map(MESH_AXIS.get, axes)))


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    axes = _axes(name)
    for axis, size in zip(axes, shape[len(shape) - len(axes) :], strict=True):
        mesh_axis = MESH_AXIS.get(axis)
        if mesh_axis and size % mesh.shape[mesh_axis]:
            raise UserError(
                f"mesh.{mesh_axis} is {mesh.shape[mesh_axis]}, which does not divide axis {axis} ({size}) of {name}, "
                f"{shape}. Change it or {REMEDIES[axis]}."
            )
    whole = [None] * (len(shape) - len(axes))  # the layers of a scanned stack
    return PartitionSpec(*whole, *(MESH_AXIS.get(axis) for axis in axes))


def _axes(name: str) -> str:
    """The logical axes of a parameter, or of Adafactor's means of its rows or columns."""
    parameter, _, last = name.rpartition("/")
    if last == "rows":
        return _axes(parameter)[:-1]
    if last == "columns":
        return _axes(parameter)[:-2] + _axes(parameter)[-1:]
    return next((axes for end, axes in PARAMETER_AXES.items() if name.endswith(end)), "")
