"""The text of a run: tokenizer, training batches, and the pairs it is evaluated on."""

import dataclasses
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator

from transformer_jax import hosts
from transformer_jax.config import Config, DataConfig, Positions
from transformer_jax.data.corpus import Pair, Report, Split, fingerprint, read, read_all, within_limits
from transformer_jax.data.plan import Plan, make_plan, summary, weighted
from transformer_jax.data.store import PairIds, Store, build_store, open_store, store_in_memory
from transformer_jax.data.tokenizer import Tokenizer, make_tokenizer
from transformer_jax.errors import UserError
from transformer_jax.run_directory import STORE, checkpoint_steps, forget_tokenizer, has_parameters, tokenizer_path
from transformer_jax.training import provenance

Say = Callable[[str], None]
"""Prints a line for the user."""


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A dev or test set, small enough to be in memory."""

    pairs: list[Pair]  # are translated
    store: Store  # have a loss

    @property
    def sources(self) -> list[str]:
        return [pair.source for pair in self.pairs]

    @property
    def references(self) -> list[str]:
        return [pair.target for pair in self.pairs]


@dataclasses.dataclass(frozen=True)
class Corpora:
    tokenizer: Tokenizer
    store_of_epoch: Callable[[int], Store]
    plan: Plan
    dev: HeldOut


def prepare(config: Config, workdir: str | os.PathLike, *, say: Say) -> Corpora:
    """Reads, tokenises and plans; what the run directory already has is used again.

    Raises:
      UserError: for whatever is wrong with a corpus, the tokenizer or the plan; if the run has checkpoints and a corpus
        has other pairs than it was trained on.
    """
    data = config.data
    _check_readable(data, seed=config.run.seed)
    marks = _fingerprints(data, seed=config.run.seed)
    tokenizer = _tokenizer(data, workdir, marks, seed=config.run.seed)
    say(f"tokenizer: {_vocabulary(tokenizer)} pieces, sha256 {tokenizer.hash[:12]}")
    stores = EpochStores(data, tokenizer, pathlib.Path(workdir, STORE), marks, seed=config.run.seed, say=say)
    first = stores(0)
    origins = provenance.origins(data.train, marks, first)
    provenance.check_same_pairs(workdir, origins)
    hosts.by_first("corpora", lambda: provenance.record(workdir, origins))
    longest = data.max_length if data.tokenizer.sampling else None
    plan = make_plan(data.plan, first.lengths, longest=longest)
    say(summary(plan, first.lengths))
    if data.weights:
        plan = weighted(plan, first.sizes, data.weights)
        shares = zip(data.weights, first.sizes, strict=True)
        say("an epoch takes, by data.weights, " + " and ".join(f"{weight:g} × {size:,}" for weight, size in shares))
    # Without sampling it is the same in every epoch, whatever becomes of its files and of the corpora meanwhile.
    store_of_epoch = stores if data.tokenizer.sampling else lambda epoch: first
    return Corpora(tokenizer, store_of_epoch, plan, held_out(config, tokenizer, "dev", say=say))


def _check_readable(data: DataConfig, *, seed: int) -> None:
    """Finds a corpus that is not there at once, and not when its turn comes, which for `data.test` is the end."""
    splits: dict[Split, tuple[str, ...]] = {"train": data.train, "dev": data.dev, "test": data.test}
    for split, specs in splits.items():
        for spec in specs:
            fingerprint(spec, source=data.source, target=data.target, split=split, seed=seed)


def held_out(config: Config, tokenizer: Tokenizer, split: Split, *, say: Say) -> HeldOut:
    """All pairs of `data.dev` or `data.test`, however long, but that a model with a table of positions has no loss of
    longer ones."""
    data, seed, pairs = config.data, config.run.seed, []
    specs = data.dev if split == "dev" else data.test
    for spec in specs:
        report = Report(f"{split} {spec}", on_bad=data.bad_pairs)
        pairs += read(spec, source=data.source, target=data.target, split=split, seed=seed, report=report)
        say(str(report))
    ids: list[PairIds] = list(tokenizer.encode_pairs(pairs))
    if config.model.positions == Positions.LEARNED:
        ids = _within_table(ids, config.model.max_positions, split=split, say=say)
    return HeldOut(pairs, store_in_memory(ids))


def _within_table(ids: list[PairIds], positions: int, *, split: Split, say: Say) -> list[PairIds]:
    """The pairs which a table of so many positions has room for; the number of others is said."""
    fitting = [pair for pair in ids if max(map(len, pair)) <= positions]
    if len(fitting) < len(ids):
        say(f"{split}: {len(ids) - len(fitting):,} pairs longer than model.max_positions ({positions}) have no loss")
    if ids and not fitting:
        raise UserError(
            f"config.model.max_positions is {positions}, but all pairs of config.data.{split} are longer. Raise it, or "
            "give shorter ones."
        )
    return fitting


@dataclasses.dataclass(frozen=True)
class EpochStores:
    """The token store of each epoch: always the same one, unless subwords are sampled anew in every epoch.

    The store of epoch 0 stays, for the shapes of the plan follow from its lengths; of the others the last two do.
    Of several processes the first one builds it.
    """

    data: DataConfig
    tokenizer: Tokenizer
    directory: pathlib.Path
    marks: tuple[str, ...]  # the fingerprints of the training corpora when the run began or was resumed
    _: dataclasses.KW_ONLY
    seed: int
    say: Say

    def __call__(self, epoch: int) -> Store:
        sampling = self.data.tokenizer.sampling
        name = f"train-{epoch}" if sampling else "train"
        mark = self._fingerprint(epoch if sampling else 0)
        store = None
        if hosts.is_first():
            store = open_store(self.directory / name, mark) or self._build(name, mark, epoch)
        hosts.wait(f"store of epoch {epoch}")  # all have then read what is deleted here
        store = store or open_store(self.directory / name, mark)
        if store is None:
            raise UserError(
                f"{self.directory / name} is not made of the corpora that this process sees. All processes need the "
                "same --workdir and corpora, on disks that all of their machines see."
            )
        if hosts.is_first() and sampling and epoch > 2:
            shutil.rmtree(self.directory / f"train-{epoch - 2}", ignore_errors=True)
        return store

    def _build(self, name: str, mark: str, epoch: int) -> Store:
        data, reports, corpora = self.data, [], []
        self._check_unchanged()
        for number, spec in enumerate(data.train):
            reports.append(Report(f"train {spec}", on_bad=data.bad_pairs))
            corpora.append(self._ids(spec, reports[-1], seed=hash_seed(self.seed, epoch, number)))
        store = build_store(self.directory / name, *corpora, fingerprint=mark)
        for report in reports if epoch == 0 else ():
            self.say(str(report))
        return store

    def _ids(self, spec: str, report: Report, *, seed: int) -> Iterator[tuple[list[int], list[int]]]:
        data = self.data
        pairs = read(spec, source=data.source, target=data.target, split="train", seed=self.seed, report=report)
        ids = self.tokenizer.encode_pairs(pairs, sampling=data.tokenizer.sampling, seed=seed)
        return within_limits(ids, max_length=data.max_length, max_ratio=data.max_ratio, report=report)

    def _check_unchanged(self) -> None:
        for spec, before, now in zip(
            self.data.train, self.marks, _fingerprints(self.data, seed=self.seed), strict=True
        ):
            if before != now:
                raise UserError(
                    f"{spec} was changed while the run trains on it, and its subwords are to be drawn anew. Put it "
                    "back as it was; the same command resumes from the last checkpoint."
                )

    def _fingerprint(self, epoch: int) -> str:
        data = self.data
        limits = data.max_length, data.max_ratio, data.bad_pairs
        parts = (*self.marks, self.tokenizer.hash, *limits, data.tokenizer.sampling, epoch)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _fingerprints(data: DataConfig, *, seed: int) -> tuple[str, ...]:
    """Of each training corpus."""
    return tuple(
        fingerprint(spec, source=data.source, target=data.target, split="train", seed=seed) for spec in data.train
    )


def hash_seed(*numbers: int) -> int:
    """A seed of 31 bits that differs for other numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "big") >> 1


def _tokenizer(data: DataConfig, workdir: str | os.PathLike, marks: tuple[str, ...], *, seed: int) -> Tokenizer:
    """That of the run directory, which is made anew of corpora that changed before anything was trained with it."""
    path = tokenizer_path(workdir)

    def make() -> None:
        is_used = bool(checkpoint_steps(workdir)) or has_parameters(workdir)
        given = data.tokenizer.source_model or data.tokenizer.target_model
        if not is_used and (given or provenance.may_be_of_others(workdir, marks)):
            forget_tokenizer(workdir)
        if not path.exists() and is_used:
            raise UserError(
                f"{path}: missing, but there are parameters that were trained with it. Restore it, or train again in "
                "another --workdir."
            )
        if not path.exists():
            make_tokenizer(_training_pairs(data, seed=seed), data.tokenizer).save(path)

    hosts.by_first("tokenizer", make)
    return Tokenizer.load(path)


def _training_pairs(data: DataConfig, *, seed: int) -> Iterable[Pair]:
    report = Report("train", on_bad=data.bad_pairs)
    return read_all(data.train, source=data.source, target=data.target, split="train", seed=seed, report=report)


def _vocabulary(tokenizer: Tokenizer) -> str:
    if tokenizer.joint:
        return f"{tokenizer.source_vocab:,} joint"
    return f"{tokenizer.source_vocab:,} source and {tokenizer.target_vocab:,} target"
