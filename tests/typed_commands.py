"""Shell blocks of the documentation, run by bash, with the library's commands inside this process.

Starting Python and importing JAX takes seconds for each command. So the `python3` that bash finds is a small script,
which hands its arguments and its standard streams to this process, waits, and exits with what the command returned.
Pipes, here-documents, files and exit statuses are bash's own.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unittest import mock

import decode

SCRIPT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as place:
    place.connect({address!r})
    socket.send_fds(place, [json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode()], [0, 1, 2])
    sys.exit(int(place.recv(8)))
"""


class Done(NamedTuple):
    status: int
    output: str  # standard output, then standard error
    skipped: list[str]  # commands that were not run
    failure: BaseException | None  # what a command raised


def run_shell(
    code: str,
    directory: pathlib.Path,
    *,
    programs: Sequence[str],
    skipped: Callable[[str], bool],
    train: Callable[[list[str]], int],
) -> Done:
    """Runs a block in a directory, which has to be the current one.

    Args:
      programs: besides `python3`, the names of commands that are asked about in `skipped`, and exist only for that.
      skipped: whether a command, given as it was typed, is not to be run. It then succeeds without output.
      train: runs `train.py` with the flags that were typed; its exit status.
    """
    with tempfile.TemporaryDirectory(prefix="shell-") as bin_, tempfile.TemporaryFile("w+") as output:
        address, not_run, failure = f"{bin_}/socket", [], None
        for name in ("python3", *programs):
            script = pathlib.Path(bin_, name)
            script.write_text(SCRIPT.format(python=sys.executable, address=address))
            script.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            server.settimeout(0.05)
            shell = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", code],
                cwd=directory,
                env=os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            while shell.poll() is None:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    message, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                    name, *arguments = json.loads(message)
                    try:
                        if skipped(" ".join([name, *arguments])):
                            not_run.append(" ".join([name, *arguments]))
                            status = 0
                        else:
                            status = run_command([name, *arguments], streams, train)
                    except Exception as error:
                        failure, status = error, 99
                    finally:
                        for stream in streams:
                            with contextlib.suppress(OSError):
                                os.close(stream)
                    connection.send(str(status).encode())
        output.seek(0)
        return Done(shell.returncode, output.read(), not_run, failure)


def run_command(command: Sequence[str], streams: Sequence[int], train: Callable[[list[str]], int]) -> int:
    """Runs one of the library's commands with these standard streams; its exit status."""
    with (
        open(streams[0], encoding="utf-8", closefd=False) as stdin,
        open(streams[1], "w", encoding="utf-8", closefd=False) as stdout,
        open(streams[2], "w", encoding="utf-8", closefd=False, buffering=1) as stderr,
        mock.patch.object(sys, "stdin", stdin),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        match command:
            case ["python3", "train.py", *given]:
                sys.modules.pop("config_config", None)  # ml_collections reads every config file into this one module
                return train(given)
            case ["python3", "decode.py", *given]:
                return decode.main(given)
            case ["python3", "-m", module, *given] if module.startswith("transformer_jax."):
                package = importlib.util.find_spec(module).submodule_search_locations is not None
                return importlib.import_module(f"{module}.__main__" if package else module).main(given)
            case ["python3", script] if script.endswith(".py"):
                runpy.run_path(script, run_name="__main__")
                return 0
    raise ValueError(f"{' '.join(command)}: the tests don't know this command")
