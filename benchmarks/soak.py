"""Trains, kills, stops, resumes and translates for a while; then says whether anything grew or came out otherwise.

    python3 benchmarks/soak.py --minutes 30

Two runs of a small model on the built-in phrases, of the same seed. The first trains undisturbed for 40 % of the time;
the second is killed (kill -9) and stopped (SIGTERM, Ctrl-C) at random moments and resumed, and `decode.py` reads its
newest checkpoint now and then. Through all of it one `decode.py --stream` answers up to two lines a second. Memory,
open files and threads of the first run and of the stream are read from /proc (Linux) as soon as they have compiled what
they need: the first dev set is scored, each line was answered twice. The first third of these samples is compared with
the last: the median of the memory, and the smallest number of files and threads, which are more while a checkpoint is
written. The logs of the two runs have to be the same, to the last digit.

Exit status 1 if something grew by more than is allowed, a log differs, or a process ended otherwise than it should.
docs/survival.md has what it printed.
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

from transformer_jax.data.corpus import read_all
from transformer_jax.run_directory import SAMPLES, checkpoint_steps
from transformer_jax.training.journal import records

ROOT = pathlib.Path(__file__).resolve().parent.parent
TICK = 0.5  # seconds between two samples, and between two lines of the stream
GROWTH = 0.05  # allowed of memory; of open files and threads:
MORE = 1

CONFIG = """
from transformer_jax.config import *

def get_config():
    return Config(
        model=TransformerConfig(encoder_layers=1, decoder_layers=1, width=32, heads=2, feed_forward=64),
        data=DataConfig(
            train=("phrasebook:2000",),
            dev=("phrasebook:20",),
            max_length=64,
            tokenizer=TokenizerConfig(vocab=400),
            plan=PlanConfig(kind=PlanKind.PACKING, tokens=512, row_length=64),
        ),
        optimizer=OptimizerConfig(schedule=Schedule.INVERSE_SQRT, peak=3e-3, warmup=100, ema=0.99),
        run=RunConfig(steps=10_000_000, log_every=10, eval_every=200, checkpoint_every=50, keep=2, samples=0),
    )
"""

# What may come of each signal. Before Python has begun the program the system ends it, as kill -9 always does.
EXPECTED = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {143, -signal.SIGTERM},
    signal.SIGINT: {130, -signal.SIGINT},
}


class Sample(NamedTuple):
    megabytes: float  # resident
    files: int
    threads: int


def sample(process: int) -> Sample:
    directory = pathlib.Path(f"/proc/{process}")
    status = dict(line.split(":", 1) for line in (directory / "status").read_text().splitlines())
    files = len(os.listdir(directory / "fd"))
    return Sample(int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))


class Thirds(NamedTuple):
    """Of the first and of the last third of samples the median memory, and the fewest files and threads."""

    first: Sample
    last: Sample

    @classmethod
    def of(cls, samples: list[Sample]) -> "Thirds":
        third = max(1, len(samples) // 3)
        columns = [list(zip(*part, strict=True)) for part in (samples[:third], samples[-third:])]
        return cls(*(Sample(statistics.median(mb), min(files), min(threads)) for mb, files, threads in columns))

    def faults(self, name: str) -> list[str]:
        megabytes, *counts = (last - first for first, last in zip(self.first, self.last, strict=True))
        found = [f"{name}: memory grew by {megabytes:.1f} MB"] if megabytes > GROWTH * self.first.megabytes else []
        return found + [f"{name}: {more:g} more files or threads" for more in counts if more > MORE]


class Stream:
    """One `decode.py --stream` that is asked line after line."""

    def __init__(self, command: list[str], lines: list[str]):
        self.lines, self.asked, self.answered, self.samples = lines, 0, 0, list[Sample]()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        for _ in self.process.stdout or ():
            self.answered += 1

    def ask(self) -> None:
        """Asks for a line, if all are answered: lines that wait are translated together, in shapes that differ."""
        assert self.process.stdin
        if self.answered < self.asked:
            return
        self.process.stdin.write(self.lines[self.asked % len(self.lines)] + "\n")
        self.process.stdin.flush()
        self.asked += 1
        if self.answered > 2 * len(self.lines):
            self.samples.append(sample(self.process.pid))

    def close(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait()


class Soak:
    def __init__(self, directory: pathlib.Path, *, seconds: float, seed: int):
        self.directory, self.seconds, self.draw = directory, seconds, random.Random(seed)
        self.config = directory / "experiment.py"
        self.config.write_text(CONFIG)
        self.quiet, self.disturbed = directory / "quiet", directory / "disturbed"
        self.environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(directory / "programs")}
        self.statuses, self.faults, self.samples = dict[str, int](), list[str](), list[Sample]()
        self.lines = [pair.source for pair in read_all(["phrasebook:40"], source="en", target="de", split="test")]
        self.decoded = self.resumed = 0

    def train(self, workdir: pathlib.Path, *flags: str) -> subprocess.Popen:
        command = [sys.executable, "train.py", f"--config={self.config}", f"--workdir={workdir}", *flags]
        with open(workdir.with_suffix(".log"), "a") as log:
            return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def ended(self, name: str, status: int, expected: set[int]) -> None:
        key = f"{name}: exit status {status}"
        self.statuses[key] = self.statuses.get(key, 0) + 1
        if status not in expected:
            self.faults.append(f"{name}: exit status {status}, not one of {sorted(expected)}")

    def run(self) -> None:
        began = time.monotonic()
        quiet = self.train(self.quiet)
        while not checkpoint_steps(self.quiet) and quiet.poll() is None:
            time.sleep(TICK)
        decode = [sys.executable, str(ROOT / "decode.py"), "--stream", f"--model={self.quiet}"]
        stream = Stream(decode, self.lines)
        while time.monotonic() < began + 0.4 * self.seconds and quiet.poll() is None:
            stream.ask()
            if (self.quiet / SAMPLES).exists():
                self.samples.append(sample(quiet.pid))
            time.sleep(TICK)
        if quiet.poll() is not None:
            raise SystemExit(f"train.py ended: {self.quiet.with_suffix('.log').read_text()}")
        quiet.send_signal(signal.SIGTERM)
        self.ended("undisturbed train.py, SIGTERM at its end", quiet.wait(), {143})
        while time.monotonic() < began + self.seconds:
            self.disturb(stream)
        steps = checkpoint_steps(self.disturbed)[-1] + 20
        self.ended("train.py to its end", self.train(self.disturbed, f"--config.run.steps={steps}").wait(), {0})
        self.ended("decode.py --stream", stream.close(), {0})
        time.sleep(TICK)
        if stream.answered != stream.asked:
            self.faults.append(f"decode.py --stream: {stream.answered} answers to {stream.asked} lines")
        self.report(stream, steps)

    def disturb(self, stream: Stream) -> None:
        """Trains for a random time, translates with what is there, and ends it one way or another."""
        number = self.draw.choice(list(EXPECTED))
        train, end = self.train(self.disturbed), time.monotonic() + self.draw.uniform(0.5, 40)
        self.resumed += 1
        decode = self.draw.random() < 0.5
        while time.monotonic() < end and train.poll() is None:
            stream.ask()
            if decode and checkpoint_steps(self.disturbed) and time.monotonic() > end - 10:
                self.decode()
                decode = False
            time.sleep(TICK)
        train.send_signal(number)
        self.ended(f"train.py, {number.name}", train.wait(), EXPECTED[number])

    def decode(self) -> None:
        command = [sys.executable, "decode.py", f"--model={self.disturbed}", "--beam_size=1"]
        text = "".join(f"{line}\n" for line in self.lines[:3])
        done = subprocess.run(command, cwd=ROOT, env=self.environment, input=text, text=True, capture_output=True)
        self.ended("decode.py", done.returncode, {0})
        self.decoded += 1
        if done.stdout.count("\n") != 3:
            self.faults.append(f"decode.py: {done.stdout!r}, {done.stderr!r}")

    def report(self, stream: Stream, steps: int) -> None:
        compared, other = compare(self.quiet, self.disturbed)
        self.faults += [f"the logs differ at {key}" for key in other[:5]]
        if not compared or not self.samples or not stream.samples:
            raise SystemExit("too little time: there is nothing to compare. Give more --minutes.")
        print(f"{self.seconds / 60:g} minutes; {os.cpu_count()} CPU cores")
        for key, count in sorted(self.statuses.items()):
            print(f"    {count:4d} × {key}")
        print(f"    resumed {self.resumed} times up to step {steps:,}; {compared:,} lines of the logs compared")
        print(f"    {stream.asked:,} lines streamed, {stream.answered:,} answered; {self.decoded} × decode.py beside")
        print(f"\n{'first third → last':30}{'MB':>18}{'files':>12}{'threads':>12}{'samples':>10}")
        for name, samples in (("train.py", self.samples), ("decode.py --stream", stream.samples)):
            thirds = Thirds.of(samples)
            self.faults += thirds.faults(name)
            cells = [f"{a:.0f} → {b:.0f}" for a, b in zip(*thirds, strict=True)]
            print(f"{name:30}{cells[0]:>18}{cells[1]:>12}{cells[2]:>12}{len(samples):>10,}")
        print("\n" + ("\n".join(self.faults) or "nothing grew, nothing differs"))


def compare(quiet: pathlib.Path, disturbed: pathlib.Path) -> tuple[int, list[tuple]]:
    """How many lines both logs have, and those which differ in more than the time."""

    def lines(workdir: pathlib.Path) -> dict[tuple, dict]:
        return {
            (record["step"], record["split"]): {
                k: v for k, v in record.items() if k not in ("seconds", "tokens_per_second")
            }
            for record in records(workdir)
        }

    one, other = lines(quiet), lines(disturbed)
    last = max((step for step, _ in other), default=0) - 20  # its last line comes earlier than it would have
    both = [key for key in one.keys() | other.keys() if key[0] <= min(last, max(step for step, _ in one))]
    return len(both), sorted(key for key in both if one.get(key) != other.get(key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    # What a shell starts with & ignores SIGINT, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(directory, seconds=60 * options.minutes, seed=options.seed)
    soak.run()
    if soak.faults:
        print(f"what was written is in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
