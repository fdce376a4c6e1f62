"""One training run at a time in a run directory. Readers (decode.py) need no lock: what they read is whole."""

import contextlib
import fcntl
import logging
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import BinaryIO

import jax

from transformer_jax.errors import UserError
from transformer_jax.run_directory import LOCK, clear_unfinished

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(workdir: str | os.PathLike) -> Iterator[None]:
    """Within it no other run trains in `workdir`. Of several processes of one run the first one sees to that.

    It is a lock of the kernel, which falls with the process, however that ends: the file stays and means nothing. What
    such a process had not finished is cleared away. On a file system without locks a warning says so, and the run goes
    on.

    Raises:
      UserError: if another run holds it; it names the process and its machine.
    """
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            path = pathlib.Path(workdir, LOCK)
            with contextlib.suppress(OSError):  # whoever writes there next says what is wrong with the directory
                path.parent.mkdir(parents=True, exist_ok=True)
                _take(stack.enter_context(path.open("ab+", buffering=0)), path)
        yield


def _take(file: BinaryIO, path: pathlib.Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().decode().strip() or "unknown process"
        raise UserError(
            f"{path.parent}: another run trains there ({holder}). Wait until it has ended or stop it, or choose "
            "another --workdir."
        ) from error
    except OSError as error:
        log.warning(
            "%s: this file system has no locks (%s). Two runs there at once would ruin each other.",
            path.parent,
            error.strerror,
        )
        return
    clear_unfinished(path.parent)
    with contextlib.suppress(OSError):  # a full disk: the lock holds, if without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
