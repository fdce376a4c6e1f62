"""A model in which every prefix has next-token probabilities of its own, and searches in words to compare with.

The searches are plain Python over tuples of tokens and share no code with the library.
"""

import collections
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import EOS
from transformer_jax.decoding.search import Asked, search


class PrefixTree(NamedTuple):
    """The cache of the table-driven model. Prefixes are the nodes of a V-ary tree, counted level by level."""

    table: jax.Array  # float [B, nodes, V]
    node: jax.Array  # int32 [B, K]


class Found(NamedTuple):
    tokens: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool
    satisfied: bool = True


class Wishes(NamedTuple):
    """What may be asked of a search, of one sentence."""

    prefix: tuple[int, ...] = ()
    phrases: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    suppressed: tuple[int, ...] = ()


NOTHING = Wishes()


class Grown(NamedTuple):
    """A hypothesis of the searches in words."""

    tokens: tuple[int, ...]
    node: int
    log_prob: float
    rank: float


START = Grown((), 0, 0.0, 0.0)


def random_tables(seed, *, batch, vocab, depth, sharpness=2.0):
    """Log-probabilities [batch, nodes, vocab] after each prefix of fewer than `depth` tokens."""
    nodes = sum(vocab**level for level in range(depth))
    logits = sharpness * np.random.default_rng(seed).normal(size=(batch, nodes, vocab))
    return np.array(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))


def child(node, token, vocab):
    return node * vocab + token + 1


def tree_step(token, parent, position, cache):
    vocab = cache.table.shape[-1]
    node = child(jnp.take_along_axis(cache.node, parent, axis=1), token, vocab)
    node = jnp.where(position[:, None] == 0, 0, node)
    known = jnp.minimum(node, cache.table.shape[1] - 1)  # what ended or is done walks out of the table
    return jnp.take_along_axis(cache.table, known[:, :, None], axis=1), cache._replace(node=node)


def tree_cache(tables, slots):
    return PrefixTree(jnp.asarray(tables), jnp.zeros((len(tables), slots), jnp.int32))


@functools.partial(jax.jit, static_argnames=("rules", "max_length"))
def table_search(tables, asked, *, rules, max_length):
    return search(tree_step, tree_cache(tables, rules.slots), asked, rules, max_length=max_length)


def asked_for(limits, wishes, *, prefix=2, phrases=(2, 2)):
    """The arrays of many sentences' wishes, of fixed shape."""
    prefixes = np.zeros((len(limits), prefix), np.int32)
    constraints = np.zeros((len(limits), *phrases), np.int32)
    for row, wish in enumerate(wishes):
        prefixes[row, : len(wish.prefix)] = wish.prefix
        for number, phrase in enumerate(wish.phrases):
            constraints[row, number, : len(phrase)] = phrase
    return Asked(jnp.asarray(limits, jnp.int32), jnp.asarray(prefixes), jnp.asarray(constraints))


def n_best(hypotheses, row):
    """The entries of one sentence that exist."""
    return [
        Found(tuple(map(int, tokens[:length])), float(log_prob), float(score), bool(finished), bool(satisfied))
        for tokens, log_prob, score, length, finished, satisfied in zip(
            *(field[row] for field in hypotheses), strict=True
        )
        if length > 0
    ]


def assert_same(found, expected):
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.finished for one in found] == [one.finished for one in expected]
    assert [one.satisfied for one in found] == [one.satisfied for one in expected]
    np.testing.assert_allclose([one.log_prob for one in found], [one.log_prob for one in expected], atol=1e-5)
    np.testing.assert_allclose([one.score for one in found], [one.score for one in expected], atol=1e-5)


def divisor(length, penalty, alpha):
    return {"gnmt": ((5 + length) / 6) ** alpha, "power": length**alpha, "none": 1.0}[penalty]


def places(tokens, phrase):
    return sum(tokens[start : start + len(phrase)] == phrase for start in range(len(tokens)))


def missing(tokens, wishes):
    """The phrases that are not met, as often as they are not."""
    short = collections.Counter(wishes.phrases)
    short.subtract({phrase: places(tokens, phrase) for phrase in short})
    return short


def satisfied(tokens, wishes):
    return max(missing(tokens, wishes).values(), default=0) <= 0


def bank(tokens, wishes):
    """Tokens of constraints that are met, with the longest beginning of a missing one at the end."""
    short = missing(tokens, wishes)
    met = sum(
        len(phrase) * (times - max(short[phrase], 0)) for phrase, times in collections.Counter(wishes.phrases).items()
    )
    begun = [
        size
        for phrase, times in short.items()
        for size in range(len(phrase))
        if times > 0 and size and tokens[-size:] == phrase[:size]
    ]
    return met + max(begun, default=0)


def continuations(table, grown, wishes):
    """The hypotheses of one token more, each with its log-probability and what it is ranked by."""
    position, vocab = len(grown.tokens), table.shape[-1]
    for token in range(1, vocab):
        log_prob = float(table[grown.node, token])
        if log_prob < -1e9 or not (cost := _cost(grown.tokens, token, wishes)):
            continue
        yield Grown(
            (*grown.tokens, token),
            child(grown.node, token, vocab),
            grown.log_prob + log_prob,
            grown.rank + (log_prob if position < len(wishes.prefix) else cost * log_prob),
        )


def _cost(tokens, token, wishes):
    """What the log-probability of a token is multiplied by; 0: it is forbidden."""
    position, size = len(tokens), wishes.no_repeat_ngram
    if position < len(wishes.prefix):
        return token == wishes.prefix[position]
    if token == EOS and (position + 1 < wishes.min_length or not satisfied(tokens, wishes)):
        return 0
    after = (*tokens, token)
    if token in wishes.suppressed or (size and len(after) >= size and places(after, after[-size:]) > 1):
        return 0
    return wishes.repetition_penalty if token in tokens else 1


def ranked(hypotheses, penalty, alpha, wishes=NOTHING):
    """Hypotheses as the n-best list that they should make."""
    best_first = sorted(
        hypotheses,
        key=lambda one: (
            one.tokens[-1] != EOS,
            not satisfied(one.tokens, wishes),
            -one.rank / divisor(len(one.tokens), penalty, alpha),
        ),
    )
    return [
        Found(
            one.tokens,
            one.log_prob,
            one.log_prob / divisor(len(one.tokens), penalty, alpha),
            one.tokens[-1] == EOS,
            satisfied(one.tokens, wishes),
        )
        for one in best_first
    ]


def brute_force(table, limit, penalty, alpha, wishes=NOTHING):
    """All sequences that end with EOS within the limit, and all that reach the limit without."""
    found = []

    def grow(grown):
        for one in continuations(table, grown, wishes):
            if one.tokens[-1] == EOS or len(one.tokens) == limit:
                found.append(one)
            else:
                grow(one)

    grow(START)
    return ranked(found, penalty, alpha, wishes)


def patient_beam(table, limit, beam_size, penalty, alpha, wishes=NOTHING, *, groups=1, diversity=0.0):
    """Beam search as one would say it in words, which goes on to the limit whatever it found."""
    finished, live = [[] for _ in range(groups)], [[START] for _ in range(groups)]
    for length in range(1, limit + 1):
        taken, over = collections.Counter(), set()
        for group in range(groups):
            grown = [
                one._replace(rank=one.rank - diversity * taken[one.tokens[-1]])
                for hypothesis in live[group]
                for one in continuations(table, hypothesis, wishes)
            ]
            grown = [one for one in grown if one.tokens not in over]
            best = in_rounds(grown, wishes)[: beam_size // groups - len(finished[group])]
            finished[group] += [one for one in best if one.tokens[-1] == EOS]
            live[group] = [one for one in best if one.tokens[-1] != EOS]
            taken.update(one.tokens[-1] for one in best)
            over |= {one.tokens for one in best if one.tokens[-1] == EOS or length == limit}
    return ranked([one for group in (*finished, *live) for one in group], penalty, alpha, wishes)


def full_beam(table, limit, beam_size, penalty, alpha, wishes=NOTHING):
    """Beam search that follows `beam_size` live hypotheses whatever has ended, to the limit, in words."""
    finished, live = [], [START]
    for _ in range(limit):
        grown = [one for hypothesis in live for one in continuations(table, hypothesis, wishes)]
        best = in_rounds(grown, wishes)[: 2 * beam_size]
        finished += [one for one in best if one.tokens[-1] == EOS]
        finished = sorted(finished, key=lambda one: -one.rank / divisor(len(one.tokens), penalty, alpha))[:beam_size]
        live = [one for one in best if one.tokens[-1] != EOS][:beam_size]
    return ranked([*finished, *live], penalty, alpha, wishes)


def in_rounds(grown, wishes):
    """The best of each bank, the highest bank first, then the second best of each, and so on."""
    of_bank = collections.defaultdict(list)
    for one in sorted(grown, key=lambda one: -one.rank):
        of_bank[bank(one.tokens, wishes)].append(one)
    rounds = range(max(map(len, of_bank.values()), default=0))
    order = sorted(of_bank, reverse=True)
    return [of_bank[number][turn] for turn in rounds for number in order if turn < len(of_bank[number])]
