"""A run that is stopped, killed or damaged goes on as if nothing had happened."""

import contextlib
import io
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest

import train
from transformer_jax import run_directory
from transformer_jax.config import (
    Config,
    DataConfig,
    Metric,
    OnBadPair,
    OptimizerConfig,
    OptimizerKind,
    PlanConfig,
    Positions,
    RunConfig,
    Schedule,
    SearchConfig,
    TokenizerConfig,
    TransformerConfig,
)
from transformer_jax.data.corpus import Pair
from transformer_jax.data.loader import BEGINNING, Position, batches
from transformer_jax.data.tokenizer import Tokenizer, train_tokenizer
from transformer_jax.decoding.quality import Quality
from transformer_jax.errors import UserError
from transformer_jax.training import loop
from transformer_jax.training.checkpoint import Checkpoints, Progress
from transformer_jax.training.corpora import prepare
from transformer_jax.training.evaluation import Scores
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
    return make_config(corpus)


def make_config(corpus: pathlib.Path) -> Config:
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


class Whole(NamedTuple):
    """A run that nothing disturbed."""

    workdir: pathlib.Path
    batches: list[bytes]
    output: str


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> Whole:
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        seen = interrupt_at(patch, step=-1)
        loop.train(make_config(corpus), workdir)
    return Whole(workdir, seen, output.getvalue())


@pytest.fixture
def copy(whole, tmp_path) -> pathlib.Path:
    """The directory of the undisturbed run, to be changed."""
    return shutil.copytree(whole.workdir, tmp_path / "copy")


def test_ten_steps_are_five_and_resume_and_five_bit_for_bit(tmp_path, config, whole, monkeypatch):
    """Parameters, optimizer, average, key, data position, batches, dropout (which shows in the losses) and log."""
    with monkeypatch.context() as patch:
        first_batches = interrupt_at(patch, step=5)
        with pytest.raises(Interrupted, match="SIGTERM; saved at step 5") as stop:
            loop.train(config, tmp_path)
    assert stop.value.status == 143
    assert run_directory.checkpoint_steps(tmp_path)[-1] == 5
    with monkeypatch.context() as patch:
        last_batches = interrupt_at(patch, step=-1)
        loop.train(config, tmp_path)

    assert first_batches + last_batches == whole.batches
    assert len(whole.batches) == 10
    assert_same_run(config, tmp_path, whole.workdir)
    steps = [(record["step"], record["split"]) for record in records(whole.workdir)]
    assert steps == [
        (1, "train"), (3, "train"), (4, "dev"), (6, "train"), (8, "dev"), (9, "train"), (10, "train"), (10, "dev"),
    ]  # fmt: skip


def assert_same_run(config: Config, one: pathlib.Path, other: pathlib.Path) -> None:
    """To the last bit, but for the times in the log."""
    (state, progress), (other_state, other_progress) = (final_state(config, workdir) for workdir in (one, other))
    jax.tree.map(np.testing.assert_array_equal, state, other_state)
    assert progress == other_progress
    assert log_without_times(one) == log_without_times(other)


def test_a_signal_in_an_evaluation_loses_nothing(tmp_path, config, monkeypatch):
    translate = loop.evaluate_dev

    def interrupted(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return translate(*arguments, **options)

    monkeypatch.setattr(loop, "evaluate_dev", interrupted)
    config.run.eval_every, config.run.best = 2, Metric.LOSS
    monkeypatch.setattr(loop, "judged", lambda progress, *_: (progress, False))  # a best one would be saved anyway
    with pytest.raises(Interrupted, match="saved at step 3"):
        loop.train(config, tmp_path)
    assert run_directory.checkpoint_steps(tmp_path) == [3]


@pytest.mark.slow
def test_a_kill_costs_only_the_work_since_the_last_checkpoint(tmp_path, config, whole):
    """The log has lines of steps that are lost, and a half line; the run goes on as if undisturbed."""
    config.run.checkpoint_every = 2
    run_directory.save_config(tmp_path, config)
    program = (
        "import os, sys, test_loop; from transformer_jax import run_directory; "
        "loop, workdir = test_loop.loop, sys.argv[1]; make = loop.shard_batch; count = iter(range(1, 99)); "
        "loop.shard_batch = lambda *a, **k: (next(count) == 8 and os.kill(os.getpid(), 9)) or make(*a, **k); "
        "loop.train(run_directory.load_config(workdir), workdir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        cwd=pathlib.Path(__file__).parent,
    )
    assert done.returncode == -signal.SIGKILL
    assert run_directory.checkpoint_steps(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 7, "split": "train", "loss": 1.0}\n{"step": 7, "spl')
    config.run.checkpoint_every = 100
    loop.train(config, tmp_path)
    assert_same_run(config, tmp_path, whole.workdir)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(tmp_path, config, capsys):
    config.optimizer.schedule, config.optimizer.warmup, config.optimizer.peak = Schedule.CONSTANT, 0, 1e30
    config.run.checkpoint_every = 1
    with pytest.raises(UserError, match=r"step \d+: the loss is (nan|inf)"):
        loop.train(config, tmp_path)
    for step in run_directory.checkpoint_steps(tmp_path):
        params = run_directory.load_parameters(tmp_path, str(step))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_a_finished_run_says_so_and_what_comes_next(copy, whole, config, capsys, corpus):
    assert "python3 decode.py --model=" in whole.output
    config.data.test = (str(corpus / "test.tsv"),)
    config.run.average, config.run.checkpoint_every = 2, 5
    outputs = []
    for _ in range(2):
        loop.train(config, copy)
        outputs.append(capsys.readouterr().out)
    assert "checkpoints of steps 4, 10" in outputs[0]
    assert "nrefs:1" in outputs[0]
    for output in outputs:
        assert "this run is finished, at step 10" in output
        assert "test at step 10" in output
        assert f"python3 decode.py --model={copy}" in output
    assert sum(record["split"] == "test" for record in records(copy)) == 1  # looked at once


@pytest.mark.slow
def test_more_steps_than_before_go_on_and_are_tested(copy, config, corpus):
    config.data.test = (str(corpus / "test.tsv"),)
    loop.train(config, copy)
    config.run.steps = 12
    loop.train(config, copy)
    assert run_directory.checkpoint_steps(copy)[-1] == 12
    assert run_directory.load_config(copy).run.steps == 12
    assert [record["step"] for record in records(copy) if record["split"] == "test"] == [10, 12]


def test_another_test_set_is_scored_too(copy, config, corpus):
    for name in ("test", "dev", "dev"):
        config.data.test = (str(corpus / f"{name}.tsv"),)
        loop.train(config, copy)
    assert [record["corpora"] for record in records(copy) if record["split"] == "test"] == [
        str(corpus / "test.tsv"),
        str(corpus / "dev.tsv"),
    ]


def test_a_workdir_that_can_not_be_one_is_named(tmp_path, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/config\.json: can't be written"):
        loop.train(config, tmp_path / "file")


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_a_corpus_that_is_not_there_is_missed_at_once(tmp_path, config, split):
    setattr(config.data, split, (str(tmp_path / "nowhere.tsv"),))
    with pytest.raises(UserError, match=r"nowhere\.tsv: cannot be read"):
        prepare(config, tmp_path, say=print)
    assert not run_directory.tokenizer_path(tmp_path).exists()


def test_dev_pairs_longer_than_a_table_of_positions_have_no_loss_and_are_counted(tmp_path, config):
    lines = []
    config.model.positions, config.model.max_positions = Positions.LEARNED, 3
    dev = prepare(config, tmp_path, say=lines.append).dev
    assert 0 < len(dev.store) < len(dev.pairs) == 5
    assert dev.store.lengths.max() <= 3
    assert f"dev: {5 - len(dev.store)} pairs longer than model.max_positions (3) have no loss" in lines
    config.model.max_positions = 1
    with pytest.raises(UserError, match="are longer"):
        prepare(config, tmp_path, say=print)


def test_bad_pairs_that_were_dropped_are_errors_once_they_are_to_be(tmp_path, config):
    config.data.max_length = 3
    lines = []
    prepare(config, tmp_path, say=lines.append)
    assert any("too long" in line for line in lines)
    config.data.bad_pairs = OnBadPair.ERROR
    with pytest.raises(UserError, match="too long"):
        prepare(config, tmp_path, say=print)


@pytest.mark.parametrize("kind", [OptimizerKind.ADAMW, OptimizerKind.ADAFACTOR])
def test_a_scanned_model_has_the_optimizer_state_of_each_layer(corpus, kind):
    config, states = make_config(corpus), []
    config.optimizer.kind = kind
    tokenizer = train_tokenizer([Pair("red green", "green red")] * 20, TokenizerConfig(vocab=10))
    for scan in (False, True):
        config.model.scan = scan
        states.append(make_learner(config, tokenizer).template.opt_state)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert [x.shape for x in jax.tree.leaves(states[0])] == [x.shape for x in jax.tree.leaves(states[1])]


def test_another_configuration_is_refused_by_the_names_of_its_fields(whole, config):
    config.optimizer.peak, config.model.dropout, config.run.log_every = 0.02, 0.5, 7
    with pytest.raises(UserError) as error:
        loop.train(config, whole.workdir)
    assert "optimizer.peak: 0.01 → 0.02" in str(error.value)
    assert "model.dropout: 0.1 → 0.5" in str(error.value)
    assert "log_every" not in str(error.value)


def test_steps_can_not_change_under_a_cosine(tmp_path, config):
    config.optimizer.schedule = Schedule.COSINE
    run_directory.adopt_config(tmp_path, config)
    (tmp_path / run_directory.CHECKPOINTS / "10").mkdir(parents=True)
    config.run.steps = 12
    with pytest.raises(UserError, match=r"run\.steps: 10 → 12"):
        loop.train(config, tmp_path)


def test_a_run_that_failed_before_its_first_checkpoint_can_be_begun_anew(tmp_path, config, corpus):
    right, config.data.train = config.data.train, (str(corpus / "missing.tsv"),)
    with pytest.raises(UserError, match=r"missing\.tsv"):
        loop.train(config, tmp_path)
    config.data.train, config.run.steps = right, 1
    loop.train(config, tmp_path)
    assert run_directory.checkpoint_steps(tmp_path) == [1]


@pytest.mark.slow
def test_training_stops_when_patience_runs_out_and_the_best_stays(tmp_path, config, capsys):
    """With a learning rate of 0 no evaluation is better than the first."""
    config.optimizer.peak, config.run.eval_every, config.run.steps = 0.0, 2, 100
    config.run.best, config.run.patience, config.run.keep = Metric.LOSS, 2, 1
    loop.train(config, tmp_path)
    assert "stopping: no better loss in the last 2 evaluations" in capsys.readouterr().out
    assert run_directory.checkpoint_steps(tmp_path) == [2, 6]
    assert run_directory.choose_steps(tmp_path, "best") == [2]
    loop.train(config, tmp_path)
    assert "this run is finished, at step 6" in capsys.readouterr().out


@pytest.mark.parametrize(("metric", "better", "worse"), [(Metric.BLEU, 3.0, 1.0), (Metric.LOSS, 1.0, 3.0)])
def test_the_best_is_the_highest_bleu_or_the_lowest_loss(metric, better, worse):
    before = Progress(best=2.0, waited=1)
    for score, expected, is_best in ((better, (better, 0), True), (2.0, (2.0, 2), False), (worse, (2.0, 2), False)):
        scores = Scores({"loss": score}, Quality(score, "", 0.0, ""), exact_match=0.0, translations=[])
        progress, found = loop.judged(before, scores, metric)
        assert ((progress.best, progress.waited), found) == (expected, is_best)


def test_evaluation_translates_the_whole_dev_set(whole, corpus):
    lines = (whole.workdir / "samples" / "4.tsv").read_text().splitlines()
    assert ["\t".join(line.split("\t")[:2]) for line in lines] == (corpus / "dev.tsv").read_text().splitlines()
    record = records(whole.workdir)[-1]
    assert record["split"] == "dev"
    assert "nrefs:1" in record["bleu_signature"]
    assert 0 <= record["exact_match"] <= 1
    assert "dev at step 4" in whole.output
    assert "nrefs:1" in whole.output
    assert "\n  → " in whole.output


def test_subword_sampling_sees_other_tokens_in_every_epoch_and_resumes(tmp_path, config):
    """Over several epochs; the resumed run has no stores of the first."""
    config.data.tokenizer.sampling = 0.5

    def seen(workdir, start: Position, count: int) -> list[tuple[Position, bytes]]:
        corpora = prepare(config, workdir, say=lambda line: None)
        data = batches(corpora.store_of_epoch, corpora.plan, seed=config.run.seed, start=start)
        return [
            (position, b"".join(ids.tobytes() for ids in batch)) for position, batch in itertools.islice(data, count)
        ]

    undisturbed = seen(tmp_path / "whole", BEGINNING, 20)
    after_13, _ = undisturbed[12]
    assert after_13.epoch > 1
    assert seen(tmp_path / "resumed", after_13, 7) == undisturbed[13:]
    assert len({batch for _, batch in undisturbed}) == len(undisturbed)


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


@pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")  # how ml_collections reads a config
def test_the_command_stops_on_ctrl_c_and_resumes(tmp_path, config_file, monkeypatch, capsys):
    run = command(tmp_path / "run", config_file, "--config.run.steps=100000", "--config.run.eval_every=1000000")
    for line in run.stdout:
        if line.startswith("step 3/"):
            run.send_signal(signal.SIGINT)
            break
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert "train.py: interrupted by SIGINT; saved at step" in errors
    step = run_directory.checkpoint_steps(tmp_path / "run")[-1]
    monkeypatch.setattr(train, "keep_compiled_programs", lambda: None)
    flags = [f"--config={config_file}", f"--workdir={tmp_path / 'run'}", f"--config.run.steps={step + 2}"]
    assert train.main(["train.py", *flags]) == 0
    assert f"resuming from the checkpoint of step {step:,}" in capsys.readouterr().out
    assert run_directory.checkpoint_steps(tmp_path / "run")[-1] == step + 2
