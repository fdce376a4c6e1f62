"""Bad numbers and changing data: a run goes on as if they had not been, or stops and says what to do."""

import dataclasses
import gzip
import io
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_loop import final_state, log_without_times, make_config
from test_step import random_batch

from transformer_jax.batch import Batch
from transformer_jax.config import (
    Config,
    MeshConfig,
    Metric,
    Nonfinite,
    OptimizerConfig,
    OptimizerKind,
    Schedule,
    TokenizerConfig,
)
from transformer_jax.data import corpus as corpora
from transformer_jax.data.store import build_store, open_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.quality import Quality
from transformer_jax.errors import UserError
from transformer_jax.run_directory import CHECKPOINTS, CORPORA, METRICS, PARAMETERS, best_first, checkpoint_steps
from transformer_jax.training import journal, learner, loop
from transformer_jax.training.checkpoint import Progress
from transformer_jax.training.corpora import prepare
from transformer_jax.training.evaluation import Scores
from transformer_jax.training.journal import records
from transformer_jax.training.objective import Sums, make_objective
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import init_state, make_train_step

POISON = 1_000_000  # a position that spoils its batch
PLAIN = OptimizerConfig(warmup=1)
LOSS, GRADIENT = "loss", "gradient"


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


def spoiled(objective, what: str = LOSS):
    """The objective, whose loss or only its gradient is NaN for a batch that is poisoned."""

    def with_poison(params, batch, rng):
        sums = objective(params, batch, rng)
        poisoned = (batch.source_positions == POISON).any()
        if what == LOSS:
            return sums._replace(loss=sums.loss * jnp.where(poisoned, jnp.nan, 1.0))
        leaf = jax.tree.leaves(params)[0].ravel()[0]
        root = jnp.sqrt(jnp.where(poisoned, leaf - leaf, 1.0))  # the slope of √x at 0 is infinite
        return sums._replace(loss=sums.loss + root - jax.lax.stop_gradient(root))

    return with_poison


def poisoned(batch: Batch) -> Batch:
    positions = np.array(batch.source_positions)
    positions[-1, 0] = POISON
    return batch._replace(source_positions=positions)


def distances(params, batch: Batch, rng) -> Sums:
    """An objective of a matrix and a bias: how far what the source's tokens have is from 1."""
    del rng
    counts = batch.source_segments != 0
    far = (params["table"][batch.source] + jnp.broadcast_to(params["bias"], (*counts.shape, 2)) - 1.0) ** 2
    return Sums(jnp.where(counts, far.sum(axis=2), 0).sum(), counts.sum(dtype=jnp.float32), {})


def step_and_state(objective=distances, *, config: OptimizerConfig = PLAIN):
    """A train step and its first state."""
    optimizer = make_optimizer(config, width=16, steps=100)
    params = {"table": jax.random.normal(jax.random.key(0), (16, 2)), "bias": jnp.zeros(2)}
    step = make_train_step(
        objective,
        optimizer,
        learning_rate=make_schedule(config, width=16, steps=100),
        ema=0.9,
        accumulate=config.accumulate,
        nonfinite=config.nonfinite,
    )
    return step, init_state(params, optimizer, seed=0, ema=0.9)


def numbers(state):
    return jax.tree.map(np.array, state._replace(rng=jax.random.key_data(state.rng)))


def without_counts(state):
    """The state without what goes on in a step that makes no update."""
    is_schedule = lambda part: isinstance(part, optax.ScaleByScheduleState)  # noqa: E731
    rest = jax.tree.map(lambda part: () if is_schedule(part) else part, state, is_leaf=is_schedule)
    return numbers(rest)._replace(step=None)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), one, other)


@pytest.mark.parametrize("kind", OptimizerKind)
@pytest.mark.parametrize(("what", "accumulate"), [(LOSS, 1), (GRADIENT, 2)])
def test_a_step_that_is_skipped_leaves_everything_as_it_was_but_its_number(what, kind, accumulate):
    config = dataclasses.replace(PLAIN, kind=kind, nonfinite=Nonfinite.SKIP, accumulate=accumulate)
    step, state = step_and_state(spoiled(distances, what), config=config)
    state, _ = step(state, random_batch(4))
    before = without_counts(state)
    state, report = step(state, poisoned(random_batch(4, seed=1)))
    assert not np.isfinite(report.grad_norm)
    assert np.isfinite(report.sums.loss) == (what == GRADIENT)
    assert_same(without_counts(state), before)
    assert state.step == 2
    state, report = step(state, random_batch(4, seed=2))
    assert np.isfinite(report.grad_norm)
    assert not np.array_equal(jax.tree.leaves(state.params)[0], jax.tree.leaves(before.params)[0])


def test_steps_around_a_skipped_one_are_those_of_a_run_which_never_had_it():
    """The rate is constant and there is no dropout, for these follow the number of the step."""

    def train(batches, nonfinite):
        config = OptimizerConfig(schedule=Schedule.CONSTANT, peak=0.01, warmup=1, nonfinite=nonfinite)
        step, state = step_and_state(spoiled(distances), config=config)
        for batch in batches:
            state, _ = step(state, batch)
        return without_counts(state)._replace(average=None)  # whose decay follows the step too

    good = [random_batch(4, seed=seed) for seed in range(3)]
    with_bad = [good[0], poisoned(good[0]), good[1], poisoned(good[1]), good[2]]
    expected = train(good, Nonfinite.STOP)
    assert_close(train(with_bad, Nonfinite.SKIP), expected)
    assert np.isnan(train(with_bad, Nonfinite.STOP).params["table"]).any()  # the poison is one


def test_the_rate_that_is_reported_is_the_one_that_is_used_after_a_skipped_step():
    """Of a gradient whose sign is all that Adam sees at first: an update is as long as the rate."""
    config = OptimizerConfig(warmup=1000, epsilon=1e-30, nonfinite=Nonfinite.SKIP)
    optimizer = make_optimizer(config, width=16, steps=100)
    one = spoiled(lambda params, batch, rng: Sums(params["x"], jnp.ones(()), {}))
    rate = make_schedule(config, width=16, steps=100)
    step = make_train_step(one, optimizer, learning_rate=rate, nonfinite=config.nonfinite)
    state = init_state({"x": jnp.zeros(())}, optimizer, seed=0, ema=0.0)
    for _ in range(3):
        state, _ = step(state, poisoned(random_batch(1)))
    state, report = step(state, random_batch(1))
    np.testing.assert_allclose(-state.params["x"], report.learning_rate, rtol=1e-5)
    np.testing.assert_allclose(report.learning_rate, rate(4), rtol=1e-6)


def test_to_stop_is_the_program_that_knows_of_no_skipping():
    """What is not asked for costs nothing."""
    step, state = step_and_state()
    skipping, _ = step_and_state(config=dataclasses.replace(PLAIN, nonfinite=Nonfinite.SKIP))
    programs = [jax.jit(one).lower(state, random_batch(4)).as_text().count("is_finite") for one in (step, skipping)]
    assert programs[0] == 0 < programs[1]


def test_a_spike_moves_the_parameters_no_more_than_the_clip_allows():
    """Whatever the size of a gradient is above the clip: the same update, and the same moments for the next ones."""

    def train(factor: float, clip: float | None):
        optimizer = make_optimizer(OptimizerConfig(warmup=1, clip=clip), width=16, steps=100)
        loss = lambda params, batch, rng: Sums(  # noqa: E731
            (jnp.where((batch.source_positions == POISON).any(), factor, 1.0) * (params["x"] ** 2).sum()),
            jnp.ones(()),
            {},
        )
        step = make_train_step(loss, optimizer, learning_rate=lambda s: s * jnp.float32(1))
        state = init_state({"x": jnp.arange(1.0, 4.0)}, optimizer, seed=0, ema=0.0)
        found = []
        for batch in (random_batch(1), poisoned(random_batch(1)), random_batch(1), random_batch(1)):
            state, _ = step(state, batch)
            found.append(np.asarray(state.params["x"]))
        return np.array(found)

    clipped, more = train(1e3, 1.0), train(1e6, 1.0)
    np.testing.assert_allclose(clipped, more, rtol=1e-5)
    calm = train(1.0, 1.0)
    np.testing.assert_allclose(clipped, calm, rtol=1e-5)  # these gradients are all above it
    assert np.abs(train(1e6, None) - train(1.0, None)).max() > 0.1  # so that is what the clip does


@pytest.mark.parametrize(("kind", "accumulate"), [*zip(OptimizerKind, (1, 2, 1), strict=True)])
def test_a_batch_of_padding_is_an_update_of_gradient_zero(kind, accumulate):
    """Momentum goes on, as the optimizer says; nothing is NaN."""
    config = dataclasses.replace(PLAIN, kind=kind, accumulate=accumulate)
    step, state = step_and_state(config=config)
    state, _ = step(state, random_batch(4))
    optimizer = make_optimizer(config, width=16, steps=100)
    nothing = jax.tree.map(jnp.zeros_like, state.params)
    updates, opt_state = optimizer.update(nothing, state.opt_state, state.params)
    expected = jax.tree.map(np.array, (optax.apply_updates(state.params, updates), opt_state))
    empty = Batch(*(np.zeros_like(ids) for ids in random_batch(4)))
    state, report = step(state, empty)
    assert (report.grad_norm, report.sums.loss, report.sums.weight) == (0, 0, 0)
    assert_close((state.params, state.opt_state), expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(numbers(state)))


# A whole run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory)
    return directory


@pytest.fixture
def own(tmp_path) -> pathlib.Path:
    """A directory with a corpus that may be changed, and room for a run."""
    write_corpus(tmp_path)
    return tmp_path


def write_corpus(directory: pathlib.Path, *, seed: int = 0) -> None:
    """Pairs of lines of which the second is the first backwards."""
    rng, words = np.random.default_rng(seed), ["red", "green", "blue", "black", "white", "small", "large", "old"]
    pairs = [rng.choice(words, size=rng.integers(1, 5)) for _ in range(60)]
    (directory / "train.tsv").write_text("".join(f"{' '.join(p)}\t{' '.join(p[::-1])}\n" for p in pairs))


def run_config(corpus: pathlib.Path, **optimizer) -> Config:
    config = make_config(corpus)
    config.data = dataclasses.replace(config.data, dev=(), tokenizer=TokenizerConfig(vocab=30))
    config.run = dataclasses.replace(config.run, eval_every=100, log_every=2)
    config.optimizer = dataclasses.replace(config.optimizer, **optimizer)
    return config


def poison_steps(monkeypatch, *steps: int, first: int = 1) -> None:
    """Poisons the batches of these steps of a run that begins with step `first`."""
    seen = [first - 1]
    shard_whole = loop.shard_batch

    def sharded(batch, mesh, **options):
        seen[0] += 1
        return shard_whole(poisoned(batch) if seen[0] in steps else batch, mesh, **options)

    monkeypatch.setattr(loop, "shard_batch", sharded)
    monkeypatch.setattr(learner, "make_objective", lambda *args, **options: spoiled(make_objective(*args, **options)))


@pytest.mark.slow
def test_a_run_skips_and_counts_and_its_log_is_json(tmp_path, corpus, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        poison_steps(patch, 3, 4, 6)
        loop.train(run_config(corpus, nonfinite=Nonfinite.SKIP), tmp_path)
    out = capsys.readouterr().out
    assert "step 3: the loss is nan and the norm of its gradient nan; this step makes no update" in out
    assert "skipped 3" in out
    lines = (tmp_path / METRICS).read_text().splitlines()
    refuse = lambda name: pytest.fail(f"{name} is no JSON")  # noqa: E731
    found = {
        line["step"]: line
        for line in (json.loads(line, parse_constant=refuse) for line in lines)
        if line["split"] == "train"
    }
    assert {step: line.get("skipped", 0) for step, line in found.items()} == {1: 0, 2: 0, 4: 2, 6: 3, 8: 3, 10: 3}
    assert "loss" not in found[4]  # none of its steps has one
    assert 0 < found[6]["loss"] < 10  # that of step 5 alone
    assert "grad_norm" not in found[6]
    state, progress = final_state(run_config(corpus, nonfinite=Nonfinite.SKIP), tmp_path)
    assert state.step == 10
    assert (progress.window.skipped, progress.window.in_a_row) == (3, 0)


@pytest.mark.slow
def test_the_count_of_skipped_steps_survives_a_resume(tmp_path, corpus, monkeypatch):
    bad = 2, 4, 7, 8
    config = run_config(corpus, nonfinite=Nonfinite.SKIP)
    with monkeypatch.context() as patch:
        poison_steps(patch, *bad)
        loop.train(config, tmp_path / "whole")
    short = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=5))
    with monkeypatch.context() as patch:
        poison_steps(patch, *bad)
        loop.train(short, tmp_path / "parts")
    with monkeypatch.context() as patch:
        poison_steps(patch, *bad, first=6)
        loop.train(config, tmp_path / "parts")
    states = [final_state(config, tmp_path / name) for name in ("whole", "parts")]
    assert_same(states[0][0], states[1][0])
    logs = [
        [line for line in log_without_times(tmp_path / name) if line["step"] in (6, 8, 10)]
        for name in ("whole", "parts")
    ]
    assert logs[0][-1] == logs[1][-1]
    assert logs[1][-1]["skipped"] == 4


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_where_it_is_told_to_skip(tmp_path, corpus, monkeypatch):
    config = run_config(corpus)
    config.run.checkpoint_every = 4
    with monkeypatch.context() as patch:
        poison_steps(patch, 6)
        with pytest.raises(UserError, match=r"step 6: the loss is nan .* --config\.optimizer\.nonfinite=skip"):
            loop.train(config, tmp_path)
    assert checkpoint_steps(tmp_path) == [4]
    config.optimizer.nonfinite = Nonfinite.SKIP
    with monkeypatch.context() as patch:
        poison_steps(patch, 6, first=5)
        loop.train(config, tmp_path)
    assert records(tmp_path)[-1]["skipped"] == 1


def test_too_many_in_a_row_stop_the_run(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(journal, "MOST_SKIPPED", 2)
    poison_steps(monkeypatch, 2, 3, 5, 6, 7)
    with pytest.raises(UserError, match=r"^step 7: the loss is nan .* as in the 2 steps before\. Nothing of this is"):
        loop.train(run_config(corpus, nonfinite=Nonfinite.SKIP), tmp_path)
    assert checkpoint_steps(tmp_path) == []


def train_with_skips(directory: pathlib.Path, name: str, **mesh: int) -> None:
    """A run with accumulation, dropout and an average, two steps of which are spoiled."""
    with pytest.MonkeyPatch.context() as patch:
        poison_steps(patch, 3, 6)
        config = run_config(directory, nonfinite=Nonfinite.SKIP, accumulate=2)
        config.run.steps = 6
        config.data.plan.rows_multiple, config.data.max_length, config.mesh = 8, 32, MeshConfig(**mesh)
        loop.train(config, directory / name)


@pytest.mark.slow
def test_eight_devices_skip_what_one_does(own):
    train_with_skips(own, "one")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    program = "import pathlib, test_faults; "
    program += f"test_faults.train_with_skips(pathlib.Path({str(own)!r}), 'eight', data=2, fsdp=2, tensor=2)"
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=os.path.dirname(__file__), check=True)
    one, eight = ([{**line, "split": 0} for line in log_without_times(own / name)] for name in ("one", "eight"))
    assert len(one) == len(eight)
    assert all(line == pytest.approx(other, rel=1e-3) for line, other in zip(one, eight, strict=True))
    assert eight[-1]["skipped"] == 2


@pytest.mark.parametrize("metric", Metric)
def test_an_evaluation_that_is_no_number_is_never_the_best(metric):
    nothing = Scores({"loss": math.nan}, Quality(math.nan, 0.0, "", ""), 0.0, [])
    assert loop.judged(Progress(), nothing, metric) == (Progress(waited=1), False)
    assert loop.judged(Progress(best=3.0, waited=1), nothing, metric) == (Progress(best=3.0, waited=2), False)
    best = 7 if metric == Metric.BLEU else 2
    assert best_first({1: math.nan, 2: 1.0, 5: math.nan, 7: 4.0}, metric) == sorted({2, 7}, key=lambda n: n != best)


# Changing data


def prepared(config: Config, workdir: pathlib.Path):
    return prepare(config, workdir, say=lambda line: None)


def contents(store):
    return [(store.source(i).tolist(), store.target(i).tolist()) for i in range(len(store))]


def checkpointed(workdir: pathlib.Path) -> None:
    """Makes a run directory look as if something had been trained."""
    (workdir / CHECKPOINTS / "5").mkdir(parents=True)


def test_a_corpus_with_other_pairs_is_refused_once_there_is_a_checkpoint(own):
    config, run, corpus = run_config(own), own / "run", own / "train.tsv"
    before, batches = corpus.read_text(), contents(prepared(config, run).store_of_epoch(0))
    checkpointed(run)
    corpus.write_text(before.replace("red", "blue"))
    for _ in range(2):  # it is not forgotten
        with pytest.raises(
            UserError, match=r"train\.tsv: there are other pairs .*\(60 then, 60 now\).* another --work"
        ):
            prepared(config, run)
    corpus.write_text(before + "red\tred\n")
    with pytest.raises(UserError, match=r"\(60 then, 61 now\)"):
        prepared(config, run)
    corpus.write_text(before)  # at another time; what counts is what is in it
    assert contents(prepared(config, run).store_of_epoch(0)) == batches


def test_the_corpus_that_changed_is_named_among_several(own):
    (own / "more.tsv").write_text("red\tred\nblue\tblue\n")
    config = run_config(own)
    config.data.train = (*config.data.train, str(own / "more.tsv"))
    prepared(config, own / "run")
    checkpointed(own / "run")
    (own / "more.tsv").write_text("red\tred\nblue\tred\n")
    with pytest.raises(UserError, match=r"more\.tsv: there are other pairs .* \(2 then, 2 now\)"):
        prepared(config, own / "run")


def test_a_store_that_was_deleted_is_made_again_and_is_the_same(own):
    config = run_config(own)
    batches = contents(prepared(config, own / "run").store_of_epoch(0))
    checkpointed(own / "run")
    shutil.rmtree(own / "run" / "store")
    store_of_epoch = prepared(config, own / "run").store_of_epoch
    assert contents(store_of_epoch(0)) == batches
    shutil.rmtree(own / "run" / "store")
    (own / "train.tsv").write_text("red\tred\n")
    assert contents(store_of_epoch(1)) == batches  # of a run that has it open


@pytest.mark.parametrize("record", ["", "[", '[{"corpus": 1}]', "[" * 100_000, "\xff"])
def test_without_a_record_of_the_corpora_a_run_goes_on_with_those_that_are_there(own, record):
    config = run_config(own)
    prepared(config, own / "run")
    checkpointed(own / "run")
    (own / "run" / CORPORA).write_text(record, encoding="latin-1")
    prepared(config, own / "run")
    (own / "train.tsv").write_text("red\tred\n" * 60)
    with pytest.raises(UserError, match="other pairs"):  # of which it then has a record
        prepared(config, own / "run")


def test_a_corpus_that_changed_before_the_first_checkpoint_has_a_tokenizer_of_its_own(own):
    config = run_config(own)
    config.data.tokenizer.vocab = 9
    (own / "train.tsv").write_text("a b c\tb c a\n" * 60)
    first = prepared(config, own / "run").tokenizer
    assert prepared(config, own / "run").tokenizer.hash == first.hash
    (own / "train.tsv").write_text("x y z\ty z x\n" * 60)
    second = prepared(config, own / "run")
    assert second.tokenizer.hash != first.hash
    assert 2 not in np.concatenate([ids for pair in contents(second.store_of_epoch(0)) for ids in pair])
    checkpointed(own / "run")
    (own / "train.tsv").write_text("a b c\tb c a\n" * 60)
    with pytest.raises(UserError, match="other pairs"):  # and keeps it once something was trained with it
        prepared(config, own / "run")
    assert Tokenizer.load(own / "run" / "tokenizer").hash == second.tokenizer.hash


def test_the_tokenizer_that_parameters_came_with_stays(own):
    config = run_config(own)
    tokenizer = prepared(config, own / "run").tokenizer
    (own / "run" / PARAMETERS).touch()
    (own / "train.tsv").write_text("red white\twhite red\n" * 60)
    assert prepared(config, own / "run").tokenizer.hash == tokenizer.hash


def test_a_store_of_another_tokenizer_is_made_again(own):
    config = run_config(own)
    prepared(config, own / "run")
    other = run_config(own)
    other.data.tokenizer.vocab = 25
    another = prepared(other, own / "other").tokenizer
    shutil.rmtree(own / "run" / "tokenizer")
    another.save(own / "run" / "tokenizer")
    pairs = [line.split("\t") for line in (own / "train.tsv").read_text().splitlines()]
    expected = another.encode_source([source for source, _ in pairs])
    assert [source for source, _ in contents(prepared(config, own / "run").store_of_epoch(0))] == expected


@pytest.mark.slow
def test_a_run_does_not_notice_what_becomes_of_store_and_corpus_while_it_trains(own, monkeypatch, corpus):
    """Two batches are an epoch: the store and the corpus go during the first one."""
    config = run_config(own)
    loop.train(run_config(corpus), own / "undisturbed")
    shard_whole, seen = loop.shard_batch, []

    def sharded(*args, **options):
        seen.append(0)
        if len(seen) == 2:
            shutil.rmtree(own / "run" / "store")
            (own / "train.tsv").write_text("red\tred\n")
        return shard_whole(*args, **options)

    monkeypatch.setattr(loop, "shard_batch", sharded)
    loop.train(config, own / "run")
    assert len(seen) == 10
    assert log_without_times(own / "run") == log_without_times(own / "undisturbed")
    with pytest.raises(UserError, match=r"other pairs .* \(60 then, 1 now\)"):
        loop.train(config, own / "run")


def test_subwords_are_not_drawn_anew_from_a_corpus_that_changed(own):
    config = run_config(own)
    config.data.tokenizer.sampling = 0.1
    stores = prepared(config, own / "run").store_of_epoch
    stores(1)
    (own / "train.tsv").write_text("red\tred\n")
    assert len(stores(1)) == 60  # which is there already
    with pytest.raises(UserError, match=r"train\.tsv was changed while the run trains on it"):
        stores(2)
    (own / "train.tsv").unlink()
    with pytest.raises(UserError, match=r"train\.tsv: cannot be read"):
        stores(2)


PAIRS = [([5, 6, 1], [7, 1]), ([1], [8, 9, 10, 1]), ([70_000, 1], [3, 1])]


@pytest.mark.parametrize("name", ["ids.npy", "lengths.npy", "store.json"])
def test_a_store_that_was_cut_or_changed_anywhere_is_noticed_or_the_same(tmp_path, name):
    path = tmp_path / "store"
    build_store(path, PAIRS[:1], PAIRS[1:], fingerprint="f")
    whole = (path / name).read_bytes()
    noticed = 0
    for place in range(len(whole)):
        for content in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]):
            (path / name).write_bytes(content)
            store = open_store(path, "f")
            noticed += store is None
            assert store is None or (contents(store), store.sizes) == (PAIRS, (1, 2))
    assert noticed > len(whole)


def npy(array: np.ndarray, **header) -> bytes:
    stream = io.BytesIO()
    given = {"descr": "<i4", "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(stream, given)
    return stream.getvalue() + array.tobytes()


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([Evil()]), allow_pickle=True)
    return stream.getvalue()


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, np.zeros(15, np.int32))
    return stream.getvalue()


HOSTILE = {
    "a pickle": pickled(),
    "an archive": zipped(),
    "a header of a petabyte": npy(np.zeros(15, np.int32), shape=(2**48,)),
    "another type": npy(np.zeros(15), descr="<f8"),
    "another shape": npy(np.zeros((15, 1), np.int32)),
    "another order": npy(np.zeros((3, 2), np.int32), fortran_order=True),
    "a deep header": b"\x93NUMPY\x01\x00\xf0\xff" + b"(" * 65520,
    "nothing": b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["ids.npy", "lengths.npy"])
def test_a_store_that_is_no_store_is_not_taken_for_one(tmp_path, kind, name, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    build_store(tmp_path / "store", PAIRS, fingerprint="f")
    (tmp_path / "store" / name).write_bytes(HOSTILE[kind])
    assert open_store(tmp_path / "store", "f") is None
    assert "damaged" in caplog.text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": [4]},
        {"sizes": [2]},
        {"sizes": "3"},
        {"sizes": [3.0]},
        {"sizes": [-1, 4]},
        {"sizes": None},
        {"checksums": []},
        {"checksums": None},
        {"format": None},
    ],
)
def test_a_store_whose_description_lies_is_not_taken_for_one(tmp_path, changes):
    build_store(tmp_path / "store", PAIRS, fingerprint="f")
    path = tmp_path / "store" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert open_store(tmp_path / "store", "f") is None


def test_a_corpus_that_was_cut_is_named(tmp_path):
    whole = gzip.compress(b"red\tblue\n" * 10_000)
    path = tmp_path / "a.tsv.gz"
    for size in range(1, len(whole), 29):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"a\.tsv\.gz: the gzip file is damaged"):
            list(corpora.read(str(path), source="en", target="de", split="train"))
    (tmp_path / "b.tsv").mkdir()
    with pytest.raises(UserError, match=r"b\.tsv: cannot be read"):
        list(corpora.read(str(tmp_path / "b.tsv"), source="en", target="de", split="train"))
