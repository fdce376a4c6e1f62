"""Beam search as it went: a recording of every step, and the tree of its hypotheses (section 6.1)."""

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from numpy import ndarray

from transformer_jax.batch import EOS, PAD, segments_and_positions
from transformer_jax.config import Positions, SearchConfig
from transformer_jax.decoding.search import Asked, Rules, State, advance, finish, init
from transformer_jax.decoding.translator import output_limit, search_rules
from transformer_jax.errors import UserError
from transformer_jax.inspect.style import COLOURS, GREY, WIDTH, blank, styled
from transformer_jax.nn.transformer import Transformer

Tokens = tuple[int, ...]


class SearchStep(NamedTuple):
    """The slots of one sentence after a step of its search."""

    token: ndarray  # int32 [K]: the last token of the hypothesis in each slot; padding where none is live
    parent: ndarray  # int32 [K]: the slot which it had a step before
    log_probs: ndarray  # float32 [K]: the sum over its tokens


class Recording(NamedTuple):
    steps: tuple[SearchStep, ...]
    translations: tuple[Tokens, ...]  # the n-best list
    scores: tuple[float, ...]


class Fate(enum.StrEnum):
    CONTINUED = "continued"
    DEAD = "dead"  # others had better continuations, or the search ended before it did
    FINISHED = "finished"


class Node(NamedTuple):
    """A hypothesis that had a slot of the beam."""

    tokens: Tokens
    log_prob: float  # the sum over its tokens
    slot: int
    fate: Fate
    rank: int | None  # its place in the n-best list, from 0; None if it is not there
    score: float | None  # its score, if it is there


def record_search(model: Transformer, params: Any, source: Sequence[int], config: SearchConfig) -> Recording:
    """Searches the translations of one sentence, EOS included, and keeps the slots of each step.

    It is the library's own search, one step at a time.

    Raises:
      UserError: if the search draws samples, which have no tree.
    """
    rules = search_rules(config)
    if rules.sampling is not None:
        raise UserError("search.method is sample, and samples have no tree. Set it to beam.")
    limit = output_limit(len(source), config)
    if model.config.positions == Positions.LEARNED:
        limit = min(limit, model.config.max_positions)
    prefix = jnp.asarray([config.forced_prefix], jnp.int32) if config.forced_prefix else None
    asked = Asked(jnp.array([limit], jnp.int32), prefix)
    length = -(-limit // 16) * 16  # few shapes, so that few programs are compiled
    state, steps = _start(model, params, jnp.asarray([list(source)], jnp.int32), asked, rules=rules, length=length), []
    while not state.done[0]:
        state = _advance(model, params, state, asked, rules=rules)
        steps.append(SearchStep(*(np.asarray(x[0]) for x in (state.token, state.parent, state.log_probs))))
    found = jax.tree.map(lambda x: np.asarray(x)[0], finish(state, asked, rules))
    exist = [(tuple(tokens[:n].tolist()), n) for tokens, n in zip(found.tokens, found.lengths, strict=True) if n > 0]
    return Recording(tuple(steps), tuple(tokens for tokens, _ in exist), tuple(found.scores[: len(exist)].tolist()))


@functools.partial(jax.jit, static_argnames=("model", "rules", "length"))
def _start(model: Transformer, params: Any, source, asked: Asked, *, rules: Rules, length: int) -> State:
    segments = segments_and_positions(source)[0]
    encoded = model.apply(params, source, segments, method="encode")
    cache = model.apply(params, encoded, segments, beams=rules.slots, length=length, method="init_cache")
    return init(cache, asked, rules, max_length=length)


@functools.partial(jax.jit, static_argnames=("model", "rules"))
def _advance(model: Transformer, params: Any, state: State, asked: Asked, *, rules: Rules) -> State:
    def step(token, parent, position, cache):
        logits, cache = model.apply(params, token, parent, position, cache, method="decode_step")
        return jax.nn.log_softmax(logits), cache

    return advance(step, state, asked, rules)


def search_tree(recording: Recording) -> list[Node]:
    """Every hypothesis that had a slot, in the order of the steps; parents come before their children."""
    ranks = {tokens: (rank, recording.scores[rank]) for rank, tokens in enumerate(recording.translations)}
    placed = _placed(recording.steps)
    parents = {tokens[:-1] for tokens in placed}
    return [
        Node(tokens, log_prob, slot, _fate(tokens, parents), *ranks.get(tokens, (None, None)))
        for tokens, (slot, log_prob) in placed.items()
    ]


def _placed(steps: Sequence[SearchStep]) -> dict[Tokens, tuple[int, float]]:
    """The slot and the sum of log-probabilities of each hypothesis, in the order of the steps."""
    placed: dict[Tokens, tuple[int, float]] = {}
    slots: list[Tokens | None] = [()] * len(steps[0].token)
    for step in steps:
        slots = [_child(slots[parent], int(token)) for parent, token in zip(step.parent, step.token, strict=True)]
        placed |= {tokens: (slot, float(step.log_probs[slot])) for slot, tokens in enumerate(slots) if tokens}
    return placed


def _child(tokens: Tokens | None, token: int) -> Tokens | None:
    return None if token == PAD or tokens is None else (*tokens, token)


def _fate(tokens: Tokens, parents: set[Tokens]) -> Fate:
    if tokens[-1] == EOS:
        return Fate.FINISHED
    return Fate.CONTINUED if tokens in parents else Fate.DEAD


@styled
def search_figure(nodes: Sequence[Node], labels: Sequence[str], *, title: str = "") -> Figure:
    """The tree from top to bottom: a row for each step, a column for each slot of the beam.

    Under each token stands the sum of log-probabilities so far. Hypotheses that were given up are grey and end in a
    cross; finished ones are boxed, with their score if they are in the n-best list; the best one's way is blue.
    `labels` are the last tokens of the nodes.
    """
    steps, slots = max(len(node.tokens) for node in nodes), 1 + max(node.slot for node in nodes)
    best = next((node.tokens for node in nodes if node.rank == 0), ())
    figure = blank(min(WIDTH, 1.5 * slots + 1.0), 0.42 * (steps + 1) + 0.5)
    axes = figure.subplots()
    at = {(): (0.0, 0), **{node.tokens: (float(node.slot), len(node.tokens)) for node in nodes}}
    for node in nodes:
        (x0, y0), (x1, y1) = at[node.tokens[:-1]], at[node.tokens]
        on_best = node.tokens == best[: len(node.tokens)]
        colour, width = (COLOURS[0], 2.0) if on_best else (GREY, 1.0)
        axes.plot([x0, x1], [y0 + 0.3, y1 - 0.36], color=colour, linewidth=width, zorder=1)
    axes.text(0, 0, "<bos>", ha="center", va="center")
    for node, label in zip(nodes, labels, strict=True):
        _draw_node(axes, node, label, best=node.tokens == best[: len(node.tokens)])
    axes.set(xlim=(-0.6, slots - 0.4), ylim=(steps + 0.6, -0.5), ylabel="step")
    axes.set_xticks(range(slots), [f"slot {slot}" for slot in range(slots)])
    axes.set_yticks(range(1, steps + 1))
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title(title)
    return figure


def _draw_node(axes, node: Node, label: str, *, best: bool) -> None:
    x, y = node.slot, len(node.tokens)
    colour = GREY if node.fate == Fate.DEAD and node.rank is None else COLOURS[0] if best else "black"
    text = f"{label}\n{node.log_prob:.2f}"
    box: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    if node.fate == Fate.FINISHED:
        box |= {"edgecolor": COLOURS[2], "linewidth": 1.5}
    if node.rank is not None:
        text += f"   no. {node.rank + 1}: {node.score:.3f}"
    elif node.fate == Fate.DEAD:
        text += " ×"
    look: dict[str, Any] = {"fontsize": 7, "fontweight": "bold" if best else "normal", "linespacing": 1.4}
    axes.text(x, y, text, ha="center", va="center", color=colour, bbox=box, zorder=2, **look)
