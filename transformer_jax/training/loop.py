"""A whole training run: `train(config, workdir)`, the same call to begin, to resume and to see how it ended."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax import hosts, run_directory
from transformer_jax.config import Config, Metric, RunConfig, to_json
from transformer_jax.config_check import check
from transformer_jax.data.loader import batches
from transformer_jax.errors import UserError
from transformer_jax.nn.stacks import stack_layers
from transformer_jax.parallel import shard, shard_batch, share
from transformer_jax.training import evaluation
from transformer_jax.training.checkpoint import Checkpoints, Progress
from transformer_jax.training.corpora import Corpora, held_out, prepare
from transformer_jax.training.evaluation import Scores
from transformer_jax.training.interruption import Interrupted, Interruption
from transformer_jax.training.journal import Journal, records
from transformer_jax.training.learner import Learner, evaluated_params, make_learner, size
from transformer_jax.training.lock import locked
from transformer_jax.training.step import TrainState


class Run(NamedTuple):
    """What a run works with."""

    config: Config
    workdir: str | os.PathLike
    corpora: Corpora
    learner: Learner
    checkpoints: Checkpoints
    journal: Journal


def train(config: Config, workdir: str | os.PathLike) -> None:
    """Trains until the run is finished, evaluates it, and says what to do next.

    Of several processes (`transformer_jax.hosts`) all call it, with the same config and a directory that all see.

    Raises:
      UserError: for whatever the user can mend: configuration, corpora, disk, divergence.
      Interrupted: after Ctrl-C or SIGTERM, when all is saved.
    """
    check(config)
    with locked(workdir):
        _train(config, workdir)


def _train(config: Config, workdir: str | os.PathLike) -> None:
    hosts.check_same("configuration", to_json(config))
    hosts.by_first("configuration", lambda: run_directory.adopt_config(workdir, config))
    hosts.check_same(f"view of {workdir}", _seen(workdir))
    corpora = prepare(config, workdir, say=_say)
    learner = make_learner(config, corpora.tokenizer)
    checkpoints = Checkpoints(workdir, config.run)
    state, progress = checkpoints.restore(learner.template) or (first_state(learner, workdir), Progress())
    step, finished = int(state.step), is_finished(config.run, int(state.step), progress)
    _say(f"model: {size(state.params):,} parameters, on {learner.mesh.size} × {jax.devices()[0].device_kind}")
    if finished:
        _say(f"{workdir}: this run is finished, at step {step:,}. For another one give another --workdir.")
    elif step:
        _say(f"resuming from the checkpoint of step {step:,}")
    journal = Journal(workdir, config.run, step=step, window=progress.window, nonfinite=config.optimizer.nonfinite)
    run = Run(config, workdir, corpora, learner, checkpoints, journal)
    together = True
    try:
        if not finished:
            with Interruption() as interruption:
                run_steps(run, state, progress, interruption)
                checkpoints.wait()  # here, where a signal does not cost the last checkpoint
            if signal := hosts.largest(interruption.signal or 0):
                raise Interrupted(signal, run_directory.checkpoint_steps(workdir)[-1])
        finish(run, repeat=finished)
    except Exception as error:
        together = isinstance(error, Interrupted) or jax.process_count() == 1
        raise
    finally:
        journal.close()
        if together:  # several processes wait for each other there
            checkpoints.close()  # when what is being saved is whole


def first_state(learner: Learner, workdir: str | os.PathLike) -> TrainState:
    """The state before the first update: with the parameters that lie in the run directory already, if some do.

    Raises:
      UserError: if they are not those of the configured model.
    """
    state = learner.init()
    if not run_directory.has_parameters(workdir):
        return state
    params = run_directory.load_parameters(workdir)
    if learner.config.model.scan:
        params = {**params, "params": stack_layers(params["params"])}
    found, expected = (jax.tree.map(lambda x: tuple(x.shape), tree) for tree in (params, state.params))
    if found != expected:
        raise UserError(
            f"{workdir}: the parameters there are not those of the configured model. Start from their configuration "
            f"(--config={workdir}/config.py if they were imported), or choose another --workdir."
        )
    _say(f"beginning with the parameters in {workdir}")
    copies = [shard(jax.tree.map(jnp.array, params), learner.mesh) for _ in range(2)]  # each is donated
    return state._replace(params=copies[0], average=None if state.average is None else copies[1])


def run_steps(run: Run, state: TrainState, progress: Progress, interruption: Interruption) -> None:
    """The training loop. The device computes a step while the report of the one before is read."""
    config, learner, journal = run.config, run.learner, run.journal
    step, unread = int(state.step), None
    own, agreed = share(learner.mesh, multiple=config.optimizer.accumulate), hosts.Agreement()
    data = batches(
        run.corpora.store_of_epoch,
        run.corpora.plan,
        seed=config.run.seed,
        start=progress.position,
        share=own,
    )
    for position, batch in data:
        on_devices = shard_batch(batch, learner.mesh, multiple=config.optimizer.accumulate)
        state, report = learner.train_step(state, on_devices)
        step += 1
        if unread:
            journal.step(*unread)
        source_tokens = int((batch.source_segments != 0).sum()) * own.count // len(own.parts)  # of all processes, about
        unread = step, report, source_tokens

        # Read once: one that comes later is heeded after the next step, which is saved. All processes heed it together.
        signal = agreed(interruption.signal or 0)
        evaluates = bool(run.corpora.dev.pairs) and _is_due(step, config.run.eval_every, config.run)
        saves = _is_due(step, config.run.checkpoint_every, config.run) or signal > 0
        if step == 1 or evaluates or saves:
            journal.step(*unread)  # a loss that is not finite ends the run here: its state is never saved
            unread = None
        progress = progress._replace(position=position, window=journal.window)
        scores = None
        if evaluates:
            with journal.pause():
                scores = evaluate_dev(run, state, step=step)
            progress, is_best = judged(progress, scores, config.run.best)
            saves = saves or is_best
        finished = is_finished(config.run, step, progress)
        if saves or finished:
            with journal.pause():
                run.checkpoints.save(state, progress, scores and scores.as_metrics())
        if finished:
            if step < config.run.steps:
                journal.say(f"stopping: no better {config.run.best} in the last {config.run.patience} evaluations")
            return
        if signal:
            run.checkpoints.wait()
            raise Interrupted(signal, step)


def is_finished(run: RunConfig, step: int, progress: Progress) -> bool:
    """Whether all steps are made, or the patience has run out."""
    return step >= run.steps or (run.patience is not None and progress.waited >= run.patience)


def judged(progress: Progress, scores: Scores, metric: Metric) -> tuple[Progress, bool]:
    """The progress after an evaluation, and whether it was the best so far."""
    score = scores.as_metrics()[metric.value]
    sign = 1 if run_directory.HIGHER_IS_BETTER[metric] else -1
    if not math.isnan(score) and (progress.best is None or sign * score > sign * progress.best):
        return progress._replace(best=score, waited=0), True
    return progress._replace(waited=progress.waited + 1), False


def evaluate_dev(run: Run, state: TrainState, *, step: int) -> Scores:
    """The scores of the dev set, logged, with some translations."""
    dev, journal = run.corpora.dev, run.journal
    scores = evaluation.evaluate(run.learner, evaluated_params(state), dev, run.config.dev_search)
    record = scores.as_record()
    signatures = "" if any(old["split"] == "dev" for old in records(run.workdir)) else evaluation.signatures(record)
    journal.evaluation(step, "dev", record, evaluation.described(record))
    if signatures:  # they stay the same, and are in every line of metrics.jsonl
        journal.say(f"  ({signatures})")
    for sample in evaluation.samples(dev, scores.translations, count=run.config.run.samples):
        journal.say(sample)
    if journal.writes:
        evaluation.write_samples(run.workdir, dev, scores.translations, step=step)
    return scores


def finish(run: Run, *, repeat: bool) -> None:
    """The final scores, made now or, to `repeat` them, read from the log; and the next command."""
    if run.config.data.test and not hosts.largest(is_tested(run)):
        evaluate_test(run)
    elif repeat:
        evaluated = [record for record in records(run.workdir) if "bleu" in record]
        for record in evaluated[-1:]:
            text = f"{evaluation.described(record)}\n  ({evaluation.signatures(record)})"
            run.journal.say(f"{record['split']} at step {record['step']:,}: {text}")
    example = (run.corpora.dev.sources or ["…"])[0]
    run.journal.say(f'Next:\n  echo "{example}" | python3 decode.py --model={run.workdir}')


def is_tested(run: Run) -> bool:
    """Whether the log has the score of these test corpora with the newest checkpoint."""
    last = run_directory.checkpoint_steps(run.workdir)[-1]
    return any(
        record["split"] == "test" and record["step"] == last and record.get("corpora") == _named(run.config.data.test)
        for record in records(run.workdir)
    )


def evaluate_test(run: Run) -> None:
    """Scores the test set once, with the average of the newest checkpoints and the final search."""
    config, journal = run.config, run.journal
    test = held_out(config, run.learner.tokenizer, "test", say=journal.say)
    steps = run_directory.checkpoint_steps(run.workdir)
    hosts.check_same(f"view of {run.workdir}", _seen(run.workdir))
    which = f"average:{min(config.run.average, len(run_directory.spaced(steps, config.run.checkpoint_every)))}"
    taken = ", ".join(str(step) for step in sorted(run_directory.choose_steps(run.workdir, which)))
    journal.say(f"final scores with the checkpoints of steps {taken}, beam {config.search.beam_size}:")
    params = shard(run_directory.load_parameters(run.workdir, which), run.learner.mesh)
    record = evaluation.evaluate(run.learner, params, test, config.search).as_record()
    text = f"{evaluation.described(record)}\n  ({evaluation.signatures(record)})"
    journal.evaluation(steps[-1], "test", record | {"checkpoints": taken, "corpora": _named(config.data.test)}, text)


def _named(corpora: Sequence[str]) -> str:
    return " ".join(corpora)


def _is_due(step: int, every: int, run: RunConfig) -> bool:
    return step % every == 0 or step == run.steps


def _seen(workdir: str | os.PathLike) -> str:
    """What decides how a run goes on."""
    return f"{pathlib.Path(workdir, run_directory.CONFIG).exists()} {run_directory.checkpoint_steps(workdir)}"


def _say(line: str) -> None:
    if hosts.is_first():
        print(line, flush=True)
