"""What a run says while it trains: lines or a progress bar, metrics.jsonl, TensorBoard."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from transformer_jax import disk
from transformer_jax.config import Nonfinite, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.run_directory import METRICS
from transformer_jax.training import metrics
from transformer_jax.training.objective import Sums
from transformer_jax.training.step import StepReport
from transformer_jax.training.tensorboard import Board

MOST_SKIPPED = 10  # in a row: more are no bad batches among good ones, but parameters that are no good


class Window(NamedTuple):
    """Sums over the steps since the last line of the log. Saved with a checkpoint, so that the log goes on evenly."""

    sums: Sums | None = None
    source_tokens: int = 0
    skipped: int = 0  # steps without an update, since training began
    in_a_row: int = 0  # of those, the last ones without another between them

    def as_json(self) -> dict[str, Any]:
        sums = self.sums and {"loss": float(self.sums.loss), "weight": float(self.sums.weight)}
        terms = self.sums and {name: float(value) for name, value in self.sums.metrics.items()}
        return {**self._asdict(), "sums": sums and {**sums, "metrics": terms}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Window":
        return cls(**{**value, "sums": value["sums"] and metrics.add(None, Sums(**value["sums"]))})

    def emptied(self) -> "Window":
        return self._replace(sums=None, source_tokens=0)


class Journal:
    """Writes the log of a run from step `step` on, as if it had never stopped before.

    Only the first of several processes writes.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        run: RunConfig,
        *,
        step: int,
        window: Window,
        nonfinite: Nonfinite = Nonfinite.STOP,
    ):
        self.run, self.first_step, self.window, self.nonfinite = run, step, window, nonfinite
        self.path = pathlib.Path(workdir, METRICS)
        self.writes = jax.process_index() == 0
        self.started = self.clock = time.perf_counter()
        self.first_seconds = 0.0
        self.tokens_since = 0
        self.bar = tqdm(total=run.steps, initial=step, unit="step", dynamic_ncols=True, disable=not self._on_terminal())
        self.board = None
        if self.writes:
            forget_after(self.path, step)
            self.board = Board(workdir, first_step=step + 1) if run.tensorboard else None

    def _on_terminal(self) -> bool:
        return self.writes and sys.stderr.isatty()

    def say(self, line: str) -> None:
        if self.writes:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def step(self, step: int, report: StepReport, source_tokens: int) -> None:
        """Reads what an update reports (waiting for it), and writes a line where one is due.

        `source_tokens` are those of its batch.

        Raises:
          UserError: if the loss or its gradient is not finite, unless such steps are skipped and it is one of few.
        """
        report = jax.device_get(report)
        if math.isfinite(report.sums.loss) and math.isfinite(report.grad_norm):
            self.window = self.window._replace(sums=metrics.add(self.window.sums, report.sums), in_a_row=0)
        else:
            self._skip(step, report)
        self.window = self.window._replace(source_tokens=self.window.source_tokens + source_tokens)
        self.tokens_since += source_tokens + int(report.sums.weight)
        self.bar.update(step - self.bar.n)
        if step == self.first_step + 1:
            self._note_first_step(step)
        if step == 1 or step % self.run.log_every == 0 or step == self.run.steps:
            self._line(step, report)
            self.window = self.window.emptied()

    def evaluation(self, step: int, split: str, record: Mapping[str, float | str], text: str) -> None:
        self.say(f"{split} at step {step:,}: {text}")
        self._write(step, split, record, seconds=time.perf_counter() - self.started)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not training: it does not count for tokens/s."""
        before = time.perf_counter()
        yield
        self.clock += time.perf_counter() - before

    def close(self) -> None:
        self.bar.close()
        if self.board:
            self.board.close()

    def _skip(self, step: int, report: StepReport) -> None:
        """Counts a step that made no update; its sums are in no figure."""
        window = self.window._replace(skipped=self.window.skipped + 1, in_a_row=self.window.in_a_row + 1)
        found = f"step {step:,}: the loss is {float(report.sums.loss)} and the norm of its gradient "
        found += f"{float(report.grad_norm)}"
        if self.nonfinite == Nonfinite.STOP or window.in_a_row > MOST_SKIPPED:
            many = f", as in the {MOST_SKIPPED} steps before" if window.in_a_row > MOST_SKIPPED else ""
            advice = (
                "" if many else " If such steps are rare, --config.optimizer.nonfinite=skip makes no update in them."
            )
            raise UserError(
                f"{found}{many}. Nothing of this is saved; the same command resumes from the last checkpoint. Lower "
                f"optimizer.peak, raise optimizer.warmup or set optimizer.clip in a run of its own.{advice}"
            )
        self.window = window
        self.say(f"{found}; this step makes no update")

    def _note_first_step(self, step: int) -> None:
        self.first_seconds = time.perf_counter() - self.started
        self.say(
            f"step {step:,} took {self.first_seconds:.1f} s, of which most is compiling; each new shape compiles once"
        )
        self.clock, self.tokens_since = time.perf_counter(), 0

    def _line(self, step: int, report: StepReport) -> None:
        figures = {} if self.window.sums is None else metrics.means(self.window.sums)  # all were skipped
        figures |= {"learning_rate": float(report.learning_rate), "grad_norm": float(report.grad_norm)}
        figures |= {"skipped": self.window.skipped} if self.window.skipped else {}
        now = time.perf_counter()
        rate = self.tokens_since / max(now - self.clock, 1e-9)
        self.clock, self.tokens_since = now, 0
        text = " ".join(f"{short} {figures[name]:.4g}" for short, name in SHOWN.items() if name in figures)
        if rate:
            text += f" {rate:,.0f} tokens/s"
        if self.bar.disable:
            self.say(f"step {step:,}/{self.run.steps:,} {text}{self._time_left(step)}")
        else:
            self.bar.set_postfix_str(text)
        self._write(step, "train", figures, seconds=now - self.started, tokens_per_second=rate)

    def _time_left(self, step: int) -> str:
        done = step - self.first_step - 1  # the first one compiled
        if done < 1:
            return ""
        seconds = (time.perf_counter() - self.started - self.first_seconds) / done * (self.run.steps - step)
        return f", {tqdm.format_interval(seconds)} left"

    def _write(self, step: int, split: str, record: Mapping[str, float | str], **times: float) -> None:
        if not self.writes:
            return
        # JSON has no NaN and no infinity: a figure that is one is left out.
        record = {name: x for name, x in {**record, **times}.items() if isinstance(x, str) or math.isfinite(x)}
        with disk.writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "split": split, **record}) + "\n")
        if self.board:
            self.board.add(step, {f"{split}/{name}": x for name, x in record.items() if not isinstance(x, str)})


SHOWN = {"loss": "loss", "ppl": "perplexity", "acc": "accuracy", "lr": "learning_rate", "|g|": "grad_norm"}
SHOWN |= {"skipped": "skipped"}


def records(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a kill left half written is passed over."""
    path = pathlib.Path(workdir, METRICS)
    return list(_whole_records(path)) if path.exists() else []


def forget_after(path: pathlib.Path, step: int) -> None:
    """Removes the lines of later steps, which will be made again, and a half-written one."""
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in _whole_records(path) if record["step"] <= step]
        disk.replace(path, "".join(kept).encode())


def _whole_records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(record := json.loads(line), dict) and {"step", "split"} <= record.keys():
                yield record
