"""A run that is stopped, killed or damaged goes on as if nothing had happened."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from transformer_jax import run_directory
from transformer_jax.config import (
    Config,
    DataConfig,
    Metric,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
    Schedule,
    SearchConfig,
    TokenizerConfig,
    TransformerConfig,
)
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.training import loop
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.interruption import Interrupted
from transformer_jax.training.journal import records
from transformer_jax.training.learner import make_learner

ROOT = pathlib.Path(__file__).parent.parent
TIMES = ("seconds", "tokens_per_second")
WORDS = ["red", "green", "blue", "black", "white", "small", "large", "old", "new", "round"]


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Every run of these tests compiles the same programs."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    """Pairs of lines of which the second is the first backwards."""
    directory = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, lines in (("train", 60), ("dev", 5), ("test", 5)):
        pairs = [rng.choice(WORDS, size=rng.integers(1, 5)) for _ in range(lines)]
        (directory / f"{name}.tsv").write_text("".join(f"{' '.join(p)}\t{' '.join(p[::-1])}\n" for p in pairs))
    return directory


@pytest.fixture
def config(corpus) -> Config:
    return Config(
        model=TransformerConfig(encoder_layers=1, decoder_layers=1, width=8, heads=2, feed_forward=8, vocab_multiple=8),
        data=DataConfig(
            train=(str(corpus / "train.tsv"),),
            dev=(str(corpus / "dev.tsv"),),
            tokenizer=TokenizerConfig(vocab=32),
            plan=PlanConfig(tokens=256, shapes=2),
        ),
        optimizer=OptimizerConfig(schedule=Schedule.INVERSE_SQRT, peak=0.01, warmup=4, ema=0.9),
        run=RunConfig(steps=10, log_every=3, eval_every=4, checkpoint_every=100, samples=1, tensorboard=False),
        dev_search=SearchConfig(beam_size=1, extra_length=2),
        search=SearchConfig(beam_size=2, extra_length=2),
    )


def interrupt_at(monkeypatch, step: int, number: int = signal.SIGTERM) -> list[bytes]:
    """Sends this process a signal during the step of this call of the train step; notes the batches that come."""
    seen: list[bytes] = []
    shard = loop.shard_batch

    def noting(batch, mesh, **options):
        seen.append(b"".join(np.asarray(ids).tobytes() for ids in batch))
        if len(seen) == step:
            os.kill(os.getpid(), number)
        return shard(batch, mesh, **options)

    monkeypatch.setattr(loop, "shard_batch", noting)
    return seen


def final_state(config: Config, workdir: pathlib.Path):
    learner = make_learner(config, Tokenizer.load(run_directory.tokenizer_path(workdir)))
    checkpoints = Checkpoints(workdir, config.run)
    state, progress = checkpoints.restore(learner.template)
    checkpoints.close()
    return jax.tree.map(np.asarray, state._replace(rng=jax.random.key_data(state.rng))), progress


def log_without_times(workdir: pathlib.Path):
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records(workdir)]


def test_ten_steps_are_five_and_resume_and_five_bit_for_bit(tmp_path, config, monkeypatch):
    """Parameters, optimizer, average, key, data position, batches, dropout (which shows in the losses) and log."""
    with monkeypatch.context() as patch:
        whole_batches = interrupt_at(patch, step=-1)
        loop.train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        first_batches = interrupt_at(patch, step=5)
        with pytest.raises(Interrupted, match="SIGTERM; saved at step 5") as stop:
            loop.train(config, tmp_path / "parts")
    assert stop.value.status == 143
    assert run_directory.checkpoint_steps(tmp_path / "parts")[-1] == 5
    with monkeypatch.context() as patch:
        last_batches = interrupt_at(patch, step=-1)
        loop.train(config, tmp_path / "parts")

    assert first_batches + last_batches == whole_batches
    assert len(whole_batches) == 10
    (whole, whole_progress), (parts, progress) = (final_state(config, tmp_path / name) for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    assert progress == whole_progress
    assert log_without_times(tmp_path / "parts") == log_without_times(tmp_path / "whole")
    steps = [(record["step"], record["split"]) for record in records(tmp_path / "whole")]
    assert steps == [
        (1, "train"), (3, "train"), (4, "dev"), (6, "train"), (8, "dev"), (9, "train"), (10, "train"), (10, "dev"),
    ]  # fmt: skip


def test_a_kill_costs_only_the_work_since_the_last_checkpoint(tmp_path, config):
    """The log has lines of steps that are lost, and a half line; the run goes on as if undisturbed."""
    loop.train(config, tmp_path / "whole")

    config.run.checkpoint_every = 2
    run_directory.save_config(tmp_path / "killed", config)
    program = (
        "import os, sys, test_loop; from transformer_jax import run_directory; "
        "loop, workdir = test_loop.loop, sys.argv[1]; make = loop.shard_batch; count = iter(range(1, 99)); "
        "loop.shard_batch = lambda *a, **k: (next(count) == 8 and os.kill(os.getpid(), 9)) or make(*a, **k); "
        "loop.train(run_directory.load_config(workdir), workdir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "killed")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=pathlib.Path(__file__).parent,
    )
    assert done.returncode == -signal.SIGKILL
    assert run_directory.checkpoint_steps(tmp_path / "killed")
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7, "split": "train", "loss": 1.0}\n{"step": 7, "spl')
    config.run.checkpoint_every = 100
    loop.train(config, tmp_path / "killed")
    assert log_without_times(tmp_path / "killed") == log_without_times(tmp_path / "whole")
    jax.tree.map(
        np.testing.assert_array_equal,
        final_state(config, tmp_path / "killed")[0],
        final_state(config, tmp_path / "whole")[0],
    )


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tmp_path, config, capsys):
    config.optimizer.schedule, config.optimizer.warmup, config.optimizer.peak = Schedule.CONSTANT, 0, 1e30
    config.run.checkpoint_every = 1
    with pytest.raises(UserError, match=r"step \d+: the loss is (nan|inf)"):
        loop.train(config, tmp_path)
    for step in run_directory.checkpoint_steps(tmp_path):
        params = run_directory.load_parameters(tmp_path, str(step))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_a_finished_run_says_so_and_what_comes_next(tmp_path, config, capsys, corpus):
    config.data.test = (str(corpus / "test.tsv"),)
    config.run.average, config.run.checkpoint_every = 2, 5
    loop.train(config, tmp_path)
    first = capsys.readouterr().out
    loop.train(config, tmp_path)
    second = capsys.readouterr().out
    assert "checkpoints of steps 5, 10" in first
    assert "nrefs:1" in first
    assert "this run is finished, at step 10" in second
    for output in (first, second):
        assert "test at step 10" in output
        assert f"python3 decode.py --model={tmp_path}" in output
    assert sum(record["split"] == "test" for record in records(tmp_path)) == 1  # looked at once


def test_more_steps_than_before_go_on(tmp_path, config):
    loop.train(config, tmp_path)
    config.run.steps = 12
    loop.train(config, tmp_path)
    assert run_directory.checkpoint_steps(tmp_path)[-1] == 12
    assert run_directory.load_config(tmp_path).run.steps == 12


def test_another_configuration_is_refused_by_the_names_of_its_fields(tmp_path, config):
    config.run.steps = 1
    loop.train(config, tmp_path)
    config.optimizer.peak, config.model.dropout, config.run.log_every = 0.02, 0.5, 7
    with pytest.raises(UserError) as error:
        loop.train(config, tmp_path)
    assert "optimizer.peak: 0.01 → 0.02" in str(error.value)
    assert "model.dropout: 0.1 → 0.5" in str(error.value)
    assert "log_every" not in str(error.value)


def test_steps_can_not_change_under_a_cosine(tmp_path, config):
    config.optimizer.schedule, config.run.steps = Schedule.COSINE, 1
    loop.train(config, tmp_path)
    config.run.steps = 2
    with pytest.raises(UserError, match=r"run\.steps: 1 → 2"):
        loop.train(config, tmp_path)


def test_a_run_that_failed_before_its_first_checkpoint_can_be_begun_anew(tmp_path, config, corpus):
    right, config.data.train = config.data.train, (str(corpus / "missing.tsv"),)
    with pytest.raises(UserError, match=r"missing\.tsv"):
        loop.train(config, tmp_path)
    config.data.train, config.run.steps = right, 1
    loop.train(config, tmp_path)
    assert run_directory.checkpoint_steps(tmp_path) == [1]


@pytest.mark.parametrize("metric", list(Metric))
def test_training_stops_when_patience_runs_out_and_the_best_stays(tmp_path, config, capsys, metric):
    """With a learning rate of 0 no evaluation is better than the first."""
    config.optimizer.peak, config.run.eval_every, config.run.steps = 0.0, 2, 100
    config.run.best, config.run.patience, config.run.keep = metric, 2, 1
    loop.train(config, tmp_path)
    assert f"stopping: no better {metric} in the last 2 evaluations" in capsys.readouterr().out
    assert run_directory.checkpoint_steps(tmp_path) == [2, 6]
    assert run_directory.choose_steps(tmp_path, "best") == [2]
    loop.train(config, tmp_path)
    assert "this run is finished, at step 6" in capsys.readouterr().out


def test_evaluation_translates_the_whole_dev_set(tmp_path, config, capsys, corpus):
    config.run.steps = 1
    loop.train(config, tmp_path)
    lines = (tmp_path / "samples" / "1.tsv").read_text().splitlines()
    assert ["\t".join(line.split("\t")[:2]) for line in lines] == (corpus / "dev.tsv").read_text().splitlines()
    record = records(tmp_path)[-1]
    assert record["split"] == "dev"
    assert "nrefs:1" in record["bleu_signature"]
    assert 0 <= record["exact_match"] <= 1
    output = capsys.readouterr().out
    assert "dev at step 1" in output
    assert "nrefs:1" in output
    assert "\n  → " in output


def test_subword_sampling_sees_other_tokens_in_every_epoch_and_resumes(tmp_path, config, monkeypatch):
    config.data.tokenizer.sampling, config.run.steps = 0.5, 20
    with monkeypatch.context() as patch:
        whole_batches = interrupt_at(patch, step=-1)
        loop.train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        first_batches = interrupt_at(patch, step=13)
        with pytest.raises(Interrupted):
            loop.train(config, tmp_path / "parts")
    with monkeypatch.context() as patch:
        last_batches = interrupt_at(patch, step=-1)
        loop.train(config, tmp_path / "parts")
    assert first_batches + last_batches == whole_batches
    assert len(set(whole_batches)) == len(whole_batches)


def command(workdir: pathlib.Path, file: pathlib.Path, *flags: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", f"--config={file}", f"--workdir={workdir}", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def config_file(tmp_path, config) -> pathlib.Path:
    run_directory.save_config(tmp_path / "given", config)
    file = tmp_path / "experiment.py"
    file.write_text(
        "import pathlib\nfrom transformer_jax.config import from_json\n"
        f"def get_config():\n    path = {str(tmp_path / 'given' / 'config.json')!r}\n"
        "    return from_json(pathlib.Path(path).read_text(), path=path)\n"
    )
    return file


def test_the_command_stops_on_ctrl_c_and_resumes(tmp_path, config_file):
    run = command(tmp_path / "run", config_file, "--config.run.steps=100000", "--config.run.eval_every=1000000")
    for line in run.stdout:
        if line.startswith("step 3/"):
            run.send_signal(signal.SIGINT)
            break
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert "train.py: interrupted by SIGINT; saved at step" in errors
    step = run_directory.checkpoint_steps(tmp_path / "run")[-1]
    again = command(tmp_path / "run", config_file, f"--config.run.steps={step + 2}")
    output, errors = again.communicate(timeout=120)
    assert again.returncode == 0, errors
    assert f"resuming from the checkpoint of step {step:,}" in output
    assert run_directory.checkpoint_steps(tmp_path / "run")[-1] == step + 2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.optimizer.warmp=1", "warmp"),
        ("--config.optimizer.warmup=soon", "--config.optimizer.warmup=soon"),
        ("--config.optimizer.schedule=linear", "should be one of <noam|"),
        ("--config=nowhere.py", "nowhere.py"),
        ("--wrkdir=x", "wrkdir"),
        ("extra", "unexpected argument 'extra'"),
    ],
)
def test_wrong_flags_are_one_line_and_status_2(config_file, flag, message):
    flags = [f"--config={config_file}", flag]
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line]
    assert len(errors) == 1
    assert errors[0].startswith("train.py: ")
    assert message in errors[0]
