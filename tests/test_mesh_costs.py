"""The cost model: closed forms against counting, and against what XLA compiles for eight devices."""

import dataclasses
import importlib.util
import itertools
import math
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import pytest

from transformer_jax.config import TransformerConfig, Tying

ROOT = pathlib.Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("mesh_costs", ROOT / "benchmarks" / "mesh_costs.py")
assert spec is not None
assert spec.loader is not None
mesh_costs = sys.modules["mesh_costs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mesh_costs)

from mesh_costs import DEVICES, MODELS, Collective, Device, Shape, Sizes  # noqa: E402

SMALL = TransformerConfig(
    encoder_layers=1, decoder_layers=1, width=128, heads=8, feed_forward=512, source_vocab=1000, target_vocab=1000
)
SHAPE = Shape(64, 32)


def ring_all_reduce(size, count):
    """How many numbers each of `size` devices sends to sum arrays of `count` numbers: by doing it."""
    arrays = [[float(device * count + index) for index in range(count)] for device in range(size)]
    part = lambda index: slice(index % size * count // size, (index % size + 1) * count // size)  # noqa: E731
    sent = [0] * size
    for step, add in itertools.chain(((s, True) for s in range(size - 1)), ((s, False) for s in range(size - 1))):
        moving = [(device, part(device - step + (not add)), add) for device in range(size)]
        values = [arrays[device][where] for device, where, _ in moving]
        for (device, where, adding), value in zip(moving, values, strict=True):
            old = arrays[(device + 1) % size][where]
            arrays[(device + 1) % size][where] = [a + b for a, b in zip(old, value, strict=True)] if adding else value
            sent[device] += len(value)
    expected = [sum(float(device * count + index) for device in range(size)) for index in range(count)]
    assert arrays == [expected] * size
    return sent


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_device_sends_what_a_ring_makes_it_send(size):
    sent = ring_all_reduce(size, 24)
    assert {mesh_costs.sent(Collective("all-reduce", "data", 24), size)} == set(sent)
    assert mesh_costs.sent(Collective("all-gather", "fsdp", 24), size) == sent[0] / 2
    assert mesh_costs.sent(Collective("reduce-scatter", "fsdp", 24), size) == sent[0] / 2


def test_within_a_domain_the_near_network_carries_all_and_else_each_member_its_part():
    device = Device("", flops=1, memory=1, near=100.0, domain=8, far=1.0)
    gradients = Collective("all-reduce", "data", 800.0)
    assert mesh_costs.seconds(gradients, Sizes(8, 1, 1), device) == pytest.approx(2 * 7 / 8 * 800 / 100)
    assert mesh_costs.seconds(gradients, Sizes(2, 1, 8), device) == pytest.approx(2 * 1 / 2 * 800 / 1)
    both = 2 * 7 / 8 * 800 / 100 + 2 * 1 / 2 * (800 / 8) / 1
    assert mesh_costs.seconds(gradients, Sizes(16, 1, 1), device) == pytest.approx(both)


@pytest.mark.parametrize(("name", "millions"), [("base", 63.1), ("big", 214.3), ("1 B", 1015.9)])
def test_the_models_have_the_size_that_the_page_names(name, millions):
    """base: 18.9 M in the encoder, 25.2 M in the decoder, 37,000 × 512 in the table, and some vectors."""
    config = MODELS[name]
    numbers = sum(one.size for one in mesh_costs.parameters(config))
    assert numbers / 1e6 == pytest.approx(millions, abs=0.05)
    layers = config.encoder_layers * 4 + config.decoder_layers * 8
    matrices = layers * config.width**2 + 2 * (config.encoder_layers + config.decoder_layers) * (
        config.width * config.feed_forward
    )
    assert matrices + 37_120 * config.width == pytest.approx(numbers, rel=1e-3)


def test_a_step_of_one_device_exchanges_nothing_and_does_all_the_work():
    one, eight = Sizes(1, 1, 1), Sizes(2, 2, 2)
    assert mesh_costs.collectives(SMALL, one, SHAPE) == []
    assert mesh_costs.flops(SMALL, one, SHAPE) == pytest.approx(8 * mesh_costs.flops(SMALL, eight, SHAPE))
    for device in DEVICES:
        assert mesh_costs.cost(SMALL, one, SHAPE, device).efficiency == 1


@pytest.mark.parametrize("remat", [False, True])
def test_flops_are_those_of_the_products_of_a_forward_and_a_backward_pass(remat):
    """Counted in the jaxpr of the gradient, where recomputed products stand once more."""
    config = dataclasses.replace(SMALL, gated=True, remat=remat)
    model, params = mesh_costs.Transformer(config), jax.eval_shape(lambda: mesh_costs.init(config))
    batch = mesh_costs.Batch(*[jax.ShapeDtypeStruct(SHAPE, "int32")] * 6)
    loss = lambda params, batch: model.apply(params, batch).sum()  # noqa: E731
    found = counted_flops(jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr)
    assert found == pytest.approx(mesh_costs.flops(config, Sizes(1, 1, 1), SHAPE), rel=0.001)


def counted_flops(jaxpr):
    """2 × the products of each `dot_general`, in the jaxprs inside it too."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            operand, result = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * result.size * math.prod(operand.shape[axis] for axis in contracted)
        inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
        total += sum(counted_flops(value) for value in inner if hasattr(value, "eqns"))
    return total


PROGRAM = """
%all-reduce-scatter.7 (input: bf16[512,64]) -> bf16[64,64] {
  %all-reduce.1 = bf16[512,64]{1,0} all-reduce(%input), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
}
ENTRY %main {
  %a = (f32[4,8]{1,0}, f32[]) all-reduce(%x, %y), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %b = f32[16,8]{1,0} all-gather(%x), channel_id=2, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %b.copy = f32[16,8]{1,0} all-gather(%x), channel_id=2, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %c = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), channel_id=4, replica_groups=[2,4]<=[4,2]T(1,0)
  %d = f32[4,8]{1,0} reduce-scatter(%x), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
  %e = f32[4,8]{1,0} add(%x, %x)
}
"""


def test_collectives_are_read_from_every_way_in_which_xla_writes_them():
    assert mesh_costs.exchanges(PROGRAM) == [
        ("reduce-scatter", 8, 512 * 64 * 2),
        ("all-reduce", 2, 4 * 8 * 4 + 4),
        ("all-gather", 4, 16 * 8 * 4),
        ("all-gather", 4, 16 * 8 * 4),
        ("reduce-scatter", 4, 4 * 8 * 4 * 4),
    ]
    with pytest.raises(ValueError, match="no groups of devices"):
        mesh_costs.exchanges("  %a = f32[4] all-reduce(%x), channel_id=1, to_apply=%add")


CASES = {
    **{str(sizes): (SMALL, sizes) for sizes in (Sizes(8, 1, 1), Sizes(1, 8, 1), Sizes(1, 1, 8), Sizes(2, 2, 2))},
    "two layers": (dataclasses.replace(SMALL, encoder_layers=2, decoder_layers=2), Sizes(1, 2, 4)),
    "untied and gated": (dataclasses.replace(SMALL, tying=Tying.NONE, gated=True), Sizes(2, 2, 2)),
}


def main(path: str) -> None:
    """Runs in the process with eight devices, and leaves its findings in `path`."""
    found = {}
    for name, (config, sizes) in CASES.items():
        compared = mesh_costs.compare(config, sizes, SHAPE, jax.devices())
        found[name] = {one.what: (one.predicted, one.compiled) for one in compared}
    pathlib.Path(path).write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "found"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = f"import test_mesh_costs; test_mesh_costs.main({str(path)!r})"
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=os.path.dirname(__file__), check=True)
    return pickle.loads(path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_programs_cost_what_is_predicted(case, found):
    """State to the byte. What CPU programs do otherwise over `fsdp`: they sum gradients whole, which sends twice as
    much as to scatter the sums, and may keep what they gathered for the backward pass."""
    of = {what: found[case].get(what, (0, 0)) for what in ("FLOPs", "bytes of state")}
    assert of["bytes of state"][1] == pytest.approx(of["bytes of state"][0], abs=64)
    assert of["FLOPs"][0] < of["FLOPs"][1] < 1.25 * of["FLOPs"][0]  # in small layers sums and norms count
    sent = {kind: found[case].get(f"sent by {kind}", (0, 0)) for kind in KINDS}
    reduced = sent["all-reduce"][0] + 2 * sent["reduce-scatter"][0]
    assert sent["all-reduce"][1] == pytest.approx(reduced, rel=0.02)
    gathered, compiled = sent["all-gather"]
    assert 0.49 * gathered <= compiled <= 1.01 * gathered
    assert sent["all-to-all"] == sent["collective-permute"] == (0, 0)


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
