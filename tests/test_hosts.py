"""Several processes, really started on this machine, do what one does; and when one of them ends, none is left waiting.

`train_here` is what each of them runs: the command `train.py`, with a fault at one step if that is asked for.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import pytest
import test_loop

import train
from transformer_jax import hosts, run_directory
from transformer_jax.batch import Share
from transformer_jax.config import Config, MeshConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.parallel import make_mesh, share
from transformer_jax.training import corpora, loop, metrics
from transformer_jax.training.interruption import Interrupted
from transformer_jax.training.objective import Sums

BOUND = 60  # seconds in which the others end when one process has
STEPS = 10
corpus, strict_promotion = test_loop.corpus, test_loop.strict_promotion  # fixtures


class Ended(NamedTuple):
    """How a process ended."""

    status: int
    output: str
    errors: str
    at: float  # time.monotonic()


class Fault(NamedTuple):
    """A signal that a process sends itself in one of its steps, counted from the first of this command."""

    process: int
    step: int
    signal: int


def train_here(flags: Sequence[str], step: int, number: int) -> None:
    """Runs in each process: `train.py`, which is sent a signal in this step, and says over how many tokens it means."""
    shard, steps, means = loop.shard_batch, iter(range(1, 1_000_000)), metrics.means

    def with_fault(*arguments, **options):
        if next(steps) == step:
            print(f"sent {time.monotonic()}", flush=True)
            os.kill(os.getpid(), number)
        return shard(*arguments, **options)

    def counted(sums: Sums):
        print(f"mean of {int(sums.weight)}")
        return means(sums)

    loop.shard_batch, metrics.means = with_fault, counted
    sys.argv[0] = "train.py"
    sys.exit(train.main(["train.py", *flags]))


def trained(
    flags: Sequence[str],
    count: int,
    *,
    how: str = "flags",
    fault: Fault | None = None,
    of_last: Sequence[str] = (),
) -> list[Ended]:
    """How `count` processes end that train together and are told so by flags, the environment or SLURM.

    `of_last` are flags which only the last of them is given.
    """
    port, programs, environments = free_port(), [], []
    for process in range(count):
        values = (f"127.0.0.1:{port}", str(count), str(process))
        own = [*flags, *of_last] if process == count - 1 else list(flags)
        if how == "flags":
            own += [f"--{name}={value}" for name, value in zip(hosts.NAMES, values, strict=True)]
        step, number = (fault.step, fault.signal) if fault and fault.process == process else (-1, 0)
        programs.append(f"import test_hosts; test_hosts.train_here({own!r}, {step}, {number})")
        slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "JAX_COORDINATOR_PORT": str(port)}
        slurm |= {"SLURM_NTASKS": str(count), "SLURM_PROCID": str(process), "SLURM_LOCALID": str(process)}
        named = dict(zip(hosts.VARIABLES, values, strict=True))
        environments.append({"flags": {}, "environment": named, "SLURM": slurm}[how])
    with started(programs, environments) as processes:
        return ends(processes)


@contextlib.contextmanager
def started(programs: Sequence[str], environments: Sequence[dict[str, str]]) -> Iterator[list[subprocess.Popen]]:
    """Python processes with one device each; none is left running."""
    everywhere = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "XLA_FLAGS": ""}
    processes = []
    for program, environment in zip(programs, environments, strict=True):
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | everywhere | environment,
            cwd=pathlib.Path(__file__).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes: Sequence[subprocess.Popen]) -> list[Ended]:
    """How they end; each is waited for by a thread of its own."""

    def end(process: subprocess.Popen) -> Ended:
        output, errors = process.communicate(timeout=240)
        return Ended(process.returncode, output, errors, time.monotonic())

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(end, processes))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def make_config(corpus: pathlib.Path) -> Config:
    """Ten steps with dropout, then evaluation and test, of 5 pairs each, which no number of processes divides."""
    config = test_loop.make_config(corpus)
    config.run.steps, config.run.log_every, config.run.eval_every, config.run.checkpoint_every = STEPS, 1, STEPS, 2
    config.data.test, config.search = (str(corpus / "test.tsv"),), config.dev_search  # one program less to compile
    return config


@pytest.fixture
def config(corpus) -> Config:
    return make_config(corpus)


@pytest.fixture
def flags(tmp_path, config) -> list[str]:
    """Of `train.py`, for this config and the directory `run`."""
    run_directory.save_config(tmp_path / "given", config)
    file, given = tmp_path / "experiment.py", str(tmp_path / "given" / "config.json")
    file.write_text(
        "import pathlib\nfrom transformer_jax.config import from_json\n"
        f"def get_config():\n    return from_json(pathlib.Path({given!r}).read_text(), path={given!r})\n"
    )
    return [f"--config={file}", f"--workdir={tmp_path / 'run'}"]


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> pathlib.Path:
    """The directory of a run of one process that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    loop.train(make_config(corpus), workdir)
    return workdir


def assert_same_run(workdir: pathlib.Path, whole: pathlib.Path) -> None:
    """Losses and all other figures of every step, scores, translations and parameters."""
    logs = [test_loop.log_without_times(directory) for directory in (workdir, whole)]
    assert [(record["step"], record["split"]) for record in logs[0]] == [
        (record["step"], record["split"]) for record in logs[1]
    ]
    for record, expected in zip(*logs, strict=True):
        for name, value in expected.items():
            assert record[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), record
    assert (workdir / f"samples/{STEPS}.tsv").read_text() == (whole / f"samples/{STEPS}.tsv").read_text()
    params = [run_directory.load_parameters(directory) for directory in (workdir, whole)]
    jax.tree.map(lambda some, other: np.testing.assert_allclose(some, other, atol=1e-5), *params)


def assert_others_stopped(found: Sequence[Ended], victim: int) -> None:
    """In time, with the status and the message that belong to it."""
    (sent,) = re.findall(r"^sent (.*)$", found[victim].output, re.MULTILINE)
    for process, ended in enumerate(found):
        if process == victim:
            assert ended.status == -signal.SIGKILL
            continue
        assert ended.status == hosts.LOST == 75, ended.errors
        seconds = ended.at - float(sent)
        print(f"process {process} ended {seconds:.1f} s after process {victim} of {len(found)}", file=sys.__stdout__)
        assert seconds < BOUND
        message = f"train.py: process {process} of {len(found)}: another process has ended"
        # gRPC's threads may write lines of their own after it.
        (line,) = (line for line in ended.errors.splitlines() if line.startswith(message))
        assert "the same command, given to all processes, resumes" in line


def said(ended: Ended) -> list[str]:
    """The lines of a process without what Gloo and `train_here` say."""
    return [line for line in ended.output.splitlines() if not line.startswith(("[Gloo]", "sent ", "mean of "))]


@pytest.mark.slow
def test_a_kill_of_one_of_four_and_a_signal_to_one_of_two_lose_nothing(tmp_path, flags, config, whole, capsys):
    """Four processes, with parameters split over them, go on as two with whole ones, and these as one."""
    mesh = ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    killed = trained([*flags, *mesh], 4, fault=Fault(2, 6, signal.SIGKILL))
    assert_others_stopped(killed, victim=2)
    assert "on 4 ×" in killed[0].output
    assert [said(ended) for ended in killed[1:]] == [[], [], []]
    (step,) = {run_directory.checkpoint_steps(tmp_path / "run")[-1]} & {2, 4}

    stopped = trained(flags, 2, how="environment", fault=Fault(1, 2, signal.SIGTERM))
    assert f"resuming from the checkpoint of step {step}" in stopped[0].output
    assert not said(stopped[1])
    saved = run_directory.checkpoint_steps(tmp_path / "run")[-1]
    assert step + 2 <= saved <= step + 3
    for process, ended in enumerate(stopped):
        assert ended.status == 143
        assert f"train.py: process {process} of 2: interrupted by SIGTERM; saved at step {saved}" in ended.errors

    loop.train(config, tmp_path / "run")
    assert f"resuming from the checkpoint of step {saved}" in capsys.readouterr().out
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_as_two_even_if_the_first_is_killed(tmp_path, flags, config, whole, monkeypatch):
    with monkeypatch.context() as patch:
        test_loop.interrupt_at(patch, step=3)
        with pytest.raises(Interrupted):
            loop.train(config, tmp_path / "run")
    assert_others_stopped(trained(flags, 2, fault=Fault(0, 4, signal.SIGKILL)), victim=0)
    finished = trained(flags, 2, how="SLURM")
    tokenizer = Tokenizer.load(run_directory.tokenizer_path(tmp_path / "run"))
    assert [ended.status for ended in finished] == [0, 0], finished
    assert "test at step 10" in finished[0].output
    for split in ("dev", "test"):  # each pair counts once
        held_out = corpora.held_out(config, tokenizer, split, say=print)
        assert f"mean of {held_out.store.lengths[:, 1].sum()}" in finished[0].output.splitlines()
    assert not said(finished[1])
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_what_one_process_finds_wrong_ends_the_others(flags):
    """The first has no use for so large a vocabulary; the others wait for its tokenizer."""
    failed = trained([*flags, "--config.data.tokenizer.vocab=100000"], 2)
    assert [ended.status for ended in failed] == [2, hosts.LOST], failed
    assert "train.py: process 0 of 2: " in failed[0].errors
    assert "vocab" in failed[0].errors
    assert "another process has ended" in failed[1].errors


@pytest.mark.slow
def test_processes_of_different_configurations_are_refused(flags):
    refused = trained(flags, 2, of_last=["--config.run.steps=11"])
    assert [ended.status for ended in refused] == [2, 2], refused
    for process, ended in enumerate(refused):
        assert f"process {process} of 2: process 1 has another configuration than process 0" in ended.errors


WAITING = """
import os, sys, time
from transformer_jax import hosts
hosts.CONNECTING, hosts.HEARTBEAT, sys.argv[0] = 15, 10, "train.py"
try:
    with hosts.together("127.0.0.1:{port}", 2, {process}):
        print("met", flush=True)
        {then}
        hosts.wait("nothing")
except hosts.Lost as error:
    print(error, file=sys.stderr)
    hosts.abandon(hosts.LOST)
"""


@pytest.mark.slow
def test_a_process_that_hangs_is_given_up():
    """It keeps its connections; the other is busy, as in a collective of devices that never ends."""
    port, stopped = free_port(), f"os.kill(os.getpid(), {int(signal.SIGSTOP)})"
    doings = enumerate(("time.sleep(200)", stopped))
    programs = [WAITING.format(port=port, process=process, then=then) for process, then in doings]
    with started(programs, [{}, {}]) as processes:
        (ended,) = ends(processes[:1])
    assert "met" in ended.output
    assert ended.status == hosts.LOST
    assert "process 0 of 2: another process has ended or can't be reached" in ended.errors


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_waited_for_and_named():
    port = free_port()
    with started([WAITING.format(port=port, process=1, then="")], [{}]) as processes:
        (ended,) = ends(processes)
    assert ended.status == hosts.LOST
    assert f"could not meet the other processes at 127.0.0.1:{port} within 15 s" in ended.errors


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),  # a batch script, outside srun
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0", "TPU_ML_PLATFORM": "JAX"}, "Cloud TPU"),
        ({"TPU_WORKER_HOSTNAMES": "a", "TPU_WORKER_ID": "0", "TPU_ML_PLATFORM": "JAX"}, None),
        ({"TPU_ML_PLATFORM": "JAX"}, "Cloud TPU"),
        ({"TPU_SKIP_MDS_QUERY": "1"}, None),  # what JAX sets where there are no chips
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of its own
    ],
)
def test_clusters_are_found_by_their_environment(environment, found):
    assert hosts.cluster(environment) == found


@pytest.mark.parametrize(("tasks", "found"), [("4", "SLURM"), ("1", None)])
def test_a_single_task_of_slurm_is_alone(tasks, found):
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    assert hosts.cluster(dict.fromkeys(names, "1") | {"SLURM_NTASKS": tasks}) == found


def test_an_indexed_job_of_kubernetes_is_one_where_jax_can_ask_for_its_members(monkeypatch):
    job = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}
    for installed, found in ((None, None), ("something", "Kubernetes")):
        monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name, installed=installed: installed)
        assert hosts.cluster(job) == found


@pytest.fixture
def environment(monkeypatch):
    """Without a cluster, and with `jax.distributed.initialize` noting what it is asked for."""
    asked = []
    monkeypatch.setattr(hosts, "_speak_when_aborted", lambda: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **options: asked.append((given, options)))
    for name in (*hosts.VARIABLES, "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return asked


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", None, None), "--processes and --process missing"),
        ((None, 2, None), "--coordinator and --process missing"),
        ((None, None, 0), "--coordinator and --processes missing"),
        (("a:1", 0, 0), "--processes is 0; expected 1 or more"),
        (("a:1", 2, 2), r"--process is 2; expected 0 … 1"),
        (("a:1", 2, -1), "--process is -1; expected 0 … 1"),
        (("a", 2, 0), "--coordinator is 'a'; expected host:port"),
        (("a:99999", 2, 0), "--coordinator is 'a:99999'; expected host:port"),
    ],
)
def test_numbers_that_can_not_be_are_refused_by_the_names_of_their_flags(environment, given, message):
    with pytest.raises(UserError, match=message):
        hosts.connect(*given)
    assert not environment


def test_a_process_is_alone_unless_it_is_told_otherwise(environment, monkeypatch):
    hosts.connect()
    hosts.connect("a:1", 1, 0)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match="--coordinator and --process missing"):
        hosts.connect()
    hosts.connect(processes=1)  # a flag goes before the environment
    assert not environment
    assert hosts.name() == ""
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(UserError, match="JAX_PROCESS_ID is 'first'; expected a whole number"):
        hosts.connect("a:1", 2)


def test_a_port_that_is_taken_is_named_by_process_0(environment):
    with socket.create_server(("", 0)) as taken:
        coordinator = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"{coordinator}', but process 0 can't have that port .*in use"):
            hosts.connect(coordinator, 2, 0)
    assert not environment


def test_open_mpi_says_all_but_where_process_0_is(environment, monkeypatch):
    monkeypatch.setattr(hosts, "_say_at_end", lambda text: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    hosts.connect("10.0.0.1:8476")
    ((given, options),) = environment
    assert given == ("10.0.0.1:8476", 4, 3)
    assert options["cluster_detection_method"] is None  # JAX gives it the devices of its number on the host


def test_alone_nothing_is_waited_for_and_everything_is_known_at_once():
    hosts.wait("nobody")
    hosts.check_same("text", "mine")
    assert hosts.is_first()
    assert hosts.gathered(["a", "b"]) == [["a", "b"]]
    assert hosts.largest(3) == hosts.Agreement()(3) == 3
    assert share(make_mesh(MeshConfig(data=1)), multiple=4) == Share((0,), 1, 4)
