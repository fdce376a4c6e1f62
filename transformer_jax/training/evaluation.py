"""How good a model is on a held-out set: loss, BLEU, chrF, exact match, and some translations to look at."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from transformer_jax import disk, hosts
from transformer_jax.config import SearchConfig
from transformer_jax.data.loader import evaluation_batches
from transformer_jax.decoding.quality import Quality, quality
from transformer_jax.decoding.translator import Translator, on_every_device
from transformer_jax.parallel import shard_batch, share, unshard
from transformer_jax.run_directory import SAMPLES
from transformer_jax.training import metrics
from transformer_jax.training.corpora import HeldOut
from transformer_jax.training.learner import Learner


@dataclasses.dataclass(frozen=True)
class Scores:
    """The figures of one evaluation."""

    figures: dict[str, float]  # loss, nll, perplexity, accuracy, of every token given the true ones before it
    quality: Quality
    exact_match: float  # part of the sentences that are the reference to the letter
    translations: list[str]

    def as_record(self) -> dict[str, float | str]:
        """For metrics.jsonl."""
        return self.figures | self.quality._asdict() | {"exact_match": self.exact_match}

    def as_metrics(self) -> dict[str, float]:
        """What checkpoints are chosen by."""
        return {"bleu": self.quality.bleu, "loss": self.figures["loss"]}


def evaluate(learner: Learner, params: Any, held_out: HeldOut, search: SearchConfig) -> Scores:
    """Loss over every token of the set, and the translations that `search` finds. The set is not empty."""
    translations, references = translated(learner, params, held_out.sources, search), held_out.references
    exact = sum(one == other for one, other in zip(translations, references, strict=True))
    return Scores(
        figures=mean_figures(learner, params, held_out),
        quality=quality(translations, references),
        exact_match=exact / len(references),
        translations=translations,
    )


def translated(learner: Learner, params: Any, sources: Sequence[str], search: SearchConfig) -> list[str]:
    """The best translation of each sentence. Each of several processes translates its share, with parameters of its
    own, and all get the result."""
    count = jax.process_count()
    if count > 1:
        params = on_every_device(unshard(params, learner.mesh))
    translator = Translator(learner.model, params, learner.tokenizer, max_length=learner.config.data.max_length)
    own = translator.best(sources[jax.process_index() :: count], search)
    hosts.wait("translations")  # some take longer than a collective of devices would wait
    translations = [""] * len(sources)
    for process, lines in enumerate(hosts.gathered(own)):
        translations[process::count] = lines
    return translations


def mean_figures(learner: Learner, params: Any, held_out: HeldOut) -> dict[str, float]:
    """The loss and its companions over every token of the set, each counted once."""
    total = None
    for batch in evaluation_batches(held_out.store, learner.config.data.plan, share=share(learner.mesh)):
        sums = learner.eval_step(params, shard_batch(batch, learner.mesh))
        total = metrics.add(total, jax.device_get(sums))
    assert total is not None, "a held-out set has at least one pair"
    return metrics.means(total)


def described(record: dict[str, Any]) -> str:
    """One line for people from what `Scores.as_record` gave."""
    names = ("loss", "perplexity", "accuracy")
    parts = [f"{name} {record[name]:.4g}" for name in names if name in record]
    parts += [f"BLEU {record['bleu']:.2f}", f"chrF {record['chrf']:.2f}", f"exact match {record['exact_match']:.1%}"]
    return ", ".join(parts)


def signatures(record: dict[str, Any]) -> str:
    """What the scores are to be compared by."""
    return f"BLEU {record['bleu_signature']}, chrF {record['chrf_signature']}"


def samples(held_out: HeldOut, translations: list[str], *, count: int) -> Iterator[str]:
    """`count` translations spread evenly over the set, with the reference where they differ."""
    every = max(1, len(translations) // max(count, 1))
    for number in range(0, len(translations), every)[:count]:
        pair, translation = held_out.pairs[number], translations[number]
        right = translation == pair.target
        yield f"  {pair.source}\n  → {translation}" + ("" if right else f"\n    (reference: {pair.target})")


def write_samples(workdir: str | os.PathLike, held_out: HeldOut, translations: list[str], *, step: int) -> None:
    """The whole set as source, tab, reference, tab, translation."""
    path = pathlib.Path(workdir, SAMPLES, f"{step}.tsv")
    lines = [f"{pair.source}\t{pair.target}\t{line}\n" for pair, line in zip(held_out.pairs, translations, strict=True)]
    disk.replace(path, "".join(lines).encode())
