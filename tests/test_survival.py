"""A run that is killed, stopped, or out of room goes on as if nothing had happened, and nothing good is lost."""

import contextlib
import copy
import io
import logging
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from forked_commands import Server
from test_loop import WORDS, assert_same_run, make_config

from transformer_jax import disk, run_directory
from transformer_jax.config import Config, SearchConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.training import lock
from transformer_jax.training.corpora import prepare
from transformer_jax.training.interruption import Interruption
from transformer_jax.training.journal import forget_after, records
from transformer_jax.training.lock import locked
from transformer_jax.training.tensorboard import Board

# A checkpoint that is deleted while it is read is an exception in threads and coroutines of Orbax as well.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
STEPS, EVERY = 12, 2


@pytest.fixture(autouse=True)
def strict_promotion():
    """Of ranks only: optax mixes dtypes."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("outputs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def place():
    """A directory that other users can enter too."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="transformer_jax-survival-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def config(place) -> Config:
    rng = np.random.default_rng(0)
    for name, lines in (("train", 60), ("dev", 2), ("test", 2)):
        pairs = [rng.choice(WORDS, size=rng.integers(1, 5)) for _ in range(lines)]
        (place / f"{name}.tsv").write_text("".join(f"{' '.join(p)}\t{' '.join(p[::-1])}\n" for p in pairs))
    config = make_config(place)
    config.data.test = (str(place / "test.tsv"),)
    config.data.plan.shapes = 1
    config.run.steps, config.run.eval_every, config.run.checkpoint_every = STEPS, STEPS // 2, EVERY
    config.run.keep, config.run.average, config.run.tensorboard = 1, 1, True
    config.search = config.dev_search
    return config


@pytest.fixture(scope="module")
def config_flag(place, config) -> str:
    run_directory.save_config(place / "given", config)
    (place / "experiment.py").write_text(
        "import pathlib\nfrom transformer_jax.config import from_json\n"
        f"def get_config():\n    path = {str(place / 'given' / 'config.json')!r}\n"
        "    return from_json(pathlib.Path(path).read_text(), path=path)\n"
    )
    return f"--config={place / 'experiment.py'}"


# A program for the process of a run: notes what the run does to files, and kills it before the one of that number.
KILL_AT_FILE = """
import atexit, itertools, os, sys
changes = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock"}
numbers, last = itertools.count(1), 0

def audit(event, arguments):
    global last
    if event not in changes or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
    if event == "os.remove" or event == "os.rmdir" or event == "fcntl.flock" or str(path).startswith(workdir):
        last = next(numbers)
        if last == AT:
            os.kill(os.getpid(), 9)

sys.addaudithook(audit)
atexit.register(lambda: print("changes of files:", last, flush=True))
"""


class Whole:
    """The run that nothing disturbed: where it is, how long it took, how often it changed a file."""

    def __init__(self, server: Server, config_flag: str, place: pathlib.Path):
        self.workdir = place / "whole"
        for workdir in (place / "first", self.workdir):  # the first compiles
            began = time.monotonic()
            run = server.start("train", config_flag, workdir=workdir, before=KILL_AT_FILE.replace("AT", "None"))
            assert run.wait() == 0, run.output
            self.seconds = time.monotonic() - began
        self.changes = int(re.findall(r"changes of files: (\d+)", run.output)[-1])


@pytest.fixture(scope="module")
def whole(server, config_flag, place) -> Whole:
    return Whole(server, config_flag, place)


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_is_the_undisturbed_one(server, config, config_flag, whole, place):
    """By turns at a random time, and before a random change of a file."""
    seed = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(10**6))
    draw, kills, story = random.Random(seed), 0, [f"KILL_SEED={seed}"]
    for number in range(100):
        workdir = place / f"killed-{number}"
        while True:
            at = int(draw.triangular(1, whole.changes, 1)) if kills % 2 and kills < 20 else None
            seconds = draw.triangular(0, whole.seconds, 0) if not kills % 2 and kills < 20 else None
            story.append(f"{workdir}: killed at change {at} or after {seconds} s, of {whole.seconds} s")
            before = KILL_AT_FILE.replace("AT", str(at))
            run = server.start("train", config_flag, workdir=workdir, before=before)
            if seconds is not None:
                time.sleep(seconds)
                with contextlib.suppress(ProcessLookupError):
                    run.signal(signal.SIGKILL)
            status = run.wait()
            assert status in (0, -signal.SIGKILL), "\n".join([*story, run.output])
            kills += status != 0
            if status == 0:
                break
        assert_same_run(config, workdir, whole.workdir)
        assert not list(workdir.glob("**/*unfinished*")), story
        assert not (workdir / "broken").exists(), "\n".join([*story, run.output])
        if kills >= 20:
            return


# Programs for the process of a run: each sends it SIGTERM at one moment.
SIGTERM = """
import os
from transformer_jax.training import loop
from transformer_jax.training.checkpoint import Checkpoints

def before(place, name, when=lambda *a, **k: True, number=15):
    old = getattr(place, name)
    def new(*arguments, **options):
        if when(*arguments, **options):
            os.kill(os.getpid(), number)
        return old(*arguments, **options)
    setattr(place, name, new)

def after(place, name, when=lambda *a, **k: True, numbers=(15,)):
    old = getattr(place, name)
    def new(*arguments, **options):
        result = old(*arguments, **options)
        if when(*arguments, **options):
            for number in numbers:
                os.kill(os.getpid(), number)
        return result
    setattr(place, name, new)
"""
COMPILING = """
import jax
from transformer_jax.training.interruption import Interruption
entered, sent = [], []
enter = Interruption.__enter__
Interruption.__enter__ = lambda self: entered.append(1) or enter(self)
def listen(event, seconds, **options):
    if entered and not sent and "backend_compile" in event:
        sent.append(os.kill(os.getpid(), 15))
jax.monitoring.register_event_duration_secs_listener(listen)
"""
MOMENTS = [  # where, the program, the exit status, the newest checkpoint after it
    ("reading the corpora", "before(loop, 'held_out')\nbefore(loop, 'prepare')", 143, 0),
    ("compiling the first step", COMPILING, 143, 1),
    ("writing a checkpoint", "after(Checkpoints, 'save', lambda self, state, *_: int(state.step) == 4)", 143, 5),
    ("evaluating", "before(loop.evaluation, 'mean_figures')", 143, 7),
    ("twice", "after(Checkpoints, 'save', lambda self, state, *_: int(state.step) == 10, (15, 15))", -15, None),
    (
        "writing the last checkpoint",
        "after(Checkpoints, 'save', lambda self, state, *_: int(state.step) == 12)",
        143,
        12,
    ),
    ("scoring the test set", "before(loop, 'evaluate_test')", 143, 12),
]


@pytest.mark.slow
def test_sigterm_at_any_moment_costs_nothing(server, config, config_flag, whole, place):
    """One run, stopped at one moment after the other, each time resumed, is the undisturbed one."""
    workdir, steps = place / "stopped", []
    for moment, program, status, newest in MOMENTS:
        run = server.start("train", config_flag, workdir=workdir, before=SIGTERM + program)
        assert run.wait() == status, f"{moment}:\n{run.output}"
        assert "Traceback" not in run.output, run.output
        before, steps = steps, run_directory.checkpoint_steps(workdir)
        assert newest is None or [*steps, 0][0 if not steps else -2] == newest, (moment, steps)
        assert not before or steps[-1] >= before[-1], moment
        assert newest is None or "train.py: interrupted" in run.output, (moment, run.output)
    finished = server.start("train", config_flag, workdir=workdir)
    assert finished.wait() == 0, finished.output
    assert_same_run(config, workdir, whole.workdir)


@pytest.fixture
def small_disk(place):
    """A file system of its own, of 32 MB."""
    directory = place / "small"
    directory.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", directory], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"only who may mount a file system can fill one: {mounted.stderr.decode().strip()}")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


# A program for the process of a run: fills the disk before a function is called.
FULL = """
import pathlib
from transformer_jax.data import store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.training import evaluation, loop
from transformer_jax.training.checkpoint import Checkpoints
from transformer_jax.training.journal import Journal
from transformer_jax.training.tensorboard import Board

def fill():
    with open(pathlib.Path(workdir).parent / "ballast", "ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass

def full_before(place, name):
    old = getattr(place, name)
    def new(*arguments, **options):
        fill()
        return old(*arguments, **options)
    setattr(place, name, new)
"""
PLACES = [  # what is written, the program, what the error names
    ("the config", "fill()", r"config\.json"),
    ("the tokenizer", "full_before(Tokenizer, 'save')", "tokenizer"),
    ("the store", "full_before(store, '_write')", "store/train"),
    ("an event for TensorBoard", "full_before(Board, '__init__')", "events"),
    ("the first line of the log", "full_before(Journal, '_write')", r"metrics\.jsonl"),
    ("a checkpoint", "full_before(Checkpoints, 'save')", "checkpoints"),
    ("samples", "full_before(evaluation, 'write_samples')", r"samples/6\.tsv"),
    ("the log of a resumed run", "full_before(loop, 'Journal')", r"metrics\.jsonl|events"),
]


@pytest.mark.slow
def test_a_full_disk_is_named_and_costs_nothing(server, config, config_flag, whole, small_disk):
    """One run, of which the disk is full at one moment after the other; with room again the command resumes it."""
    workdir = small_disk / "run"
    for what, program, named in PLACES:
        before = run_directory.checkpoint_steps(workdir)
        run = server.start("train", config_flag, workdir=workdir, before=FULL + program)
        assert run.wait() == 2, f"{what}:\n{run.output}"
        assert re.search(rf"train\.py: {workdir}/.*({named})\S*: .*can't be written .*No space left", run.output), (
            f"{what}:\n{run.output}"
        )
        assert what == "a checkpoint" or "Traceback" not in run.output, run.output  # Orbax's threads print some there
        assert set(run_directory.checkpoint_steps(workdir)) >= set(before), what
        (small_disk / "ballast").unlink()
    run = server.start("train", config_flag, workdir=workdir)
    assert run.wait() == 0, run.output
    assert_same_run(config, workdir, whole.workdir)
    assert not list(workdir.glob("**/*unfinished*"))


# A program for the process of a run: it is one of nobody, whom root's permissions don't help.
NOBODY = "import os; os.setgid(65534); os.setuid(65534)"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_what_may_not_be_written_is_named_and_stays(server, config_flag, whole, place):
    nowhere = server.start("train", config_flag, workdir=place / "forbidden", before=NOBODY)
    assert nowhere.wait() == 2
    assert re.search(r"train\.py: .*forbidden.*: can't be written .*Permission denied", nowhere.output), nowhere.output

    workdir = shutil.copytree(whole.workdir, place / "protected")
    workdir.chmod(0o777)
    before = {path: path.read_bytes() for path in workdir.glob("**/*") if path.is_file()}
    more = server.start("train", config_flag, "--config.run.steps=14", workdir=workdir, before=NOBODY)
    assert more.wait() == 2
    assert re.search(r"train\.py: .*protected.*: .*can't be written .*Permission denied", more.output), more.output
    assert "Traceback" not in more.output
    after = {path: path.read_bytes() for path in before if path.exists()}
    assert {path for path in before if path not in after} == set()
    changed = {path.name for path, content in before.items() if after[path] != content}
    assert changed <= {"config.json", "lock"}  # run.steps


@pytest.mark.slow
def test_a_second_run_is_refused_and_readers_are_not(server, config_flag, whole, place, caplog):
    """While every step saves a checkpoint and deletes the one before."""
    workdir = place / "busy"
    slowly = "import time\nfrom transformer_jax.training import loop\nmake = loop.shard_batch\n"
    slowly += "loop.shard_batch = lambda *a, **k: time.sleep(0.1) or make(*a, **k)"
    often = ("--config.run.checkpoint_every=1", "--config.run.steps=40", "--config.run.eval_every=6")
    first = server.start("train", config_flag, *often, workdir=workdir, before=slowly)
    first.has_said("step 3/")
    second = server.start("train", config_flag, *often, workdir=workdir)
    read = 0
    with caplog.at_level(logging.WARNING):
        while "step 40/40" not in first.output:
            for which in ("last", "average:1"):
                params = run_directory.load_parameters(workdir, which)
                assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
                read += 1
    assert second.wait() == 2
    assert f"{workdir}: another run trains there (process {first.id} on " in second.output
    assert first.wait() == 0, first.output
    assert read > 10
    assert not [record for record in caplog.records if record.name.startswith("transformer_jax")]
    assert run_directory.checkpoint_steps(workdir)[-1] == 40
    losses, undisturbed = (
        {(record["step"], record["split"]): record["loss"] for record in records(run) if record["split"] != "test"}
        for run in (workdir, whole.workdir)
    )
    assert losses.items() >= undisturbed.items()


@pytest.mark.slow
def test_a_line_that_comes_again_leaves_nothing_in_memory(whole):
    """Of a server that translates for months: to trace a function is to remember it."""
    translator, search = Translator.load(str(whole.workdir)), SearchConfig(beam_size=2)
    traced = []

    def listen(event: str, seconds: float, **options: object) -> None:
        traced.append(event)

    for _ in range(2):
        traced.clear()
        jax.monitoring.register_event_duration_secs_listener(listen)
        translator.translate(["red green"], search)
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in traced if "trace" in event]


def test_a_run_directory_is_locked_until_the_run_has_ended(tmp_path):
    refused = pytest.raises(UserError, match=rf"run: another run trains there \(process {os.getpid()} on ")
    with locked(tmp_path / "run"):
        with refused, locked(tmp_path / "run"):
            pass
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "run"):
        pass


def test_without_locks_there_is_a_warning_and_a_run(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with locked(tmp_path), locked(tmp_path):
        pass
    assert "this file system has no locks (No locks available)" in caplog.text


def test_of_several_processes_the_first_takes_the_lock(tmp_path, monkeypatch):
    with locked(tmp_path):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with locked(tmp_path):
            pass


def test_what_a_killed_run_had_not_finished_is_cleared_away_and_nothing_else(tmp_path):
    unfinished = [
        tmp_path / name
        for name in (
            "config.json.unfinished",
            "metrics.jsonl.unfinished",
            "samples/300.tsv.unfinished",
            "tokenizer.unfinished/joint.model",
            "store/.train.x.unfinished/store/ids.npy",
        )
    ]
    others = [tmp_path / name for name in ("config.json", "store/train/ids.npy", "samples/200.tsv", "mine.unfinished")]
    for path in (*unfinished, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    with locked(tmp_path):
        pass
    assert not any(path.exists() for path in unfinished)
    assert all(path.exists() for path in others)


@contextlib.contextmanager
def no_room(size: int) -> Iterator[None]:
    """As on a full disk: no file may grow past so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_can_not_be_replaced_stays(tmp_path):
    path = tmp_path / "some" / "file"
    disk.replace(path, b"old")
    with no_room(100), pytest.raises(UserError, match=r"some/file: can't be written \(File too large\)"):
        disk.replace(path, bytes(101))
    assert path.read_bytes() == b"old"
    assert [path.name for path in path.parent.iterdir()] == ["file"]
    disk.replace(path, b"new")
    assert path.read_bytes() == b"new"


def test_tensorboard_says_that_the_disk_is_full_as_often_as_it_is_asked(tmp_path):
    """A writer in another thread ends, and what is to be written waits for it for ever."""
    board = Board(tmp_path, first_step=1)
    board.add(1, {"train/loss": 1.0})
    (path,) = tmp_path.glob("events.*")
    with no_room(path.stat().st_size):
        for _ in range(20):
            with pytest.raises(UserError, match=r"events\.out\.tfevents\.\S+: can't be written"):
                board.add(2, {"train/loss": 1.0, "train/accuracy": 0.0})
        board.close()


def test_a_signal_in_the_midst_of_a_message_is_heeded(monkeypatch):
    """Python's buffers can't be written to by a handler that has interrupted a writer."""

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, content) -> int:
            if interruption.signal is None:
                os.kill(os.getpid(), signal.SIGTERM)
            return len(content)

    with Interruption() as interruption:
        monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Terminal())))
        print("50 %", file=sys.stderr, flush=True)
        monkeypatch.undo()
    assert interruption.signal == signal.SIGTERM


def test_lines_of_the_log_that_lost_their_content_are_passed_over(tmp_path):
    """A power cut may leave zeros, or what was not UTF-8's last byte."""
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 3, "split": "train", "loss": 1.0}\n'
    path.write_bytes(whole + bytes(40) + b'\n\xff\n7\n{"step": 6}\n' + whole[:20])
    assert [record["step"] for record in records(tmp_path)] == [3]
    forget_after(path, 10)
    assert path.read_bytes() == whole


def test_a_run_whose_tokenizer_is_lost_does_not_make_another(tmp_path, config):
    """Its parameters would take one piece for another."""
    (tmp_path / run_directory.CHECKPOINTS / "10").mkdir(parents=True)
    with pytest.raises(UserError, match=r"tokenizer: missing"):
        prepare(config, tmp_path, say=lambda line: None)
    assert not run_directory.tokenizer_path(tmp_path).exists()


def test_a_tokenizer_goes_whole_when_another_configuration_begins(tmp_path, config, monkeypatch):
    prepare(config, tmp_path, say=lambda line: None)
    run_directory.save_config(tmp_path, config)
    other = copy.deepcopy(config)
    other.optimizer.peak = 0.5
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: next(path.glob("*.model"), path / "none").unlink(True))
        run_directory.adopt_config(tmp_path, other)  # as if killed in the midst of it
    assert not run_directory.tokenizer_path(tmp_path).exists()
    prepare(config, tmp_path, say=lambda line: None)
