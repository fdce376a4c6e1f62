"""Every picture of a model at work on one sentence, in the order in which the Transformer is explained."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import unpacked
from transformer_jax.config import SearchConfig
from transformer_jax.data.subwords import SPACE
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.inspect import animal, toy
from transformer_jax.inspect.attention import (
    alignment,
    alignment_figure,
    focus_figure,
    heads_figure,
    mask_figure,
    steps_figure,
)
from transformer_jax.inspect.curves import learning_rates, schedules_figure, training_figure
from transformer_jax.inspect.distributions import likeliest, likeliest_figure
from transformer_jax.inspect.influence import influence_figure, influences
from transformer_jax.inspect.labels import find_token, source_labels, target_labels
from transformer_jax.inspect.links import choose_head, links_figure, score_heads
from transformer_jax.inspect.page import Picture
from transformer_jax.inspect.positions import positions_figure, table_figure
from transformer_jax.inspect.residual import stream_figure
from transformer_jax.inspect.scaling import scaling_figure
from transformer_jax.inspect.search_tree import record_search, search_figure, search_tree
from transformer_jax.inspect.trace import Trace, trace
from transformer_jax.run_directory import load_config

LONGEST = 64  # tokens of a side that a picture has room for


class Seen(NamedTuple):
    """A sentence, its translation, and what the model does with them."""

    translator: Translator
    text: str  # the translation
    trace: Trace
    source: list[str]  # labels of the source
    read: list[str]  # labels of what the decoder reads, <bos> first
    written: list[str]  # labels of what it predicts


def see(translator: Translator, text: str, *, target: str | None = None, search: SearchConfig) -> Seen:
    """Traces a sentence and its translation: the given one, or else the best that the model finds.

    Raises:
      UserError: if there is no text, or too much for a picture.
    """
    if not text.strip():
        raise UserError("--text is empty. Give a sentence of the model's source language.")
    tokenizer = translator.tokenizer
    ids = tokenizer.encode_source([text])[0]
    _check_length("--text", ids)
    if target is None:
        n_best = translator.translate([text], search)[0]
        if not n_best:
            raise UserError("the model has no translation of --text: its output is not finite.")
        predicted = list(n_best[0].tokens)
    else:
        predicted = tokenizer.encode_target([target])[0]
    _check_length("the translation", predicted)
    seen = trace(translator.model, translator.params, ids, predicted)
    return Seen(
        translator=translator,
        text=tokenizer.decode_target([predicted])[0],
        trace=seen,
        source=source_labels(tokenizer, ids),
        read=target_labels(tokenizer, seen.target_input),
        written=target_labels(tokenizer, predicted),
    )


def _check_length(what: str, ids: Sequence[int]) -> None:
    if len(ids) > LONGEST:
        raise UserError(f"{what} has {len(ids)} tokens; a picture has room for {LONGEST}. Give a shorter sentence.")


def pictures(seen: Seen, search: SearchConfig, *, token: str | None = None, head: int = 0) -> Iterator[Picture]:
    """The pictures of a sentence; `token` is the source token whose attention is shown, by default the last one.

    Raises:
      UserError: if the token or the head is not there.
    """
    query = _query(seen, token)
    if not 0 <= head < seen.trace.encoder_weights.shape[1]:
        raise UserError(f"--head is {head}; the model has heads 0 to {seen.trace.encoder_weights.shape[1] - 1}.")
    yield _influence(seen)
    yield from _self_attention(seen, query, head, word=token or seen.source[query].removeprefix(SPACE))
    yield from _positions(seen)
    yield _stream(seen)
    yield from _decoder(seen)
    yield _probabilities(seen)
    yield _search(seen, search)


def _query(seen: Seen, token: str | None) -> int:
    if token is None:
        return max(0, len(seen.source) - 2)
    place = find_token(seen.source, token)
    if place < 0:
        raise UserError(f"--token {token!r} is not in the text. Its tokens are: {' '.join(seen.source)}")
    return place


def _influence(seen: Seen) -> Picture:
    batch = unpacked(jnp.asarray(seen.trace.source)[None], jnp.asarray(seen.trace.target)[None])
    encoder, decoder = influences(seen.translator.model, seen.translator.params, batch)
    return Picture(
        "influence",
        "Context flows between any two positions",
        "How much each output of the stack depends on each input; grey: not at all. In the encoder every position sees "
        "every other; in the decoder none sees a later one.",
        influence_figure(np.asarray(encoder), np.asarray(decoder), seen.source, seen.read),
    )


def _self_attention(seen: Seen, query: int, head: int, *, word: str) -> Iterator[Picture]:
    layers = seen.trace.encoder.layers
    yield Picture(
        "focus",
        f"What does “{word}” attend to?",
        "Self-attention of the encoder's top layer: a colour for each head, the stronger the larger the weight.",
        focus_figure(layers[-1].self_attention.weights, query, seen.source, seen.source),
    )
    yield Picture(
        "steps",
        "Attention, step by step",
        f"Encoder layer {len(layers) - 1}, head {head}: the scores q · k, divided by √H, and their softmax. Nothing is "
        "masked in the encoder.",
        steps_figure(layers[-1].self_attention, head, seen.source, seen.source),
    )
    yield Picture(
        "scaling",
        "Why the scores are divided by √d",
        "Random queries and keys of unit variance: without the division the scores have variance d, the softmax comes "
        "near to a maximum, and little is left of its gradient.",
        scaling_figure(),
    )
    for number, layer in enumerate(layers):
        yield Picture(
            f"encoder-{number}",
            f"Encoder self-attention, layer {number}",
            "All heads. Below each: the mean entropy of its rows; 0 bits is one key only.",
            heads_figure(layer.self_attention.weights, seen.source, seen.source),
        )


def _positions(seen: Seen) -> Iterator[Picture]:
    yield Picture(
        "positions",
        "Positional encodings",
        "The sinusoids of the paper: each row a position, each column a channel.",
        positions_figure(),
    )
    table = seen.trace.encoder.positions
    if table is not None and len(table) > 1:
        yield Picture(
            "positions-of-the-model",
            "What this model adds to its embeddings",
            "For the positions of this sentence.",
            table_figure(table),
        )


def _stream(seen: Seen) -> Picture:
    return Picture(
        "stream",
        "Residual connections and layer norms",
        "The size of the residual stream around every sub-layer, of what the sub-layer is given and of what it adds.",
        stream_figure(seen.trace.encoder, seen.trace.decoder),
    )


def _decoder(seen: Seen) -> Iterator[Picture]:
    layers = seen.trace.decoder.layers
    yield Picture(
        "mask",
        "The decoder's mask",
        "A position may see itself and what is before it; other scores become −∞ before the softmax.",
        mask_figure(layers[0].self_attention.mask, seen.read, seen.read),
    )
    for number, layer in enumerate(layers):
        yield Picture(
            f"decoder-{number}",
            f"Decoder self-attention, layer {number}",
            "Rows are what the decoder reads, the start symbol first.",
            heads_figure(layer.self_attention.weights, seen.read, seen.read),
        )
        assert layer.cross_attention is not None
        yield Picture(
            f"cross-{number}",
            f"Encoder–decoder attention, layer {number}",
            "Rows are what the decoder predicts, columns the encoder's output.",
            heads_figure(layer.cross_attention.weights, seen.written, seen.source),
        )
    yield Picture(
        "alignment",
        "Which source tokens a translation was made from",
        "Encoder–decoder attention, the mean of all heads and layers. It is where the model looks, which is not always "
        "why it writes what it writes.",
        alignment_figure(alignment(seen.trace.cross_weights), seen.written, seen.source),
    )


def _probabilities(seen: Seen) -> Picture:
    found = likeliest(seen.trace.probabilities, min(4, seen.trace.probabilities.shape[1]))
    labels = [target_labels(seen.translator.tokenizer, row) for row in found.tokens]
    return Picture(
        "probabilities",
        "From logits to probabilities",
        "The likeliest tokens at each position, after the final linear layer and the softmax.",
        likeliest_figure(found, labels, seen.read),
    )


def _search(seen: Seen, search: SearchConfig) -> Picture:
    recording = record_search(seen.translator.model, seen.translator.params, seen.trace.source.tolist(), search)
    nodes = search_tree(recording)
    labels = target_labels(seen.translator.tokenizer, [node.tokens[-1] for node in nodes])
    return Picture(
        "search",
        f"Beam search with a beam of {search.beam_size}",
        "Under each token the log-probability of the hypothesis. Grey and ×: given up; framed: finished, with its "
        "score if it is in the n-best list; blue: the translation.",
        search_figure(nodes, labels),
    )


def lessons() -> Iterator[Picture]:
    """The pictures of the two small runs: probability matrices and losses, and what *it* refers to."""
    one_hot, smoothed = toy.train_toy(), toy.train_toy(label_smoothing=0.1)
    yield Picture(
        "toy-distributions",
        "Training on two sentences: target and learned probabilities",
        "je suis étudiant → i am a student. Each row is a position of the output, each column a word.",
        toy.toy_distributions_figure(one_hot),
    )
    yield Picture(
        "toy-losses",
        "Cross-entropy and Kullback–Leibler divergence",
        "They differ by the entropy of the target: by nothing where the target is one-hot.",
        toy.toy_losses_figure(one_hot, smoothed),
    )
    run = animal.train_animal()
    held_out = [lesson for lesson in animal.lessons() if animal.is_held_out(lesson)]
    both = {name: animal.link_examples(run, held_out, name) for name in ("pronoun", "noun")}
    chosen = choose_head(both["noun"])
    yield Picture(
        "reference",
        "What does “it” refer to?",
        f"A small model that has to name what it is. While it writes the noun, head {chosen.head} of decoder layer "
        f"{chosen.layer} prefers the right one of the two nouns in {chosen.preference:.0%} of {chosen.links} sentences "
        "that were kept from training.",
        animal.reference_figure(run),
    )
    yield Picture(
        "reference-heads",
        "Which head links it",
        "Every head of the encoder–decoder attention, on all sentences kept from training.",
        links_figure(score_heads(both["noun"])),
    )
    yield Picture(
        "reference-encoder",
        "And which does not",
        "The same from the word “it” in the encoder, where 0.5 is chance: the model resolves the pronoun elsewhere.",
        links_figure(score_heads(both["pronoun"])),
    )


def training_pictures(workdirs: Sequence[str]) -> Iterator[Picture]:
    """The learning rate and the log of a run, beside those of others."""
    config = load_config(workdirs[0])
    rate = learning_rates(config.optimizer, width=config.model.width, steps=config.run.steps)
    yield Picture(
        "schedule",
        "The learning rate of this run",
        f"The schedule {config.optimizer.schedule} with {config.optimizer.warmup} updates of warm-up.",
        schedules_figure({str(config.optimizer.schedule): rate}),
    )
    yield Picture(
        "training",
        "How it was trained",
        "What the run logged: lines on training batches, points on the dev set.",
        training_figure(workdirs),
    )
