"""What does *it* refer to? A model trained on sentences which it can translate only if it knows.

    The animal didn't cross the street because it was too tired → …, weil das Tier zu müde war
    The animal didn't cross the street because it was too wide → …, weil die Straße zu breit war

The last word says whether *it* is the animal or the street, and the translation names it. So a model that translates
sentences which it has not met resolves the pronoun, and one can look where.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from matplotlib.figure import Figure

from transformer_jax.config import OptimizerConfig, Schedule, SearchConfig, TransformerConfig, Tying
from transformer_jax.inspect.links import Example, Link, examples, marked
from transformer_jax.inspect.small_run import SmallRun, train_small
from transformer_jax.inspect.style import WIDTH, blank, colour_bar, heat_map, styled

SENTENCE = "The animal didn't cross the street because it was too tired"
OTHER = "The animal didn't cross the street because it was too wide"
HELD_OUT = 15  # per cent of the sentences

# English, German, gender
ANIMALS = (
    *(("animal", "Tier", "n"), ("dog", "Hund", "m"), ("cat", "Katze", "f"), ("horse", "Pferd", "n")),
    *(("cow", "Kuh", "f"), ("bird", "Vogel", "m"), ("mouse", "Maus", "f"), ("sheep", "Schaf", "n")),
    *(("fox", "Fuchs", "m"), ("goat", "Ziege", "f"), ("bear", "Bär", "m"), ("pig", "Schwein", "n")),
)
PLACES = (
    *(("street", "Straße", "f"), ("river", "Fluss", "m"), ("field", "Feld", "n"), ("bridge", "Brücke", "f")),
    *(("path", "Weg", "m"), ("ice", "Eis", "n"), ("meadow", "Wiese", "f"), ("square", "Platz", "m")),
    *(("ford", "Furt", "f"), ("moor", "Moor", "n")),
)
OF_ANIMALS = (
    *(("tired", "müde"), ("hungry", "hungrig"), ("ill", "krank"), ("old", "alt"), ("shy", "scheu")),
    *(("lazy", "faul"), ("weak", "schwach"), ("frightened", "verängstigt")),
)
OF_PLACES = (
    *(("wide", "breit"), ("wet", "nass"), ("slippery", "glatt"), ("busy", "belebt"), ("cold", "kalt")),
    *(("steep", "steil"), ("muddy", "schlammig"), ("dark", "dunkel")),
)
VERBS = (("cross", "überquerte"), ("enter", "betrat"), ("leave", "verließ"))
NOMINATIVE = {"m": "Der", "f": "Die", "n": "Das"}
ACCUSATIVE = {"m": "den", "f": "die", "n": "das"}

MODEL = TransformerConfig(
    encoder_layers=2,
    decoder_layers=2,
    width=64,
    heads=1,  # so that there is one place to look at in each layer
    feed_forward=128,
    tying=Tying.NONE,
    dropout=0.0,
    vocab_multiple=1,
)
OPTIMIZER = OptimizerConfig(schedule=Schedule.COSINE, peak=3e-3, warmup=50, label_smoothing=0.0)


class Lesson(NamedTuple):
    """A sentence, its translation, and what *it* stands for, in two places."""

    source: str
    target: str
    pronoun: Link  # from *it*, in the encoder
    noun: Link  # from the noun that the decoder writes for it, to the encoder


def lessons() -> list[Lesson]:
    """Every sentence that can be made."""
    reasons = [(reason, True) for reason in OF_ANIMALS] + [(reason, False) for reason in OF_PLACES]
    return [_lesson(*drawn) for drawn in itertools.product(ANIMALS, VERBS, PLACES, reasons)]


def _lesson(animal, verb, place, reason) -> Lesson:
    (cause, grund), of_animal = reason
    roles = ("key", "rival") if of_animal else ("rival", "key")
    start = f"The [{roles[0]} {animal[0]}] didn't {verb[0]} the [{roles[1]} {place[0]}] because"
    subject, thing = f"{NOMINATIVE[animal[2]]} {animal[1]}", f"{ACCUSATIVE[place[2]]} {place[1]}"
    _, noun, gender = animal if of_animal else place
    end = f"{NOMINATIVE[gender].lower()} [query {noun}] zu {grund} war"
    pronoun = marked(f"{start} [query it] was too {cause}")
    named = marked(f"{start} it was too {cause}", f"{subject} {verb[1]} {thing} nicht, weil {end}")
    return Lesson(named.source, named.target or "", pronoun, named)


def is_held_out(lesson: Lesson) -> bool:
    """Whether it is kept from training: the two sentences above, and others by a hash of their text."""
    bucket = int.from_bytes(hashlib.blake2b(lesson.source.encode(), digest_size=8).digest()) % 100
    return lesson.source in (SENTENCE, OTHER) or bucket < HELD_OUT


def train_animal(*, steps: int = 700, seed: int = 0) -> SmallRun:
    """A model of 2 + 2 layers, trained on the sentences that are not held out."""
    pairs = [(lesson.source, lesson.target) for lesson in lessons() if not is_held_out(lesson)]
    return train_small(pairs, MODEL, OPTIMIZER, steps=steps, rows=64, seed=seed)


def resolved(run: SmallRun, asked: Sequence[Lesson]) -> float:
    """The share of the sentences that are translated right, with the noun that *it* stands for."""
    found = run.trained.best([lesson.source for lesson in asked], SearchConfig(beam_size=1, extra_length=4))
    return sum(text == lesson.target for text, lesson in zip(found, asked, strict=True)) / len(asked)


def link_examples(run: SmallRun, asked: Sequence[Lesson], which: Literal["pronoun", "noun"]) -> list[Example]:
    """The attention of the trained model on one of the two links of each lesson."""
    links = [lesson.pronoun if which == "pronoun" else lesson.noun for lesson in asked]
    return examples(run.trained.model, run.trained.params, run.trained.tokenizer, links)


@styled
def reference_figure(run: SmallRun) -> Figure:
    """Where every head of the decoder looks in the source when it names what *it* is, in the two sentences."""
    asked = [lesson for text in (SENTENCE, OTHER) for lesson in lessons() if lesson.source == text]
    found = link_examples(run, asked, "noun")
    figure = blank(WIDTH, 4.2)
    panels = figure.subplots(2, 1)
    layers, heads = found[0].weights.shape[:2]
    rows = [f"layer {layer}, head {head}" for layer in range(layers) for head in range(heads)]
    for axes, lesson, one in zip(panels, asked, found, strict=True):
        weights = one.weights[:, :, one.query[0]].reshape(layers * heads, -1)
        heat_map(axes, weights, rows=rows, columns=[*lesson.source.split(), "<eos>"])
        start, _, end = lesson.target.rpartition(lesson.target[slice(*lesson.noun.query)])
        axes.set_xlabel(f"{start}[ {lesson.target[slice(*lesson.noun.query)]} ]{end}")
    colour_bar(list(panels), "weight, writing the word in brackets")
    return figure
