"""A checkpoint is there whole or passed by, and what is read is what was written."""

import contextlib
import gc
import logging
import os
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import run_directory
from transformer_jax.config import Config, Metric, RunConfig
from transformer_jax.data.loader import Position
from transformer_jax.errors import UserError
from transformer_jax.training.checkpoint import Checkpoints, Preservation, Progress
from transformer_jax.training.step import TrainState, init_state

# Damage is an exception in threads and coroutines of Orbax as well.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
OPTIMIZER = optax.adam(1e-2)
RUN = RunConfig(keep=3, keep_best=1, checkpoint_every=10, eval_every=10)


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def collected():
    """Exceptions of coroutines appear when these are collected: here rather than in the next test."""
    yield
    gc.collect()


def state_at(step: int, *, ema: float = 0.5) -> TrainState:
    """A state every leaf of which differs from that of any other step."""
    params = {
        "params": {"kernel": jax.random.normal(jax.random.key(step), (64, 32)), "bias": jnp.full((3,), step, float)}
    }
    state = init_state(params, OPTIMIZER, seed=step, ema=ema)
    noise = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), state.opt_state)
    return state._replace(step=jnp.int32(step), opt_state=noise)


def numbers(state: TrainState):
    return jax.tree.map(np.asarray, state._replace(rng=jax.random.key_data(state.rng)))


def assert_same(one: TrainState, other: TrainState):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, numbers(one), numbers(other))


def write(workdir: pathlib.Path, *steps: int, run: RunConfig = RUN, scores: dict[int, float] | None = None):
    """A run directory with checkpoints of these steps."""
    run_directory.save_config(workdir, Config(run=run))
    checkpoints = Checkpoints(workdir, run)
    for step in steps:
        score = (scores or {}).get(step)
        metrics = None if score is None else {run.best.value: score}
        checkpoints.save(state_at(step), Progress(Position(1, step), best=score, waited=2), metrics)
    checkpoints.close()


def restore(workdir: pathlib.Path, run: RunConfig = RUN):
    checkpoints = Checkpoints(workdir, run)
    found = checkpoints.restore(state_at(0))
    checkpoints.close()
    return found


def test_restored_state_is_the_saved_one_bit_for_bit(tmp_path):
    write(tmp_path, 10)
    state, progress = restore(tmp_path)
    assert_same(state, state_at(10))
    assert progress == Progress(Position(1, 10), None, 2)
    assert type(progress.position) is Position


def test_nothing_to_restore_is_none(tmp_path):
    assert restore(tmp_path) is None


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    """The training goes on, and reuses the memory of the state, while it is written."""
    checkpoints = Checkpoints(tmp_path, RUN)
    state, expected = state_at(10), numbers(state_at(10))
    checkpoints.save(state, Progress())
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    for _ in range(3):
        state = state._replace(params=overwrite(state.params), average=overwrite(state.average))
    checkpoints.close()
    found, _ = restore(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, numbers(found), expected)


def test_newest_and_best_are_kept(tmp_path):
    write(tmp_path, 10, 20, 30, 40, 50, scores={10: 3.0, 20: 9.0, 30: 4.0, 40: 5.0})
    assert run_directory.checkpoint_steps(tmp_path) == [20, 30, 40, 50]
    assert run_directory.choose_steps(tmp_path, "best") == [20]


def test_best_loss_is_the_lowest(tmp_path):
    run = RunConfig(keep=3, checkpoint_every=10, best=Metric.LOSS)
    write(tmp_path, 10, 20, 30, run=run, scores={10: 3.0, 20: 1.0, 30: 2.0})
    assert run_directory.choose_steps(tmp_path, "average-best:2") == [20, 30]


def test_an_interrupt_costs_no_regular_checkpoint(tmp_path):
    write(tmp_path, 10, 20, 30, 31)
    assert run_directory.checkpoint_steps(tmp_path) == [10, 20, 31]


def test_as_many_are_kept_as_are_averaged():
    infos = [type("Info", (), {"step": step, "metrics": None}) for step in range(10, 110, 10)]
    policy = Preservation(RunConfig(keep=1, average=4, checkpoint_every=10))
    assert sum(policy.should_preserve(infos, context=None)) == 4


@pytest.mark.parametrize(
    ("item", "damage"),
    [("params", "truncate"), ("average", "remove"), ("training", "truncate"), ("progress", "remove")],
)
def test_a_broken_checkpoint_costs_only_the_work_since_the_one_before(tmp_path, caplog, item, damage):
    write(tmp_path, 10, 20)
    for path in sorted((tmp_path / "checkpoints/20" / item).rglob("*")):
        if path.is_file() and damage == "truncate":
            os.truncate(path, path.stat().st_size // 2)
        elif path.is_file():
            path.unlink()
    with caplog.at_level(logging.WARNING):
        state, progress = restore(tmp_path)
    assert_same(state, state_at(10))
    assert progress.position == Position(1, 10)
    assert "checkpoints/20" in caplog.text
    assert list((tmp_path / "broken").glob("20-*"))  # nothing is deleted
    write(tmp_path, 20)  # and the training can come to that step again
    assert_same(restore(tmp_path)[0], state_at(20))


def test_a_truncated_file_is_noticed_or_does_not_matter(tmp_path):
    write(tmp_path, 10)
    checkpoints = Checkpoints(tmp_path, RUN)
    noticed = 0
    for path in [path for path in (tmp_path / "checkpoints/10").rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        try:
            state, _ = checkpoints.restore(state_at(0))
        except UserError:
            noticed += 1
        else:
            assert_same(state, state_at(10))
        path.write_bytes(whole)
    checkpoints.close()
    assert noticed > 5


def test_a_save_that_was_killed_is_not_seen(tmp_path):
    write(tmp_path, 10, 20)
    (tmp_path / "checkpoints/20").rename(tmp_path / "checkpoints/20.orbax-checkpoint-tmp")
    assert run_directory.checkpoint_steps(tmp_path) == [10]
    assert_same(restore(tmp_path)[0], state_at(10))


@pytest.mark.parametrize("content", ["", "{", "[1]", None])
def test_scores_that_can_not_be_read_cost_no_checkpoint(tmp_path, caplog, content):
    """None: they are gone."""
    write(tmp_path, 10, 20, 30, scores={10: 9.0, 20: 3.0, 30: 4.0})
    path = tmp_path / "checkpoints/10/metrics/metrics"
    path.unlink() if content is None else path.write_text(content)
    assert run_directory.choose_steps(tmp_path, "average-best:2") == [30, 20]
    assert run_directory.checkpoint_score(tmp_path, 10, RUN.best) is None
    state, _ = restore(tmp_path)
    assert_same(state, state_at(30))
    assert run_directory.checkpoint_steps(tmp_path) == [10, 20, 30]
    if content is not None:
        assert "scores of the checkpoint of step 10 can't be read" in caplog.text
        assert (tmp_path / "broken/10-metrics-1/metrics").read_text() == content
    write(tmp_path, 40)
    assert run_directory.checkpoint_steps(tmp_path) == [20, 30, 40]


def test_a_checkpoint_is_broken_as_often_as_it_likes(tmp_path):
    for number in (1, 2):
        write(tmp_path, *((10, 20) if number == 1 else (20,)))
        shutil.rmtree(tmp_path / "checkpoints/20/params")
        restore(tmp_path)
        assert (tmp_path / f"broken/20-{number}").exists()


def test_a_kill_in_a_deletion_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "rmtree", lambda path, **_: next(path.glob("*/params/_METADATA"), path / "x").unlink(True)
        )
        write(tmp_path, 10, 20, 30, 40)
        assert run_directory.checkpoint_steps(tmp_path) == [20, 30, 40]
        assert list((tmp_path / "checkpoints").glob("*/10")), "it is where it will be deleted"
    assert_same(restore(tmp_path)[0], state_at(40))
    assert not list((tmp_path / "checkpoints").glob("*/10"))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["last", "average:2"])
def test_a_reader_whose_checkpoint_is_deleted_takes_those_that_are_there(tmp_path, monkeypatch, caplog, which):
    """As a run does that keeps few and saves often."""
    write(tmp_path, 10, 20, 30)
    read = run_directory._read
    trained = iter([(40, 50, 60), (70, 80, 90)])

    def overtaken(workdir, step):
        write(tmp_path, *next(trained, ()))
        return read(workdir, step)

    monkeypatch.setattr(run_directory, "_read", overtaken)
    params = run_directory.load_parameters(tmp_path, which)
    np.testing.assert_array_equal(params["params"]["bias"], 90 if which == "last" else 85)
    assert "broken" not in caplog.text
    with pytest.raises(UserError, match="no checkpoint of step 30; it has 70, 80, 90"):
        run_directory.load_parameters(tmp_path, "30")


def test_all_broken_is_an_error_that_deletes_nothing(tmp_path):
    write(tmp_path, 10, 20)
    for step in ("10", "20"):
        shutil.rmtree(tmp_path / "checkpoints" / step / "params")
    with pytest.raises(UserError, match=r"none of the checkpoints of steps \[20, 10\] can be read"):
        restore(tmp_path)
    assert run_directory.checkpoint_steps(tmp_path) == [10, 20]


def test_a_write_error_names_the_place_and_keeps_the_checkpoints_before(tmp_path):
    """As on a full disk: no file may grow past a few bytes."""
    write(tmp_path, 10, 20, 30)
    checkpoints = Checkpoints(tmp_path, RUN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(UserError, match=r"checkpoints: the checkpoint can't be written"):  # noqa: PT012
            checkpoints.save(state_at(40), Progress())
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with contextlib.suppress(UserError):
        checkpoints.close()
    assert run_directory.checkpoint_steps(tmp_path) == [10, 20, 30]
    assert_same(restore(tmp_path)[0], state_at(30))


def test_saved_on_eight_devices_restored_on_one_two_and_four(tmp_path):
    on_eight_devices(
        "import jax, test_checkpoint as t; from transformer_jax.config import MeshConfig; "
        "from transformer_jax.parallel import make_mesh, shard\n"
        f"workdir = {str(tmp_path)!r}\n"
        "c = t.Checkpoints(workdir, t.RUN)\n"
        "c.save(shard(t.state_at(10), make_mesh(MeshConfig(data=8))), t.Progress(t.Position(3, 4))); c.close()\n"
        "for devices in (2, 4):\n"
        "    c = t.Checkpoints(workdir, t.RUN)\n"
        "    state, progress = c.restore(shard(t.state_at(0), make_mesh(MeshConfig(data=devices)))); c.close()\n"
        "    t.assert_same(state, t.state_at(10)); assert progress.position == (3, 4)\n"
        "    assert len(state.params['params']['kernel'].sharding.device_set) == devices\n"
    )
    state, progress = restore(tmp_path)
    assert_same(state, state_at(10))
    assert progress.position == Position(3, 4)


def on_eight_devices(program: str) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=os.path.dirname(__file__), check=True)


def test_parameters_are_read_without_the_training_state(tmp_path):
    write(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "checkpoints/20/training")
    params = run_directory.load_parameters(tmp_path, "20")
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, state_at(20).average))


def test_averaging_takes_the_newest_and_names_them(tmp_path, caplog):
    write(tmp_path, 10, 20, 30)
    with caplog.at_level(logging.INFO):
        average = run_directory.load_parameters(tmp_path, "average:2")
    expected = jax.tree.map(lambda a, b: (a + b) / 2, state_at(20).average, state_at(30).average)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), average, expected)
    assert "20, 30" in caplog.text


def test_averaging_passes_over_near_duplicates(tmp_path):
    write(tmp_path, 10, 20, 30, 31)
    assert run_directory.choose_steps(tmp_path, "average:3") == [31, 20, 10]


def test_averaging_fewer_than_asked_is_refused(tmp_path):
    write(tmp_path, 10, 20)
    with pytest.raises(UserError, match="has 2 checkpoints for average:3: 10, 20"):
        run_directory.load_parameters(tmp_path, "average:3")


def test_averaging_equal_checkpoints_changes_nothing():
    tree = {"x": np.float32([0.1, 0.2])}
    np.testing.assert_array_equal(run_directory.mean([tree] * 5)["x"], tree["x"])


def test_unknown_checkpoint_names_are_refused(tmp_path):
    write(tmp_path, 10)
    for which in ("newest", "average:0", "average:", "average:x", "-1", "best:2"):
        with pytest.raises(UserError, match=f"checkpoint is '{which}'"):
            run_directory.load_parameters(tmp_path, which)


def test_a_missing_step_is_refused_with_those_that_are_there(tmp_path):
    write(tmp_path, 10, 20)
    with pytest.raises(UserError, match="no checkpoint of step 15; it has 10, 20"):
        run_directory.load_parameters(tmp_path, "15")


def test_last_falls_back_when_the_newest_is_broken_but_a_step_does_not(tmp_path, caplog):
    write(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "checkpoints/20/average/d")
    params = run_directory.load_parameters(tmp_path, "last")
    np.testing.assert_array_equal(params["params"]["bias"], 10)
    assert "step 20 is broken" in caplog.text
    with pytest.raises(UserError, match="checkpoints/20/average: the checkpoint can't be read"):
        run_directory.load_parameters(tmp_path, "20")


def test_no_run_is_said_so(tmp_path):
    with pytest.raises(UserError, match=r"no run here \(config.json is missing\)"):
        run_directory.load_config(tmp_path)
    with pytest.raises(UserError, match="no checkpoint here yet"):
        run_directory.choose_steps(tmp_path, "last")
