"""Checkpoints of a run, by Orbax: written beside the training, there whole or not at all, and read whole or passed by.

A checkpoint has four items: `params`, `average` if the run keeps one, `training` (the rest of the state) and
`progress` (where in the data and in the evaluations the run stands); `metrics` are its scores on the dev set.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from transformer_jax import hosts
from transformer_jax.config import RunConfig
from transformer_jax.data.loader import Position
from transformer_jax.errors import UserError
from transformer_jax.run_directory import BROKEN, CHECKPOINTS, best_first, checkpoint_steps, read_scores, spaced
from transformer_jax.training.journal import Window
from transformer_jax.training.step import TrainState

DELETED = "deleted"  # where in `checkpoints/` those lie that are about to be

log = logging.getLogger(__name__)


class Progress(NamedTuple):
    """Where a run stands, apart from its state."""

    position: Position = Position(0, 0)  # of the batch that comes next
    best: float | None = None  # the best evaluation so far, by the metric of the run
    waited: int = 0  # evaluations since that one
    window: Window = Window()  # of the log


class Checkpoints:
    """The checkpoints of one run directory, for the one process (or several) that trains there.

    Kept are the newest `keep` (at least as many as are to be averaged, not counting one which an interrupt left
    close to another) and the best `keep_best` of those that were evaluated.
    """

    def __init__(self, workdir: str | os.PathLike, config: RunConfig):
        self.workdir = pathlib.Path(workdir).resolve()
        self.directory = self.workdir / CHECKPOINTS
        options = ocp.CheckpointManagerOptions(
            preservation_policy=Preservation(config),
            best_fn=lambda metrics: metrics[config.best.value],  # without one Orbax writes no metrics
            cleanup_tmp_directories=True,  # what a kill left half written
            todelete_subdir=DELETED,  # a rename: no reader, and no kill, meets one of which half is deleted
        )
        with _naming(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            if not os.access(self.directory, os.W_OK | os.X_OK):  # said before the training, and not after it
                raise PermissionError("Permission denied")
            hosts.by_first("scores", self._set_scores_aside)
            self.manager = ocp.CheckpointManager(self.directory, options=options)
        self._delete()  # what a kill left of it

    def save(self, state: TrainState, progress: Progress, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to save the state; older checkpoints go only when this one is whole. Waits for the save before.

        Raises:
          UserError: if it, or the one before, can't be written.
        """
        step = int(state.step)
        items: dict[str, Any] = {"params": ocp.args.StandardSave(state.params)}
        if state.average is not None:
            items["average"] = ocp.args.StandardSave(state.average)
        items["training"] = ocp.args.StandardSave(_rest(state))
        items["progress"] = ocp.args.JsonSave(progress._replace(window=progress.window.as_json())._asdict())
        self.wait()
        with _naming(self.directory):
            self.manager.save(step, args=ocp.args.Composite(**items), metrics=dict(metrics) if metrics else None)

    def restore(self, template: TrainState) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that can be read, or None if there is none at all.

        `template` is a state whose arrays, or `jax.ShapeDtypeStruct`s, say shape, dtype and sharding: the devices may
        be others than those it was saved from. A checkpoint that is newer but broken is set aside, and a warning names
        it.

        Raises:
          UserError: if there are checkpoints and none can be read.
        """
        broken = []
        for step in reversed(checkpoint_steps(self.workdir)):
            try:
                restored = self._restore(step, template)
            except Exception as error:  # whatever a damaged file makes Orbax and TensorStore raise
                if hosts.is_loss(error):
                    raise
                log.warning("%s: can't be read (%s)", self.directory / str(step), _first_line(error))
                broken.append(step)
                continue
            if broken:
                hosts.by_first("broken checkpoints", lambda: self._set_aside(broken))
                self.manager.reload()
            return restored
        if broken:
            raise UserError(
                f"{self.directory}: none of the checkpoints of steps {broken} can be read. Restore them from a "
                "backup, or train again in another --workdir."
            )
        return None

    def wait(self) -> None:
        """Returns when the last save is whole, and those that it replaces are deleted.

        Raises:
          UserError: if it can't be written.
        """
        with _naming(self.directory):
            self.manager.wait_until_finished()
        self._delete()

    def close(self) -> None:
        with _naming(self.directory):
            self.manager.close()
        self._delete()

    def _delete(self) -> None:
        if hosts.is_first():
            shutil.rmtree(self.directory / DELETED, ignore_errors=True)

    def _restore(self, step: int, template: TrainState) -> tuple[TrainState, Progress]:
        items = {"params": template.params, "training": _rest(template)}
        if template.average is not None:
            items["average"] = template.average
        arguments = {name: ocp.args.StandardRestore(_abstract(item)) for name, item in items.items()}
        found = self.manager.restore(step, args=ocp.args.Composite(**arguments, progress=ocp.args.JsonRestore()))
        rest = found["training"]
        state = TrainState(
            step=rest["step"],
            params=found["params"],
            opt_state=rest["opt_state"],
            average=found["average"] if template.average is not None else None,
            rng=rest["rng"],
        )
        jax.block_until_ready(state)
        fields = found["progress"]
        parts = {"position": Position(*fields["position"]), "window": Window.from_json(fields["window"])}
        return state, Progress(**{**fields, **parts})

    def _set_aside(self, steps: Sequence[int]) -> None:
        """Moves broken checkpoints out of the way of those that will be written in their place. None is deleted."""
        for step in steps:
            target = self._move_to_broken(self.directory / str(step), str(step))
            log.warning("the broken checkpoint of step %d is in %s", step, target)

    def _set_scores_aside(self) -> None:
        """Moves scores that can't be read out of the way: Orbax reads them all, and their checkpoint may be whole."""
        for step in checkpoint_steps(self.workdir):
            try:
                read_scores(self.workdir, step)
            except (OSError, ValueError) as error:
                target = self._move_to_broken(self.directory / str(step) / "metrics", f"{step}-metrics")
                log.warning(
                    "the scores of the checkpoint of step %d can't be read (%s); they are in %s",
                    step,
                    _first_line(error),
                    target,
                )

    def _move_to_broken(self, path: pathlib.Path, name: str) -> pathlib.Path:
        numbers = itertools.count(1)
        while (target := self.workdir / BROKEN / f"{name}-{next(numbers)}").exists():
            pass
        target.parent.mkdir(exist_ok=True)
        return path.rename(target)


@dataclasses.dataclass(frozen=True)
class Preservation(checkpoint_managers.PreservationPolicy):
    """Which checkpoints (Orbax' `PolicyCheckpointInfo`) stay when a new one is whole."""

    config: RunConfig

    def should_preserve(self, checkpoints: Sequence[Any], *, context) -> list[bool]:
        del context
        newest = spaced([info.step for info in checkpoints], self.config.checkpoint_every)
        kept = set(newest[: max(self.config.keep, self.config.average, 1)])
        metric = self.config.best
        scores = {info.step: info.metrics[metric.value] for info in checkpoints if info.metrics}
        kept |= set(best_first(scores, metric)[: self.config.keep_best])
        return [info.step in kept for info in checkpoints]


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state, "rng": state.rng}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@contextlib.contextmanager
def _naming(directory: pathlib.Path) -> Iterator[None]:
    """Errors of writing → a UserError that names the place."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # TensorStore's are ValueErrors
        raise UserError(
            f"{directory}: the checkpoint can't be written ({_first_line(error)}). The ones before are whole. "
            "Make room or mend the permissions there; the same command then resumes."
        ) from error


def _first_line(error: Exception) -> str:
    """What is wrong; of TensorStore's long errors what the system said."""
    if system := re.search(r": ([^:]+) \[os_error_code=", str(error)):
        return system[1]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.300}"
