"""The smallest training run: two sentences, six words to choose from, a few seconds.

*merci → thanks* and *je suis étudiant → i am a student*, trained by the library's own step until the model's
distributions are the targets, and then translated greedily and by beam search.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.batch import EOS
from transformer_jax.config import OptimizerConfig, Schedule, SearchConfig, TransformerConfig, Tying
from transformer_jax.data.subwords import SPACE
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.inspect.distributions import distributions_figure, divergences, target_distributions
from transformer_jax.inspect.small_run import SmallRun, train_small, word_tokenizer
from transformer_jax.inspect.style import COLOURS, WIDTH, blank, styled
from transformer_jax.inspect.trace import trace

PAIRS = (("merci", "thanks"), ("je suis étudiant", "i am a student"))
WORDS = ("a", "am", "i", "thanks", "student", "<eos>")  # the output vocabulary
MODEL = TransformerConfig(
    encoder_layers=1,
    decoder_layers=1,
    width=32,
    heads=2,
    feed_forward=64,
    tying=Tying.NONE,
    dropout=0.0,
    vocab_multiple=1,
)
OPTIMIZER = OptimizerConfig(schedule=Schedule.CONSTANT, peak=3e-3, warmup=20)


def toy_tokenizer() -> Tokenizer:
    """The tokenizer of both sentences: each word is a token."""
    return word_tokenizer(PAIRS)


def train_toy(*, steps: int = 150, label_smoothing: float = 0.0, seed: int = 0) -> SmallRun:
    """Trains the toy model on both pairs at each update."""
    optimizer = dataclasses.replace(OPTIMIZER, label_smoothing=label_smoothing)
    return train_small(PAIRS, MODEL, optimizer, steps=steps, rows=len(PAIRS), seed=seed)


def word_columns(tokenizer: Tokenizer) -> list[int]:
    """The ids of `WORDS`."""
    return [EOS if word == "<eos>" else tokenizer.target.piece_to_id(SPACE + word) for word in WORDS]


def learned(translator: Translator, source: str, target: str) -> Float[ndarray, "T V"]:
    """The model's distributions at each position of a target, over the whole vocabulary."""
    ids = translator.tokenizer.encode_source([source])[0], translator.tokenizer.encode_target([target])[0]
    return trace(translator.model, translator.params, *ids).probabilities


class Compared(NamedTuple):
    """Greedy against beam search of one source sentence."""

    greedy: Translation
    beam: list[Translation]


BEAM = SearchConfig(beam_size=2, top_beams=2, extra_length=4)
GREEDY = dataclasses.replace(BEAM, beam_size=1, top_beams=1)


def compare_searches(translator: Translator, source: str) -> Compared:
    """Greedy search, and a beam of 2 hypotheses of which both translations are returned."""
    return Compared(translator.translate([source], GREEDY)[0][0], translator.translate([source], BEAM)[0])


def toy_distributions_figure(run: SmallRun, *, label_smoothing: float = 0.0) -> Figure:
    """Target, untrained and trained distributions of *je suis étudiant → i am a student*, with their divergence."""
    source, target = PAIRS[1]
    tokenizer = run.trained.tokenizer
    ids = np.array(tokenizer.encode_target([target])[0])
    asked = target_distributions(ids, vocab=tokenizer.target_vocab, label_smoothing=label_smoothing)
    matrices, columns = {"target": asked}, word_columns(tokenizer)
    for name, translator in (("untrained", run.start), ("trained", run.trained)):
        found = learned(translator, source, target)
        matrices[f"{name}: KL {divergences(asked, found).mean():.3f}"] = found
    rows = [*target.split(), "<eos>"]
    return distributions_figure({name: matrix[:, columns] for name, matrix in matrices.items()}, rows, WORDS)


@styled
def toy_losses_figure(one_hot: SmallRun, smoothed: SmallRun) -> Figure:
    """Cross-entropy and KL divergence over the updates: the same for one-hot targets, apart for smoothed ones."""
    figure = blank(WIDTH, 2.5)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, run, title in zip(panels, (one_hot, smoothed), ("one-hot targets", "smoothed targets"), strict=True):
        updates = np.arange(1, len(run.divergence) + 1)
        axes.plot(updates, run.cross_entropy, color=COLOURS[1], linewidth=3, label="cross-entropy")
        axes.plot(updates, run.divergence, color=COLOURS[0], linestyle="--", label="KL divergence")
        entropy = float(run.cross_entropy[0] - run.divergence[0])
        label = f"entropy of the target: {entropy:.2f}"
        axes.axhline(entropy, color="black", linewidth=0.8, linestyle=":", label=label)
        axes.set(title=title, xlabel="update", ylim=(-0.05, None))
        axes.legend()
    panels[0].set_ylabel("nats a token")
    return figure
