"""Commands of this project, each in a process of its own that starts at once.

A server imports everything and touches no device; each command is a fork of it. So a process costs what it does, and
not the seconds of CPU that the imports take.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

SERVER = """
import json, os, sys

import orbax.checkpoint, sacrebleu, tensorboardX.event_file_writer
import decode, train

def command(request):
    os.setsid()
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(output, 1), os.dup2(output, 2)
    exec(request["before"], {"workdir": request["workdir"]})
    if request["command"] == "train":
        train.heed_sigterm()
        return train.main(["train.py", *request["flags"]])
    return decode.main(request["flags"])

running = set()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        running.remove(request["wait"])
        continue
    child = os.fork()
    if not child:
        sys.exit(command(request))
    print(child, flush=True)
    running.add(child)
for child in running:
    os.kill(child, 9)
"""


class Process(NamedTuple):
    """A command that runs. Its standard output and error are in one file."""

    server: "Server"
    id: int
    output_file: pathlib.Path

    @property
    def output(self) -> str:
        return self.output_file.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit status, or minus the signal that ended it."""
        return self.server.ask(wait=self.id)

    def signal(self, number: int) -> None:
        os.kill(self.id, number)

    def has_said(self, text: str, *, seconds: float = 60) -> None:
        """Returns when the output has the text."""
        end = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output}"
            time.sleep(0.01)


class Server:
    def __init__(self, outputs: pathlib.Path):
        self.outputs = outputs
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.numbers = itertools.count(1)

    def ask(self, **request: object) -> int:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, command: str, *flags: str, workdir: pathlib.Path, before: str = "") -> Process:
        """`train` with these flags and --workdir, or `decode` with --model. `before` is a program that comes first."""
        output = self.outputs / f"{workdir.name}-{next(self.numbers)}"
        output.touch()
        place = f"--workdir={workdir}" if command == "train" else f"--model={workdir}"
        request = {"command": command, "flags": [*flags, place], "before": before, "output": str(output)}
        return Process(self, self.ask(**request, workdir=str(workdir)), output)

    def close(self) -> None:
        """Ends what still runs."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
