"""What a training step costs on each mesh: FLOPs, memory, and bytes that the network carries, from shapes alone.

    python3 benchmarks/mesh_costs.py                                  where each mesh stops scaling
    python3 benchmarks/mesh_costs.py --batch 25000 --device "H100"    with another batch, of one kind of device
    python3 benchmarks/mesh_costs.py --compiled                       beside programs compiled for 8 CPU devices
    python3 benchmarks/mesh_costs.py --compiled --topology v5e:2x4    … for TPUs: needs libtpu, but no TPU

No device is needed, and nothing is trained. docs/scaling.md has the tables and says how they are read.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

if __name__ == "__main__":  # before JAX is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}  # libtpu, without a TPU

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.batch import Batch, unpacked
from transformer_jax.config import DType, OptimizerConfig, TransformerConfig, Tying
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parallel import DATA, FSDP, ROWS, TENSOR, on_mesh, shardings
from transformer_jax.training.objective import make_objective
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import init_state, make_train_step

VOCAB = 37_000  # the paper's, section 5.1
MODELS = {
    "base": TransformerConfig(),
    "big": TransformerConfig(width=1024, heads=16, feed_forward=4096),
    "1 B": TransformerConfig(width=2048, heads=16, feed_forward=8192, encoder_layers=8, decoder_layers=8),
}


class Sizes(NamedTuple):
    """Of a mesh."""

    data: int
    fsdp: int
    tensor: int

    def __str__(self) -> str:
        return " × ".join(map(str, self))


class Shape(NamedTuple):
    """Of a batch: so many rows on all devices, both sides equally long."""

    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class Device:
    """Figures of its maker, of one device. Bandwidths are of what it sends, while it receives as much."""

    name: str
    flops: float  # a second, bfloat16 products, not sparse
    memory: float  # bytes
    near: float  # bytes a second to those it is closely connected with
    domain: int  # how many these are, itself included
    far: float  # bytes a second to any other


# TPU: cloud.google.com/tpu/docs/v5e and v5p. Of their "bidirectional ICI bandwidth" half is sent, and of that one ring
# takes the part of one dimension of the torus: 400 / 2 / 2 GB/s in two dimensions, 1200 / 2 / 3 in three. The network
# of the data center: 6.4 Tb/s a pod of 256, and 50 Gb/s a chip.
# GPU: NVIDIA's data sheets of A100 (80 GB, SXM) and H100 (SXM), half of NVLink's 600 and 900 GB/s; the data sheets of
# DGX A100 and H100 for the network: 8 × 200 and 8 × 400 Gb/s for 8 GPUs.
DEVICES = [
    Device("TPU v5e", 197e12, 16e9, 100e9, 256, 3.125e9),
    Device("TPU v5p", 459e12, 95e9, 200e9, 8960, 6.25e9),
    Device("A100", 312e12, 80e9, 300e9, 8, 25e9),
    Device("H100", 989e12, 80e9, 450e9, 8, 50e9),
]
ATTAINED = 0.5  # part of the peak that the products of matrices are taken to reach when nothing is waited for


class Parameter(NamedTuple):
    """An array of the model, and which axes of the mesh split it."""

    name: str
    size: int  # numbers
    split: frozenset[str]
    uses: int  # in how many places its gradient arises, each of which XLA sums over the devices by itself

    def on_each(self, sizes: Sizes, *axes: str) -> float:
        """How many of its numbers a device has if so many of the axes that can split it do."""
        return self.size / math.prod(getattr(sizes, axis) for axis in self.split & {*axes})


@functools.cache
def parameters(config: TransformerConfig) -> list[Parameter]:
    """All of the model, split as `transformer_jax.parallel` says."""
    shapes = jax.eval_shape(lambda: init(with_vocabulary(config)))
    lie = shardings(shapes, AbstractMesh((1, 1, 1), Sizes._fields, axis_types=(AxisType.Auto,) * 3))
    found = []
    for (path, leaf), sharding in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(lie), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append(Parameter(name, leaf.size, frozenset(filter(None, sharding.spec)), _uses(name, config)))
    return found


def _uses(name: str, config: TransformerConfig) -> int:
    """A table is looked up and, if it is tied, multiplied with."""
    tied = {Tying.ALL: {"source": 3}, Tying.DECODER: {"source": 1, "target": 2}, Tying.NONE: {}}[Tying(config.tying)]
    return next((uses for side, uses in tied.items() if f"{side}_embedding/table" in name), 1)


def state_bytes(config: TransformerConfig, sizes: Sizes, *, copies: int = 4) -> float:
    """Of parameters, Adam's two moments and the moving average, on each device; all are float32."""
    return 4 * copies * sum(one.on_each(sizes, FSDP, TENSOR) for one in parameters(config))


def gradient_bytes(config: TransformerConfig, sizes: Sizes) -> float:
    """Of the gradients that wait for the optimizer, on each device, float32."""
    return 4 * sum(one.on_each(sizes, FSDP, TENSOR) for one in parameters(config))


def with_vocabulary(config: TransformerConfig) -> TransformerConfig:
    """The config with the paper's vocabulary where it has none."""
    sizes = {side: getattr(config, side) or VOCAB for side in ("source_vocab", "target_vocab")}
    return dataclasses.replace(config, **sizes)


def local_rows(sizes: Sizes, shape: Shape) -> int:
    return -(-shape.rows // (sizes.data * sizes.fsdp))


def flops(config: TransformerConfig, sizes: Sizes, shape: Shape) -> float:
    """Of a step on each device: products of matrices only. Backward is twice forward."""
    tokens = local_rows(sizes, shape) * shape.length
    products = sum(one.on_each(sizes, TENSOR) for one in parameters(config) if "kernel" in one.name)
    attentions = config.encoder_layers + 2 * config.decoder_layers
    scores = attentions * 2 * shape.length * _attention_width(config) / sizes.tensor  # with keys, and of values
    passes = 4 if config.remat else 3
    return 2 * tokens * (passes * (products + scores) + 3 * _table(config) / sizes.tensor)


def _attention_width(config: TransformerConfig) -> int:
    return config.heads * (config.key_width or config.width // config.heads)


def _table(config: TransformerConfig) -> int:
    """Numbers of the output projection."""
    vocab = config.target_vocab or VOCAB
    return -(-vocab // config.vocab_multiple) * config.vocab_multiple * config.width


def number_bytes(config: TransformerConfig) -> int:
    """Of an activation, of a gathered parameter and of a summed gradient: all have the dtype of the computation."""
    return jnp.dtype(config.dtype).itemsize


def activation_bytes(config: TransformerConfig, sizes: Sizes, shape: Shape) -> float:
    """Of what is kept for the backward pass, on each device; an estimate.

    Of each token: in a layer its input and the output of each sub-layer and norm, queries, keys, values and what is
    mixed of them, the weights of each head, and the hidden layer before and after the activation. Logits: float32.
    With `remat` of each layer only its input, and all of one layer.
    """
    tokens, number = local_rows(sizes, shape) * shape.length, number_bytes(config)
    attention = 3 * config.width + (4 * _attention_width(config) + config.heads * shape.length) / sizes.tensor
    block = 3 * config.width + (3 if config.gated else 2) * config.feed_forward / sizes.tensor
    encoder, decoder = attention + block, 2 * attention + block
    if config.remat:
        layers = (config.encoder_layers + config.decoder_layers) * config.width + decoder
    else:
        layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    logits = 4 * _table(config) / config.width / sizes.tensor
    return tokens * (number * layers + logits)


class Collective(NamedTuple):
    kind: str  # all-reduce, all-gather or reduce-scatter
    axis: str
    bytes: float  # of the whole: what an all-gather gives, and what the others take


def collectives(config: TransformerConfig, sizes: Sizes, shape: Shape) -> list[Collective]:
    """What a step has to exchange. `data`: gradients. `fsdp`: parameters, forward and backward, and gradients.
    `tensor`: activations, wherever a product sums over what is split."""
    number, found = number_bytes(config), []
    for one in parameters(config):
        if FSDP in one.split:
            whole = number * one.on_each(sizes, TENSOR)
            found += [Collective("all-gather", FSDP, 2 * whole), Collective("reduce-scatter", FSDP, one.uses * whole)]
            found += [Collective("all-reduce", DATA, one.uses * whole / sizes.fsdp)]
        else:
            found += [Collective("all-reduce", axis, number * one.on_each(sizes, TENSOR)) for axis in ROWS]
    activations = number * local_rows(sizes, shape) * shape.length * config.width
    found.append(Collective("all-reduce", TENSOR, activation_sums(config) * activations))
    return [one for one in found if getattr(sizes, one.axis) > 1]


def activation_sums(config: TransformerConfig) -> int:
    """How many arrays of activations are summed over `tensor` in a step.

    Forward: the output of each sub-layer, and each lookup in a table. Backward: the gradient of what goes into each
    product with a split matrix; XLA sums those of queries, keys and values one by one.
    """
    block = 2 if config.gated else 1
    forward = 2 * config.encoder_layers + 3 * config.decoder_layers
    backward = (3 + block) * config.encoder_layers + (6 + block) * config.decoder_layers
    return forward * (2 if config.remat else 1) + backward + 2 + 1


def sent(collective: Collective, size: int) -> float:
    """Bytes that each of `size` devices sends, and receives, in a ring."""
    return (2 if collective.kind == "all-reduce" else 1) * (size - 1) / size * collective.bytes


def seconds(collective: Collective, sizes: Sizes, device: Device) -> float:
    """How long it takes if nothing else is exchanged: within each closely connected domain, then between these.

    Neighbours on the mesh are those of `tensor`, then of `fsdp`, then of `data`. What is between domains is cut into
    as many parts as the domain has members of the axis, each of which sends its own.
    """
    stride = math.prod(sizes[list(Sizes._fields).index(collective.axis) + 1 :])
    size = getattr(sizes, collective.axis)
    inside = max(1, min(size, device.domain // stride))
    outside = -(-size // inside)
    part = collective._replace(bytes=collective.bytes / inside)
    return sent(collective, inside) / device.near + sent(part, outside) / device.far


class Cost(NamedTuple):
    """Of a step on each device."""

    compute: float  # seconds of products, rows of padding among them
    useful: float  # seconds of products without these
    exposed: float  # seconds of exchanges which the next product waits for: those of activations
    hidden: float  # seconds of exchanges that go on beside products: parameters and gradients
    bytes: float  # of memory

    @property
    def seconds(self) -> float:
        return max(self.compute + self.exposed, self.hidden)

    @property
    def efficiency(self) -> float:
        """The part of the step in which a device does what one device would do, too."""
        return self.useful / self.seconds


def cost(config: TransformerConfig, sizes: Sizes, shape: Shape, device: Device) -> Cost:
    exchanged = collectives(config, sizes, shape)
    times = {axis: sum(seconds(one, sizes, device) for one in exchanged if one.axis == axis) for axis in Sizes._fields}
    memory = state_bytes(config, sizes) + gradient_bytes(config, sizes) + activation_bytes(config, sizes, shape)
    compute = flops(config, sizes, shape) / (ATTAINED * device.flops)
    useful = compute * shape.rows / (local_rows(sizes, shape) * sizes.data * sizes.fsdp)
    return Cost(compute, useful, times[TENSOR], times[DATA] + times[FSDP], memory)


def init(config: TransformerConfig) -> Any:
    ids = jnp.ones((1, 1), jnp.int32)
    return Transformer(config).init(jax.random.key(0), unpacked(ids, ids))


def compiled_step(config: TransformerConfig, shape: Shape, mesh: Mesh) -> Any:
    """The compiled program of a training step on a mesh, with Adam and a moving average."""
    options = OptimizerConfig(ema=0.999)
    optimizer = make_optimizer(options, width=config.width, steps=1000)
    state = jax.eval_shape(lambda: init_state(init(config), optimizer, seed=0, ema=options.ema))
    lie = shardings(state, mesh)
    state = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state, lie)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(ROWS)))
    step = make_train_step(
        on_mesh(make_objective(Transformer(config), label_smoothing=options.label_smoothing), mesh),
        optimizer,
        learning_rate=make_schedule(options, width=config.width, steps=1000),
        ema=options.ema,
        shardings=lie,
    )
    return step.lower(state, Batch(*[ids] * 6)).compile()


class Exchange(NamedTuple):
    """A collective of a compiled program."""

    kind: str
    size: int  # of each group of devices
    bytes: float  # of the whole, as in `Collective`


COLLECTIVE = re.compile(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


def exchanges(program: str) -> list[Exchange]:
    """The collectives in the text of a compiled program without loops, each once.

    TPU programs write a reduce-scatter as an all-reduce in a computation of that name, and repeat a collective in
    each computation that it is fused with, under its one channel.
    """
    found, computation = {}, ""
    for number, line in enumerate(program.splitlines()):
        if line and not line[0].isspace():
            computation = line
        if not (match := COLLECTIVE.search(line)):
            continue
        result, kind, start = match.groups()
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", re.sub(r"\{[^}]*\}", "", result))
        arrays = arrays[len(arrays) // 2 :] if start and kind == "all-gather" else arrays  # of (inputs, outputs)
        total = sum(BYTES[dtype] * math.prod(map(int, filter(None, shape.split(",")))) for dtype, shape in arrays)
        size = group_size(line)
        if kind == "reduce-scatter":
            total *= size
        elif "all-reduce-scatter" in computation.split("(")[0]:
            kind = "reduce-scatter"
        channel = re.search(r"channel_id=(\d+)", line)
        found[channel[1] if channel else f"line {number}"] = Exchange(kind, size, total)
    return list(found.values())


def group_size(line: str) -> int:
    """How many devices take part in each group of a collective: of `{{0,1},{2,3}}`, `[4,2]<=[8]` or of a mesh, some
    of whose axes are named."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\].*?\{('.*?')\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", match[2]))
    raise ValueError(f"no groups of devices that are understood: {line.strip()[:300]}")


class Comparison(NamedTuple):
    what: str
    predicted: float
    compiled: float

    @property
    def ratio(self) -> float:
        return self.compiled / self.predicted if self.predicted else math.nan


SMALLEST = 1 << 14  # bytes of exchanges that are counted: less than that are numbers for the log and for norms


def compare(config: TransformerConfig, sizes: Sizes, shape: Shape, devices: Sequence[Any]) -> list[Comparison]:
    """The prediction beside the program that is compiled for these devices; bytes are of each device."""
    mesh = Mesh(
        np.array(devices[: math.prod(sizes)]).reshape(sizes), Sizes._fields, axis_types=(AxisType.Auto,) * len(sizes)
    )
    program = compiled_step(with_vocabulary(config), shape, mesh)
    memory, found = program.memory_analysis(), exchanges(program.as_text())
    expected = collectives(config, sizes, shape)
    ids = 6 * 4 * local_rows(sizes, shape) * shape.length
    rows = [
        Comparison("FLOPs", flops(config, sizes, shape), program.cost_analysis()["flops"]),
        Comparison("bytes of state", state_bytes(config, sizes) + ids, memory.argument_size_in_bytes),
        Comparison(
            "bytes of the rest",
            gradient_bytes(config, sizes) + activation_bytes(config, sizes, shape),
            memory.temp_size_in_bytes,
        ),
    ]
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        predicted = sum(sent(one, getattr(sizes, one.axis)) for one in expected if one.kind == kind)
        compiled = sum(_sent(one) for one in found if one.kind == kind and one.bytes >= SMALLEST)
        if predicted or compiled:
            rows.append(Comparison(f"sent by {kind}", predicted, compiled))
    return rows


def _sent(one: Exchange) -> float:
    return (2 if one.kind == "all-reduce" else 1) * (one.size - 1) / one.size * one.bytes


def meshes(devices: int) -> list[tuple[str, Sizes]]:
    """Some ways to lay out so many devices."""
    return [
        ("n × 1 × 1", Sizes(devices, 1, 1)),
        ("1 × n × 1", Sizes(1, devices, 1)),
        ("n/8 × 8 × 1", Sizes(devices // 8, 8, 1)),
        ("n/8 × 1 × 8", Sizes(devices // 8, 1, 8)),
        ("n/8 × 4 × 2", Sizes(devices // 8, 4, 2)),
    ]


COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
LEAST = 0.5  # efficiency below which a mesh has stopped to scale


def table(config: TransformerConfig, shape: Shape, device: Device) -> Iterable[str]:
    """Lines of Markdown: the efficiency in percent of each mesh on so many devices.

    In brackets where it has stopped to scale; `memory` where a step does not fit; – where the model does not divide.
    """
    yield "| data × fsdp × tensor | " + " | ".join(map(str, COUNTS)) + " |"
    yield "|---" * (len(COUNTS) + 1) + "|"
    for index, (name, _) in enumerate(meshes(8)):
        cells = []
        for count in COUNTS:
            sizes = meshes(count)[index][1]
            found = cost(config, sizes, shape, device)
            if config.width % sizes.fsdp or config.heads % sizes.tensor:
                cells.append("–")
            elif found.bytes > device.memory:
                cells.append("memory")
            else:
                percent = f"{100 * found.efficiency:.0f}"
                cells.append(percent if found.efficiency >= LEAST else f"({percent})")
        yield f"| {name} | {' | '.join(cells)} |"


def costs_table(config: TransformerConfig, shape: Shape, count: int) -> Iterable[str]:
    """Lines of Markdown: what a step costs each of so many devices, whatever they are."""
    yield "| data × fsdp × tensor | TFLOP | state, MB | gradients | activations | data sends, MB | fsdp | tensor |"
    yield "|---|---|---|---|---|---|---|---|"
    for _, sizes in meshes(count):
        exchanged = collectives(config, sizes, shape)
        values = [
            state_bytes(config, sizes),
            gradient_bytes(config, sizes),
            activation_bytes(config, sizes, shape),
            *(sum(sent(one, getattr(sizes, axis)) for one in exchanged if one.axis == axis) for axis in Sizes._fields),
        ]
        megabytes = " | ".join(f"{value / 1e6:,.0f}" for value in values)
        yield f"| {sizes} | {flops(config, sizes, shape) / 1e12:.2f} | {megabytes} |"


def print_tables(shape: Shape, devices: Iterable[Device]) -> None:
    for name, config in MODELS.items():
        config = dataclasses.replace(config, dtype=DType.BFLOAT16)
        numbers = sum(one.size for one in parameters(config))
        print(f"\n{name}, {shape.rows} rows of {shape.length} on 64 devices\n")
        print(*costs_table(config, shape, 64), sep="\n")
        for device in devices:
            print(f"\n{name} ({numbers / 1e6:.0f} M parameters), {shape.rows} rows of {shape.length}, {device.name}\n")
            print(*table(config, shape, device), sep="\n")


def print_comparisons(devices: Sequence[Any], dtype: DType) -> None:
    config = TransformerConfig(encoder_layers=1, decoder_layers=1, source_vocab=8192, target_vocab=8192, dtype=dtype)
    print("1 + 1 layers of the base model, 8192 pieces, 64 rows of 64\n")
    print("| data × fsdp × tensor | | predicted | compiled | ratio |\n|---|---|---|---|---|")
    for sizes in (Sizes(8, 1, 1), Sizes(1, 8, 1), Sizes(1, 1, 8), Sizes(2, 2, 2)):
        for one in compare(config, sizes, Shape(64, 64), devices):
            print(f"| {sizes} | {one.what} | {one.predicted:.3g} | {one.compiled:.3g} | {one.ratio:.2f} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--batch", type=int, default=1 << 18, help="tokens of each side of a batch, on all devices")
    add("--length", type=int, default=256, help="of a row")
    add("--device", help="only those whose name has this")
    add("--compiled", action="store_true", help="compare with compiled programs")
    add("--topology", help="of --compiled: TPUs, such as v5e:2x4, instead of CPUs")
    options = parser.parse_args(arguments)
    if not options.compiled:
        print_tables(
            Shape(options.batch // options.length, options.length),
            [device for device in DEVICES if (options.device or "") in device.name],
        )
    elif options.topology:
        from jax.experimental import topologies

        described = topologies.get_topology_desc(platform="tpu", topology_name=options.topology)
        print_comparisons(described.devices, DType.BFLOAT16)
    else:
        print_comparisons(jax.devices(), DType.FLOAT32)


if __name__ == "__main__":
    main()
