"""Which head links a word to the one it depends on: every head, scored on sentences whose links are known.

A link is a place that asks (a pronoun), one that answers it (its antecedent) and, where there is one, a rival that
could as well. Heads are chosen on one half of the sentences and reported on the other, and beside them stands what
looking a fixed number of tokens back would get: a head that does no better has learned a distance, not a link.

    python3 -m transformer_jax.inspect.links --model runs/multi30k --links gender
"""

import argparse
import functools
import itertools
import random
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.batch import Batch, unpacked
from transformer_jax.data.subwords import SPACE
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.inspect.labels import source_labels, target_labels
from transformer_jax.inspect.style import WIDTH, blank, colour_bar, heat_map, styled
from transformer_jax.nn.transformer import AttentionWeights, Transformer

Places = tuple[int, ...]  # of tokens


class Link(NamedTuple):
    """A sentence, and the characters [start, end) of the words in question.

    With a `target` it is a link of the decoder to the encoder: `query` are characters of the target, and what counts
    is where the decoder looks when it predicts them.
    """

    source: str
    query: tuple[int, int]
    key: tuple[int, int]
    rival: tuple[int, int] | None
    target: str | None = None


class Example(NamedTuple):
    """The attention weights [L, N, T, S] of a sentence, and the places of its link."""

    weights: ndarray
    query: Places
    key: Places
    rival: Places
    own: Places  # keys that are the query itself


class HeadScores(NamedTuple):
    """Of each head [L, N], over the links."""

    weight: ndarray  # mean of what the key gets of the query's attention
    top: ndarray  # share of the links whose key gets more than any other token but the query itself
    preference: ndarray  # share of the links whose key gets more than the rival; chance is 0.5. NaN without rivals


def marked(source: str, target: str | None = None) -> Link:
    """A link from a sentence with `[query his]`, `[key man]` and perhaps `[rival woman]` in it.

    With a target the query is marked there.
    """
    plain, spans = _unmarked(source)
    plain_target, target_spans = _unmarked(target or "")
    spans |= target_spans
    if "query" not in spans or "key" not in spans:
        raise UserError(f"no link in {source!r}: mark both words, as in 'a [key man] holds [query his] hat'.")
    return Link(plain, spans["query"], spans["key"], spans.get("rival"), plain_target if target else None)


def _unmarked(text: str) -> tuple[str, dict[str, tuple[int, int]]]:
    plain, spans, end = "", {}, 0
    for match in re.finditer(r"\[(query|key|rival) ([^\]]*)\]", text):
        plain += text[end : match.start()]
        spans[match[1]] = len(plain), len(plain) + len(match[2])
        plain, end = plain + match[2], match.end()
    return plain + text[end:], spans


def token_places(labels: Sequence[str], span: tuple[int, int] | None) -> Places:
    """The tokens which have characters of [start, end) of the text that the labels spell."""
    if span is None:
        return ()
    ends = list(itertools.accumulate(map(len, labels), initial=-1 if labels[0].startswith(SPACE) else 0))
    return tuple(
        place
        for place, (start, end) in enumerate(itertools.pairwise(ends))
        if start + labels[place].startswith(SPACE) < span[1] and end > span[0] and labels[place] != SPACE
    )


def examples(model: Transformer, params: Any, tokenizer: Tokenizer, links: Iterable[Link]) -> list[Example]:
    """The weights on each sentence: the encoder's on itself, or the decoder's on the encoder if there is a target.

    The model is run once for each pair of lengths.
    """
    groups: dict[tuple[int, int], list[tuple[list[int], list[int], Link]]] = {}
    for link in links:
        source = tokenizer.encode_source([link.source])[0]
        target = tokenizer.encode_target([link.target or ""])[0]
        groups.setdefault((len(source), len(target)), []).append((source, target, link))
    found = []
    for group in groups.values():
        batch = unpacked(*(jnp.asarray([one[side] for one in group], jnp.int32) for side in (0, 1)))
        encoder, _, cross = jax.device_get(_attention_weights(model, params, batch))
        for row, one in enumerate(group):
            found.append(_example(cross[row] if one[2].target else encoder[row], tokenizer, *one))
    return found


def _example(weights, tokenizer: Tokenizer, source: list[int], target: list[int], link: Link) -> Example:
    labels = source_labels(tokenizer, source)
    key, rival = token_places(labels, link.key), token_places(labels, link.rival)
    if link.target:
        return Example(weights, token_places(target_labels(tokenizer, target), link.query), key, rival, own=())
    query = token_places(labels, link.query)
    return Example(weights, query, key, rival, own=query)


@functools.partial(jax.jit, static_argnums=0)
def _attention_weights(model: Transformer, params: Any, batch: Batch) -> AttentionWeights:
    return model.apply(params, batch, method="attention_weights")  # type: ignore[return-value]


def link_weights(weights: Float[ndarray, "L N T S"], query: Places, key: Places) -> Float[ndarray, "L N"]:
    """What the tokens of the key get together, of the attention of the query's tokens in the mean."""
    return weights[:, :, list(query)][..., list(key)].sum(axis=-1).mean(axis=-1)


def score_heads(examples: Sequence[Example]) -> HeadScores:
    """Every head on every link."""
    weight = np.stack([link_weights(one.weights, one.query, one.key) for one in examples])
    others = np.stack([_best_other(one) for one in examples])
    with_rival = [number for number, one in enumerate(examples) if one.rival]
    rivals = [link_weights(examples[n].weights, examples[n].query, examples[n].rival) for n in with_rival]
    preference = (weight[with_rival] > np.stack(rivals)).mean(axis=0) if rivals else np.full(weight.shape[1:], np.nan)
    return HeadScores(weight.mean(axis=0), (weight > others).mean(axis=0), preference)


def _best_other(one: Example) -> Float[ndarray, "L N"]:
    """The most that a token gets which is neither of the query nor of the key."""
    others = [place for place in range(one.weights.shape[-1]) if place not in (*one.own, *one.key)]
    return one.weights[:, :, list(one.query)].mean(axis=2)[..., others].max(axis=-1)


class Chosen(NamedTuple):
    """The best head of one half of the links, and its scores on the other half."""

    layer: int
    head: int
    weight: float
    top: float
    preference: float
    by_distance: float  # the share of keys that stand at the distance which is the commonest in the first half
    links: int  # in the second half


def choose_head(examples: Sequence[Example], *, seed: int = 0) -> Chosen:
    """Chooses by preference where there are rivals, or else by top; of equals the one with more weight."""
    mixed = random.Random(seed).sample(list(examples), len(examples))
    first, second = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    scores, final = score_heads(first), score_heads(second)
    measure = scores.top if np.isnan(scores.preference).all() else scores.preference
    layer, head = np.unravel_index(np.argmax(measure + 1e-6 * scores.weight), measure.shape)
    figures = (float(field[layer, head]) for field in final)
    return Chosen(int(layer), int(head), *figures, by_distance=by_distance(first, second), links=len(second))


def by_distance(known: Sequence[Example], asked: Sequence[Example]) -> float:
    """How many keys one finds by going the commonest distance of the known links."""
    distances = [one.key[-1] - one.query[0] for one in known]
    commonest = max(set(distances), key=lambda distance: (distances.count(distance), distance))
    return sum(one.query[0] + commonest in one.key for one in asked) / len(asked)


def gender_links(count: int = 400, *, seed: int = 0) -> list[Link]:
    """English sentences with a pronoun whose gender fits one of two nouns, in either order:

    a [key man] behind a [rival woman] is holding [query his] bag .

    Both pronouns come with both orders alike, so that no distance is right in more than half of them.
    """
    nouns = (("man", "woman"), ("boy", "girl"), ("guy", "lady"))
    relations = ("behind", "next to", "with", "and", "beside", "in front of", "near")
    actions = ("is holding", "is carrying", "is showing", "is fixing", "is holding up")
    things = ("bag", "hat", "camera", "bike", "dog", "phone", "shoes", "hands")
    rng, links = random.Random(seed), []
    for pair, relation, action, thing in _drawn(rng, (nouns, relations, actions, things), count // 4):
        for first, second in (pair, pair[::-1]):
            for pronoun, noun in zip(("his", "her"), pair, strict=True):
                roles = {noun: f"[key {noun}]", pair[noun == pair[0]]: f"[rival {pair[noun == pair[0]]}]"}
                verb = action.replace("is", "are") if relation == "and" else action
                sentence = f"a {roles[first]} {relation} a {roles[second]} {verb} [query {pronoun}] {thing} ."
                links.append(marked(sentence[0].upper() + sentence[1:]))
    return links


def clock_links(count: int = 400, *, seed: int = 0) -> list[Link]:
    """English dates and times, whose hour can be said in German only with AM or PM, which stands some tokens later:

    Monday, May 3, 2021 at [query 4]:15 [key PM]
    """
    rng = random.Random(seed)
    months = ("January", "March", "April", "May", "July", "September", "October", "December")
    return [
        marked(
            f"{rng.choice(months)} {rng.randint(1, 28)}, {rng.randint(1950, 2049)} at "
            f"[query {rng.randint(1, 11)}]:{rng.randrange(60):02} [key {rng.choice(('AM', 'PM'))}]"
        )
        for _ in range(count)
    ]


def _drawn(rng: random.Random, choices: Sequence[Sequence[Any]], count: int) -> list[tuple[Any, ...]]:
    every = list(itertools.product(*choices))
    return rng.sample(every, min(count, len(every)))


@styled
def links_figure(scores: HeadScores, *, title: str = "") -> Figure:
    """The scores of all heads: a row for each layer."""
    names = ("weight on the key", "the key gets most", "key above rival")
    shown = {name: matrix for name, matrix in zip(names, scores, strict=True) if not np.isnan(matrix).all()}
    layers, heads = scores.weight.shape
    figure = blank(WIDTH, 1.1 + 0.35 * layers)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
    for axes, (name, matrix) in zip(panels, shown.items(), strict=True):
        heat_map(axes, matrix, rows=rows, columns=columns)
        for (row, column), value in np.ndenumerate(matrix):
            colour = "white" if value > 0.6 else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xlabel(name)
    colour_bar(list(panels), "share")
    figure.suptitle(title, fontsize=9)
    return figure


SETS = {"gender": gender_links, "clock": clock_links}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the head of a trained model that links best, and its scores on links that it was not chosen by."""
    parser = argparse.ArgumentParser("transformer_jax.inspect.links", description=main.__doc__)
    parser.add_argument("--model", default="runs/phrases", metavar="DIR", help="the run directory")
    parser.add_argument("--links", choices=SETS, default="clock", help="pronouns, or hours with AM or PM")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.FATAL)  # Orbax's: what goes wrong there is said by this library
    try:
        translator = Translator.load(options.model)
    except UserError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    links = SETS[options.links]()
    chosen = choose_head(examples(translator.model, translator.params, translator.tokenizer, links))
    print(f"for instance: {links[0].source}")
    for name, value in chosen._asdict().items():
        print(f"{name}: {value if isinstance(value, int) else round(value, 3)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
