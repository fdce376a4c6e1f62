"""One program on any mesh: the numbers are those of one device, and each device holds and gathers only its part.

Eight CPU devices need a process of their own: `on_eight_devices` there writes what the tests here look at.
"""

import contextlib
import io
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_loop
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from transformer_jax import parallel
from transformer_jax.batch import Batch
from transformer_jax.config import (
    Config,
    DataConfig,
    DType,
    MeshConfig,
    OptimizerConfig,
    OptimizerKind,
    Positions,
    Schedule,
    TokenizerConfig,
    TransformerConfig,
    Tying,
)
from transformer_jax.data.corpus import Pair
from transformer_jax.data.loader import Position
from transformer_jax.data.tokenizer import Tokenizer, train_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.nn.dropout import dropout
from transformer_jax.training import loop
from transformer_jax.training.checkpoint import Checkpoints, Progress
from transformer_jax.training.journal import records
from transformer_jax.training.learner import Learner, make_learner

Sizes = tuple[int, int, int]  # of data, fsdp, tensor
ONE: Sizes = (1, 1, 1)
MESHES: list[Sizes] = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]
STEPS, ROWS, LENGTH, VOCAB = 20, 12, 12, 16
WIDTH, HIDDEN, TABLE = 16, 40, 24  # D, F, V with its padding: no array but a parameter has two axes like these


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


def make_config(sizes: Sizes, **model) -> Config:
    return Config(
        model=TransformerConfig(
            **{"encoder_layers": 1, "decoder_layers": 1, "width": WIDTH, "heads": 8, "feed_forward": HIDDEN}
            | {"vocab_multiple": TABLE, "dropout": 0.2, "scan": True}
            | model
        ),
        data=DataConfig(tokenizer=TokenizerConfig(vocab=VOCAB)),
        optimizer=OptimizerConfig(schedule=Schedule.CONSTANT, peak=0.01, warmup=0, ema=0.9, accumulate=2),
        mesh=MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]),
    )


def tokenizer() -> Tokenizer:
    pairs = [Pair("red green", "green red"), Pair("a b c d", "e f g")]
    return train_tokenizer(pairs * 20, TokenizerConfig(vocab=VOCAB))


def random_batch(seed: int, *, rows: int = ROWS) -> Batch:
    """Rows with one pair of uneven length (even seeds), or packed with up to three (odd seeds)."""
    rng = np.random.default_rng(seed)

    def side(count) -> list[np.ndarray]:
        ids, segments, positions = np.zeros((3, rows, LENGTH), np.int32)
        for row in range(rows):
            ends = np.sort(rng.choice(np.arange(1, LENGTH + 1), count[row], replace=False))
            for segment, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
                ids[row, start:end] = rng.integers(3, VOCAB, end - start)
                segments[row, start:end], positions[row, start:end] = segment, np.arange(end - start)
        return [ids, segments, positions]

    count = rng.integers(1, 4, rows) if seed % 2 else np.ones(rows, int)
    return Batch(*side(count), *side(count))


def numbers(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def bytes_on_one(tree: Any) -> int:
    """Bytes of a tree of arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(sizes: Sizes, *, steps: int = STEPS, checkpoint: str | None = None, **model) -> dict[str, Any]:
    """What a learner does on a mesh: losses and parameters, and what its compiled step is like."""
    learner = make_learner(make_config(sizes, **model), tokenizer())
    state, options = learner.init(), {"multiple": 2}
    first = parallel.shard_batch(random_batch(0), learner.mesh, **options)
    compiled = learner.train_step.lower(state, first).compile()
    losses = []
    for seed in range(steps):
        state, report = compiled(state, parallel.shard_batch(random_batch(seed), learner.mesh, **options))
        losses.append(float(report.sums.loss / report.sums.weight))
    if checkpoint:
        checkpoints = Checkpoints(checkpoint, learner.config.run)
        checkpoints.save(state, Progress(Position(3, 4)))
        checkpoints.close()
    sums = learner.eval_step(state.average, parallel.shard_batch(random_batch(0, rows=13), learner.mesh))
    return {
        "losses": losses,
        "state": numbers((state.params, state.average, state.opt_state)),
        "evaluation": [float(sums.loss), float(sums.weight)],
        "gathered": gathered(compiled.as_text()),
        "state bytes": bytes_on_one(state._replace(rng=jax.random.key_data(state.rng))),
        "argument bytes": compiled.memory_analysis().argument_size_in_bytes,
        "dropped": np.asarray(dropped(learner))[:ROWS],
    }


def gathered(program: str) -> set[tuple[int, ...]]:
    """Shapes of what the all-gathers of a compiled program give."""
    results = re.findall(r" = (.*?) all-gather(?:-start)?\(", program)
    shapes = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    return {tuple(map(int, shape.split(","))) for shape in shapes}


def dropped(learner: Learner) -> jax.Array:
    """Where a dropout over rows and heads, which the mesh splits, is zero: of so many rows as it makes of 12."""
    sharding = NamedSharding(learner.mesh, PartitionSpec(parallel.ROWS, parallel.TENSOR))
    rows = parallel.shard_batch(random_batch(0), learner.mesh).target.shape[0]
    ones = jax.device_put(np.ones((rows, 8, 6, 5), np.float32), sharding)
    return jax.jit(lambda x: dropout(x, 0.5, jax.random.key(3)) == 0, out_shardings=sharding)(ones)


def restored(workdir: str, sizes: Sizes) -> dict[str, Any]:
    """A checkpoint as a learner on another mesh reads it."""
    learner = make_learner(make_config(sizes), tokenizer())
    checkpoints = Checkpoints(workdir, learner.config.run)
    state, progress = checkpoints.restore(learner.template) or pytest.fail("no checkpoint")
    checkpoints.close()
    sharded = jax.tree.map(lambda x, like: x.sharding == like.sharding, state, learner.template)
    return {
        "state": numbers((state.params, state.average, state.opt_state)),
        "position": progress.position,
        "sharded": all(jax.tree.leaves(sharded)),
        "query": state.params["params"]["encoder"]["layers"]["self_attention"]["query"]["kernel"].sharding.spec,
    }


def main(workdir: str) -> None:
    """Runs in the process with eight devices, and leaves its findings in `workdir`."""
    checkpoint = f"{workdir}/checkpoint"
    found: dict[Any, Any] = {sizes: measure(sizes) for sizes in MESHES[:-1]}
    found[MESHES[-1]] = measure(MESHES[-1], checkpoint=checkpoint)
    found["bfloat16"] = measure((2, 2, 2), steps=4, dtype=DType.BFLOAT16, remat=True)
    found["restored"] = {sizes: restored(checkpoint, sizes) for sizes in ((1, 2, 1), (2, 1, 2), (8, 1, 1))}
    config = loop_config(pathlib.Path(workdir))
    config.mesh, config.run.steps = MeshConfig(data=2, fsdp=-1, tensor=2), 4
    with contextlib.redirect_stdout(io.StringIO()) as said:
        loop.train(config, f"{workdir}/run")
    found["said"] = said.getvalue()
    pathlib.Path(workdir, "found").write_bytes(pickle.dumps(found))


def loop_config(directory: pathlib.Path) -> Config:
    """A whole run, with a dev set, on a corpus in the directory."""
    config = test_loop.make_config(directory)
    config.run.eval_every, config.run.log_every, config.model.dropout = 4, 1, 0.0
    return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("mesh")
    rng = np.random.default_rng(0)
    for name, lines in (("train", 60), ("dev", 5)):
        pairs = [rng.choice(test_loop.WORDS, size=rng.integers(1, 5)) for _ in range(lines)]
        (directory / f"{name}.tsv").write_text("".join(f"{' '.join(p)}\t{' '.join(p[::-1])}\n" for p in pairs))
    return directory


@pytest.fixture(scope="module")
def found(workdir) -> dict[Any, Any]:
    """What `main` found."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = f"import test_parallel; test_parallel.main({str(workdir)!r})"
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=os.path.dirname(__file__), check=True)
    return pickle.loads((workdir / "found").read_bytes())


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one device does, in this process."""
    return measure(ONE)


def assert_close(some: Any, other: Any, **tolerance) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), some, other)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
def test_every_mesh_gives_the_losses_and_the_state_of_one_device(sizes, found, one):
    """With dropout, accumulation, and rows (12) that 8 devices × 2 micro-batches do not divide; packed rows and not."""
    assert one["losses"][-1] < one["losses"][0]
    assert_close(found[sizes]["losses"], one["losses"], rtol=1e-5)
    assert_close(found[sizes]["state"], one["state"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
def test_an_evaluation_counts_every_row_once(sizes, found, one):
    assert found[sizes]["evaluation"][1] == (random_batch(0, rows=13).target_segments != 0).sum()
    assert_close(found[sizes]["evaluation"], one["evaluation"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [*MESHES, "bfloat16"])
def test_only_fsdp_gathers_and_what_it_gathers_is_split_over_tensor(sizes, found):
    _, fsdp, tensor = (2, 2, 2) if sizes == "bfloat16" else sizes
    heads, hidden, table = WIDTH // tensor, HIDDEN // tensor, TABLE // tensor
    parts = {(WIDTH, heads), (heads, WIDTH), (WIDTH, hidden), (hidden, WIDTH), (table, WIDTH)}
    got = found[sizes]["gathered"]
    scanned = {shape[1:] if shape[0] == 1 else shape for shape in got}  # one layer of a stack
    assert scanned == (parts if fsdp > 1 else set())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
def test_a_device_holds_its_part_of_the_state_and_no_more(sizes, found, one):
    on_one, on_each = one["state bytes"], found[sizes]["state bytes"]
    matrices = 4 * 4 * (12 * WIDTH**2 + 4 * WIDTH * HIDDEN + TABLE * WIDTH)  # parameters, average, two moments
    assert on_one - on_each >= matrices * (1 - 1 / (sizes[1] * sizes[2]))
    rows = -(-ROWS // (sizes[0] * sizes[1] * 2)) * 2
    assert found[sizes]["argument bytes"] == on_each + 4 * 6 * rows * LENGTH  # what the program takes, and no copy


@pytest.mark.slow
def test_bfloat16_and_remat_go_with_a_mesh(found, one):
    assert_close(found["bfloat16"]["losses"], one["losses"][:4], rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
def test_dropout_drops_the_same_on_every_mesh(sizes, found, one):
    assert 0.4 < one["dropped"].mean() < 0.6
    np.testing.assert_array_equal(found[sizes]["dropped"], one["dropped"])


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_is_read_straight_into_another(workdir, found):
    on_this = restored(f"{workdir}/checkpoint", ONE)
    for other in [on_this, *found["restored"].values()]:
        assert other["position"] == Position(3, 4)
        assert other["sharded"]
        jax.tree.map(np.testing.assert_array_equal, other["state"], found[(2, 2, 2)]["state"])
    assert found["restored"][(1, 2, 1)]["query"] == PartitionSpec(None, "fsdp", "tensor")


@pytest.mark.slow
def test_a_run_begun_on_eight_devices_goes_on_on_one(workdir, found, tmp_path, capsys):
    """Losses, learning rates and dev losses are those of a run which was on one device all the time."""
    assert "on 8 ×" in found["said"]
    config = loop_config(workdir)
    config.run.steps = 8
    for directory in (workdir / "run", tmp_path):
        loop.train(config, directory)
    assert "resuming from the checkpoint of step 4" in capsys.readouterr().out
    moved, whole = records(workdir / "run"), records(tmp_path)
    assert [(record["step"], record["split"]) for record in moved] == [
        (record["step"], record["split"]) for record in whole
    ]
    assert sum(record["split"] == "dev" for record in whole) == 2
    for name in ("loss", "accuracy", "learning_rate"):
        values = [[record[name] for record in log if name in record] for log in (moved, whole)]
        assert_close(*values, rtol=1e-4)
        assert len(values[0]) >= 8


def abstract_mesh(*sizes: int) -> AbstractMesh:
    return AbstractMesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("kind", [OptimizerKind.ADAMW, OptimizerKind.ADAFACTOR])
@pytest.mark.parametrize("scan", [False, True])
def test_every_matrix_of_every_kind_of_model_is_split(kind, scan):
    """Of the optimizer state too, and Adafactor's means of rows and columns as the matrix is."""
    config = make_config(
        ONE,
        scan=scan,
        tying=Tying.NONE,
        gated=True,
        attention_bias=True,
        output_bias=True,
        embedding_norm=True,
        positions=Positions.RELATIVE if scan else Positions.LEARNED,
    )
    config.optimizer.kind = kind
    state = make_learner(config, tokenizer()).template
    shardings = jax.tree.leaves(parallel.shardings(state, abstract_mesh(2, 2, 2)))
    for (path, leaf), sharding in zip(jax.tree.leaves_with_path(state), shardings, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        means = name.endswith(("/rows", "/columns"))
        if re.search("kernel|table", name):
            parts = 2 if means else 4
        elif re.search("(query|key|value|hidden|gate)/bias|output_bias|_positions(/columns)?$", name):
            parts = 2
        else:
            parts = 1
        assert leaf.size == parts * math.prod(sharding.shard_shape(leaf.shape)), name


@pytest.mark.parametrize(
    ("mesh", "shape", "message"),
    [
        ((1, 1, 5), (24, 16), r"mesh\.tensor is 5, .* axis V \(24\) of params/embedding/table, \(24, 16\).*vocab_mult"),
        ((1, 3, 1), (24, 16), r"mesh\.fsdp is 3, which does not divide axis D \(16\) of params/embedding/table"),
    ],
)
def test_an_axis_that_does_not_divide_a_parameter_is_refused_by_name(mesh, shape, message):
    tree = {"params": {"embedding": {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}}}
    with pytest.raises(UserError, match=message):
        parallel.shardings(tree, abstract_mesh(*mesh))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=99), r"mesh\.data is 99, .* but there are \d devices"),
        (MeshConfig(data=-1, tensor=64), r"mesh\.tensor 64, but there are \d devices"),
    ],
)
def test_a_mesh_that_the_devices_do_not_allow_is_refused_by_name(config, message):
    with pytest.raises(UserError, match=message):
        parallel.make_mesh(config)


def test_arrays_are_laid_on_a_mesh_of_ours_only():
    """Not in a program around this library that has a mesh of other axes."""
    x = jnp.ones((4, 4))
    other = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    assert parallel.laid(x, "B.") is x
    with jax.sharding.use_abstract_mesh(other):
        assert parallel.laid(x, "B.") is x
    laid = jax.make_jaxpr(parallel.on_mesh(lambda x: parallel.laid(x, "B."), parallel.make_mesh(MeshConfig(data=1))))
    assert "sharding_constraint" in str(laid(x))
