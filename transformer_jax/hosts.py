"""Several processes that work together, on as many hosts: how they find each other, wait, agree and end.

Everything else in this library is written for any number of processes; a single one needs nothing of this, and pays
nothing for it.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError

CONNECTING = 300  # seconds to wait for the others at the start
HEARTBEAT = 60  # seconds after which a process that is not heard of is given up
WORKING = 7 * 24 * 3600  # seconds to wait for a process that is heard of: it may be reading a large corpus
LINGERING = 3  # seconds that the first process, whose end is that of all, leaves the others to say what is wrong

LOST = 75  # exit status; EX_TEMPFAIL of sysexits.h: give the same command again

NAMES = ("coordinator", "processes", "process")  # of flags
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

# What JAX, its collectives and its coordination service say when another process can't be reached.
TRACES = re.compile(r"gloo|nccl|UNAVAILABLE|DEADLINE_EXCEEDED|coordination|heartbeat|barrier", re.IGNORECASE)


class Lost(Exception):
    """Another process is gone, and this one can't go on without it."""

    status = LOST


@contextlib.contextmanager
def together(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> Iterator[None]:
    """Within it this process is one of several, if that is asked for or the environment says so. See `connect`.

    Raises:
      UserError: as `connect`.
      Lost: if another process ends before its work is done.
    """
    connect(coordinator, processes, process)
    try:
        yield
    except Exception as error:
        if is_loss(error):
            raise Lost(_farewell()) from error
        raise


def connect(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process number `process` of `processes`, which meet at `coordinator` (host:port of process 0).

    What is not given is read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then from the
    cluster (see `cluster`). Where there is nothing, or `processes` is 1, this process is alone. To be called before
    JAX is used.

    Raises:
      UserError: for numbers that can't be, where something is missing, and for a port that is taken.
    """
    global _met
    coordinator, processes, process = _or_environment(coordinator, processes, process)
    if processes == 1 or jax.distributed.is_initialized():
        return
    found = cluster(os.environ)
    if found == "Open MPI":  # since its version 5 it does not say where process 0 is, but these
        processes = _number(os.environ, "OMPI_COMM_WORLD_SIZE") if processes is None else processes
        process = _number(os.environ, "OMPI_COMM_WORLD_RANK") if process is None else process
    _check(coordinator, processes, process, found)
    if found is None and coordinator is None:
        return
    if coordinator is not None and process == 0:
        _check_port(coordinator)
    _speak_when_aborted()
    where = coordinator or f"the coordinator which {found} names"
    _say_at_end(
        f"could not meet the other processes at {where} within {CONNECTING} s. Start all {processes or ''} "
        "processes, with the same --coordinator: the address of process 0, with a port that is free there and open."
    )
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            cluster_detection_method=None if found else "deactivate",
            initialization_timeout=CONNECTING,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
        jax.devices()  # the processes tell each other theirs
    except Exception as error:  # whatever the cluster, its interfaces or the network make JAX raise
        raise UserError(
            f"can't work with the other processes: {' '.join(str(error).split())[:300]}. Give --coordinator, "
            "--processes and --process to all of them, or --processes=1 for this one alone."
        ) from error
    if threading.current_thread() is threading.main_thread():  # others can't
        signal.signal(signal.SIGTERM, before)  # which JAX has taken for its notices of preemption
    _met = True
    _say_at_end(f"{name()}{_farewell()}")


_met = False  # whether this process is one of several


def disconnect() -> None:
    """Leaves when all processes have come to their end."""
    if jax.distributed.is_initialized():
        wait("the end")
        jax.distributed.shutdown()


def abandon(status: int) -> None:
    """Ends this process at once if others may be waiting for it: they then end too. Does nothing if it is alone."""
    if not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if _met and is_first() and status != LOST:
        time.sleep(LINGERING)
    os._exit(status)  # an orderly end would wait for the others


def cluster(environment: Mapping[str, str]) -> str | None:
    """The cluster which the environment of this process describes, with more than one process; None if there is none.

    JAX finds the rest of it out by itself.
    """
    slurm = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys()
    if slurm and _number(environment, "SLURM_NTASKS") > 1:
        return "SLURM"
    if _number(environment, "OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    hosts_of_slice = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    if "," in hosts_of_slice or _number(environment, "MEGASCALE_NUM_SLICES") > 1:
        return "Cloud TPU"
    if "TPU_ML_PLATFORM" in environment and "TPU_SKIP_MDS_QUERY" not in environment and not hosts_of_slice:
        return "Cloud TPU"  # as JAX marks a virtual machine with chips, when it is imported
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return "Kubernetes" if importlib.util.find_spec("kubernetes") else None
    return None


def is_first() -> bool:
    """Whether this is the process that writes and speaks."""
    return jax.process_index() == 0


def name() -> str:
    """How this process is called in its messages; nothing if it is alone."""
    return f"process {jax.process_index()} of {jax.process_count()}: " if _met else ""


def wait(name: str) -> None:
    """Returns when all processes have come here. May be called in any thread: no device takes part."""
    if jax.process_count() > 1:
        from orbax.checkpoint import multihost  # imported here because a single process need not pay for it

        _waits[name] += 1
        multihost.get_barrier_sync_fn()(key=f"{name} {_waits[name]}", timeout_ms=WORKING * 1000)


_waits: Counter[str] = Counter()  # a barrier has a name of its own each time


def by_first(name: str, function: Callable[[], object]) -> None:
    """Has the first process call the function, and all wait until it has returned. If it fails there, all end."""
    if is_first():
        function()
    wait(name)


def gathered(lines: Sequence[str]) -> list[list[str]]:
    """The lines of each process, in their order. All must call it."""
    if jax.process_count() == 1:
        return [list(lines)]
    content = np.frombuffer(json.dumps(list(lines)).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(content), np.int32)).reshape(-1)
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # of few sizes, each of which compiles once
    padded[: len(content)] = content
    contents = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(contents, sizes, strict=True)]


def check_same(what: str, text: str) -> None:
    """All must call it.

    Raises:
      UserError: in every process, if not all have the same text.
    """
    texts = [lines[0] for lines in gathered([text])]
    if other := [number for number, other in enumerate(texts) if other != texts[0]]:
        raise UserError(
            f"process {other[0]} has another {what} than process 0. Give all processes the same command, with a "
            "--workdir on a file system which all of their machines see."
        )


def largest(number: int) -> int:
    """The largest of a number that each process has. All must call it."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.array(number, np.int32)).max())


class Agreement:
    """`largest`, known to all one call later; so no call waits for a device.

    Of a single process it is the number itself, at once.
    """

    def __init__(self):
        self.several = jax.process_count() > 1
        self.before: jax.Array | None = None
        if self.several:
            mesh = Mesh(np.array(jax.devices()), "all")
            self.each = NamedSharding(mesh, PartitionSpec("all"))
            self.largest = jax.jit(lambda x: x.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self, number: int) -> int:
        """All must call it equally often."""
        if not self.several:
            return number
        mine = np.full(jax.local_device_count(), number, np.int32)
        before, self.before = self.before, self.largest(jax.make_array_from_process_local_data(self.each, mine))
        return 0 if before is None else int(before)


def is_loss(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is that another process can't be reached."""
    while error is not None and jax.process_count() > 1:
        if isinstance(error, ValueError | RuntimeError) and TRACES.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _farewell() -> str:
    return (
        "another process has ended or can't be reached; what is wrong with it, it says itself. All checkpoints are "
        "whole; the same command, given to all processes, resumes from the last one."
    )


def _or_environment(
    coordinator: str | None, processes: int | None, process: int | None
) -> tuple[str | None, int | None, int | None]:
    numbers = []
    for given, variable in ((processes, VARIABLES[1]), (process, VARIABLES[2])):
        text = os.environ.get(variable)
        if given is None and text is not None and not text.isdecimal():
            raise UserError(f"{variable} is {text!r}; expected a whole number.")
        numbers.append(int(text) if given is None and text is not None else given)
    return coordinator or os.environ.get(VARIABLES[0]), numbers[0], numbers[1]


def _check(coordinator: str | None, processes: int | None, process: int | None, found: str | None) -> None:
    given = dict(zip(NAMES, (coordinator, processes, process), strict=True))
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and len(missing) < len(NAMES) and found is None:
        raise UserError(
            f"{' and '.join(missing)} missing: a process of several is told the address of process 0, how many there "
            f"are and which of them it is (--coordinator=host:port --processes=N --process=0 … N-1; or "
            f"{', '.join(VARIABLES)} in the environment)."
        )
    if processes is not None and processes < 1:
        raise UserError(f"--processes is {processes}; expected 1 or more.")
    if process is not None and not 0 <= process < (processes or sys.maxsize):
        raise UserError(f"--process is {process}; expected 0 … {processes - 1 if processes else 'N-1'}.")
    if coordinator is not None and not (
        re.fullmatch(r".+:\d{1,5}", coordinator)  # an IPv6 address has colons too
        and 0 < int(coordinator.rpartition(":")[2]) < 65536
    ):
        raise UserError(f"--coordinator is {coordinator!r}; expected host:port, such as 10.0.0.1:8476.")


def _check_port(coordinator: str) -> None:
    """JAX ends in a violation of memory where it can't have the port."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise UserError(
            f"--coordinator is {coordinator!r}, but process 0 can't have that port ({error.strerror}). Give all "
            "processes another one."
        ) from error


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    return int(text) if text.isdecimal() else 0


_last_words = b""


def _say_at_end(text: str) -> None:
    global _last_words
    _last_words = f"{pathlib.Path(sys.argv[0]).name}: {text}\n".encode()


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    del number
    os.write(2, _last_words)
    os._exit(LOST)


def _speak_when_aborted() -> None:
    """JAX's client of the coordination service aborts the process when another is gone, even one that hangs in a
    collective of devices. It offers no other way to hear of it, and Python's own handlers don't run in an abort."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, type(_aborted))
    set_handler(signal.SIGABRT, _aborted)
