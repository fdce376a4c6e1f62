"""A run directory is a model: what lies in one, and how its parameters are read.

config.json      the configuration
tokenizer/       the tokenizer's files and their hashes
parameters.safetensors   what an imported run begins from, and all that an exported bundle has
checkpoints/     STEP/params, STEP/average if the run keeps one, STEP/training, STEP/progress, STEP/metrics
broken/          checkpoints which could not be read, set aside
corpora.json     which training corpora these are, and what is in them
store/           their token ids
samples/         STEP.tsv: source, reference and translation of the dev set
metrics.jsonl    one JSON object a line; beside it TensorBoard events
lock             held by the process that trains there, while it lives
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax import config as configs
from transformer_jax import disk
from transformer_jax.config import Config, Metric, Schedule, difference
from transformer_jax.config_check import check
from transformer_jax.errors import UserError
from transformer_jax.parameters import read_parameters

CONFIG, TOKENIZER, CHECKPOINTS, BROKEN, STORE = "config.json", "tokenizer", "checkpoints", "broken", "store"
LOCK, CORPORA = "lock", "corpora.json"
METRICS, SAMPLES, PARAMETERS = "metrics.jsonl", "samples", "parameters.safetensors"

LONGEST_CONFIG = 1_000_000  # bytes; usual are a few thousand

log = logging.getLogger(__name__)

HIGHER_IS_BETTER = {Metric.BLEU: True, Metric.LOSS: False}

Path = str | os.PathLike


def load_config(workdir: Path) -> Config:
    """The configuration of a run.

    Raises:
      UserError: if there is no run in `workdir`, or its config.json can't be read or is one that no run could have.
    """
    path = pathlib.Path(workdir, CONFIG)
    if not path.exists():
        raise UserError(
            f"{workdir}: no run here ({CONFIG} is missing). Train one with train.py, or give the directory of another."
        )
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST_CONFIG + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read ({error}). Restore it, or give another directory.") from error
    if len(content) > LONGEST_CONFIG:
        raise UserError(f"{path}: longer than {LONGEST_CONFIG:,} bytes, which no configuration is. Restore it.")
    config = configs.from_json(text, path=str(path))
    try:
        check(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config


def save_config(workdir: Path, config: Config) -> None:
    """Writes config.json, whole or not at all.

    Raises:
      UserError: if it can't be written.
    """
    disk.replace(pathlib.Path(workdir, CONFIG), configs.to_json(config).encode())


def adopt_config(workdir: Path, config: Config) -> None:
    """Makes `config` that of the run directory.

    Where nothing was trained yet the directory is begun anew. Else only the fields may be others which don't change
    what the run learns: how often it logs, what it keeps, how it searches; and `run.steps`, unless the learning rate
    depends on it.

    Raises:
      UserError: if other fields differ; it names them.
    """
    if pathlib.Path(workdir, CONFIG).exists():
        changes = difference(load_config(workdir), config)
        fixed = [change for change in changes if not _is_free(change.partition(":")[0], config)]
        if has_parameters(workdir):
            _refuse_another_model(workdir, changes)
            fixed = fixed if checkpoint_steps(workdir) else []
        if fixed and checkpoint_steps(workdir):
            raise UserError(
                f"{workdir} holds a run with another configuration (there → here):\n  "
                + "\n  ".join(fixed)
                + "\nChoose another --workdir, or go back to the configuration there."
            )
        if fixed:
            forget_tokenizer(workdir)
    save_config(workdir, config)


def forget_tokenizer(workdir: Path) -> None:
    """It goes whole: a kill must not leave half of one under its name."""
    path = tokenizer_path(workdir)
    if path.exists():
        unfinished = path.with_name(path.name + disk.UNFINISHED)
        with disk.writing(path):
            shutil.rmtree(unfinished, ignore_errors=True)
            path.rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def clear_unfinished(workdir: Path) -> None:
    """Removes what a run that was killed had not finished writing. Only for who holds the lock of the directory."""
    directory = pathlib.Path(workdir)
    named = [directory / f"{name}{disk.UNFINISHED}" for name in (CONFIG, CORPORA, METRICS, TOKENIZER)]
    for path in [
        *named,
        *directory.glob(f"{SAMPLES}/*{disk.UNFINISHED}"),
        *directory.glob(f"{STORE}/*{disk.UNFINISHED}"),
    ]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


FREE_FIELDS = {
    *("run.log_every", "run.eval_every", "run.checkpoint_every", "run.keep", "run.keep_best", "run.patience"),
    *("run.samples", "run.average", "run.tensorboard", "data.test", "optimizer.nonfinite"),
    *("mesh.data", "mesh.fsdp", "mesh.tensor"),
}


DROPOUTS = {"model.dropout", "model.attention_dropout", "model.feed_forward_dropout"}


def _refuse_another_model(workdir: Path, changes: Sequence[str]) -> None:
    """Parameters that are there already belong to one model and one tokenizer."""
    fixed = [change for change in changes if change.startswith(("model.", "data.tokenizer."))]
    fixed = [change for change in fixed if change.partition(":")[0] not in {*DROPOUTS, "data.tokenizer.sampling"}]
    if fixed:
        raise UserError(
            f"{workdir} holds the parameters of another model (there → here):\n  "
            + "\n  ".join(fixed)
            + f"\nStart from its own configuration, or choose another --workdir. An imported model has one: "
            f"--config={workdir}/config.py."
        )


def _is_free(field: str, config: Config) -> bool:
    if field == "run.steps":
        return config.optimizer.schedule != Schedule.COSINE
    return field in FREE_FIELDS or field.startswith(("search.", "dev_search."))


def tokenizer_path(workdir: Path) -> pathlib.Path:
    return pathlib.Path(workdir, TOKENIZER)


def has_parameters(workdir: Path) -> bool:
    """Whether there is a file of parameters, which an import or an export of a bundle wrote."""
    return pathlib.Path(workdir, PARAMETERS).exists()


def checkpoint_steps(workdir: Path) -> list[int]:
    """The steps of the whole checkpoints, in order. One that is still being written has another name."""
    directory = pathlib.Path(workdir, CHECKPOINTS)
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal()) if directory.exists() else []


def checkpoint_score(workdir: Path, step: int, metric: Metric) -> float | None:
    """What the checkpoint scored on the dev set; None where it was not evaluated."""
    try:
        return read_scores(workdir, step).get(metric.value)
    except (OSError, ValueError) as error:
        log.warning("%s: the scores of the checkpoint of step %d can't be read (%s)", workdir, step, error)
        return None


def read_scores(workdir: Path, step: int) -> dict[str, float]:
    """What the checkpoint scored on the dev set, by metric; nothing where it was not evaluated.

    Raises:
      OSError, ValueError: if they can't be read.
    """
    try:
        scores = json.loads((_checkpoint(workdir, step) / "metrics" / "metrics").read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(scores, dict):
        raise ValueError("not an object of JSON")
    return scores


def spaced(steps: Sequence[int], gap: int) -> list[int]:
    """The newest step, then going back each that lies at least gap / 2 before the one last taken; newest first.

    A checkpoint saved on an interrupt just after a regular one is nearly its duplicate, and averaging duplicates is
    no averaging.
    """
    taken: list[int] = []
    for step in sorted(steps, reverse=True):
        if not taken or taken[-1] - step >= gap / 2:
            taken.append(step)
    return taken


def choose_steps(workdir: Path, which: str) -> list[int]:
    """The checkpoints that `last`, `best`, a step, `average:N` or `average-best:N` stand for, newest or best first.

    Raises:
      UserError: if they aren't there, or `which` is none of these.
    """
    steps = checkpoint_steps(workdir)
    if not steps:
        raise UserError(f"{workdir}: no checkpoint here yet. Train with --workdir={workdir}.")
    if which.isdecimal():
        if int(which) not in steps:
            raise UserError(f"{workdir} has no checkpoint of step {which}; it has {_listed(steps)}.")
        return [int(which)]
    kind, _, number = which.partition(":")
    if which not in ("last", "best") and not (
        kind in ("average", "average-best") and number.isdecimal() and int(number)
    ):
        raise UserError(f"checkpoint is {which!r}; expected last, best, a step, average:N or average-best:N.")
    config = load_config(workdir).run
    found = _evaluated(workdir, steps, config.best) if "best" in kind else spaced(steps, config.checkpoint_every)
    count = int(number or 1)
    if len(found) < count:
        raise UserError(
            f"{workdir} has {len(found)} checkpoints for {which}: {_listed(sorted(found))}. "
            "Ask for fewer or for `last`, or keep more with --config.run.keep and --config.run.keep_best."
        )
    return found[:count]


def load_parameters(workdir: Path, which: str = "last") -> Any:
    """The parameters (NumPy) of a checkpoint, or the mean of several: see `choose_steps`.

    A bundle, and an imported model that was not trained further, has no checkpoint but one file: `last` and `best` are
    that. Where the run keeps a moving average of its parameters, that is what is read. If the last checkpoint is
    broken, the one before is taken, with a warning. If a run that is being trained there deletes what is being read,
    it is chosen anew from those that are there then.

    Raises:
      UserError: if the checkpoints aren't there or can't be read.
    """
    if has_parameters(workdir) and which in ("last", "best") and not checkpoint_steps(workdir):
        return read_parameters(pathlib.Path(workdir, PARAMETERS))
    while True:
        before = checkpoint_steps(workdir)
        try:
            return _last_whole(workdir) if which == "last" else _mean_of(workdir, choose_steps(workdir, which))
        except UserError:
            if set(before) <= set(checkpoint_steps(workdir)):
                raise


def _mean_of(workdir: Path, steps: Sequence[int]) -> Any:
    if len(steps) > 1:
        log.info("averaging the checkpoints of steps %s", _listed(sorted(steps)))
    return mean([_read(workdir, step) for step in steps])


def mean(trees: Sequence[Any]) -> Any:
    """The mean of each parameter, added up in float64."""
    if len(trees) == 1:
        return trees[0]
    return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64).astype(leaves[0].dtype), *trees)


def _last_whole(workdir: Path) -> Any:
    steps = checkpoint_steps(workdir) or choose_steps(workdir, "last")  # which says that there is none
    newest = steps[-1]
    for step in reversed(steps):
        try:
            params = _read(workdir, step)
        except UserError:
            if step in checkpoint_steps(workdir):
                continue
            raise  # it is not broken, but deleted
        if step != newest:
            log.warning("%s: the checkpoint of step %d is broken; using that of step %d", workdir, newest, step)
        return params
    return _read(workdir, newest)  # all are broken: say so of the newest


def _read(workdir: Path, step: int) -> Any:
    # Imported here because it costs a third of a second which runs without a checkpoint need not pay.
    import orbax.checkpoint as ocp

    path = _checkpoint(workdir, step).resolve()
    item = path / ("average" if (path / "average").exists() else "params")
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = dict(checkpointer.metadata(item).item_metadata.tree)
            to_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return checkpointer.restore(item, restore_args=to_numpy)
    except Exception as error:  # whatever a damaged file makes Orbax and TensorStore raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        raise UserError(
            f"{item}: the checkpoint can't be read ({reason}). "
            f"Use another: {_listed(checkpoint_steps(workdir))} are here."
        ) from error


def _evaluated(workdir: Path, steps: Sequence[int], metric: Metric) -> list[int]:
    """The evaluated steps, the best first."""
    scores = {step: checkpoint_score(workdir, step, metric) for step in steps}
    return best_first({step: score for step, score in scores.items() if score is not None}, metric)


def best_first(scores: Mapping[int, float], metric: Metric) -> list[int]:
    """The steps by their score, the best first, and of equals the older. One whose score is NaN is not among them."""
    sign = -1 if HIGHER_IS_BETTER[metric] else 1
    numbers = [step for step in scores if not math.isnan(scores[step])]
    return sorted(numbers, key=lambda step: (sign * scores[step], step))


def _checkpoint(workdir: Path, step: int) -> pathlib.Path:
    return pathlib.Path(workdir, CHECKPOINTS, str(step))


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in steps) or "none"
