"""The mesh of devices, and what is split over it: the rows of a batch. Parameters are on every device.

logical axis      mesh axis
B (batch rows)    data
everything else   none
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.batch import Batch
from transformer_jax.config import MeshConfig
from transformer_jax.errors import UserError

DATA = "data"


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over all devices of all processes, or over the first `config.data` of one process.

    Raises:
      UserError: if there are fewer devices, or it leaves devices of other processes out.
    """
    devices = jax.devices()
    count = len(devices) if config.data == -1 else config.data
    if not 1 <= count <= len(devices) or (jax.process_count() > 1 and count != len(devices)):
        raise UserError(f"mesh.data is {config.data}, but there are {len(devices)} devices. Set it to -1 for all.")
    # Auto: the layers of Flax fail on explicitly sharded axes, which are jax.make_mesh's default.
    return jax.make_mesh((count,), (DATA,), devices=devices[:count], axis_types=(AxisType.Auto,))


def shard_batch(batch: Batch, mesh: Mesh, *, multiple: int = 1) -> Batch:
    """This process' rows of a batch (NumPy, [B, …]) → the whole batch of all processes on the devices.

    Rows of padding are added until every device has the same number of rows, a multiple of `multiple`; they weigh 0.
    """
    rows = batch.target.shape[0]
    missing = -rows % (len(mesh.local_devices) * multiple)
    sharding = NamedSharding(mesh, PartitionSpec(DATA))
    padded = Batch(*(np.pad(np.asarray(ids), ((0, missing), (0, 0))) for ids in batch))
    return Batch(*(jax.make_array_from_process_local_data(sharding, ids) for ids in padded))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy of every array on each device."""
    return jax.device_put(tree, replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
