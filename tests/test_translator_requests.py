"""What can be asked of translations, with a tiny model of random parameters."""

import dataclasses
import functools
import logging

import jax
import numpy as np
import pytest
from test_translator import LINES, SEARCH, assert_same, make_tokenizer, make_translator

from transformer_jax.batch import EOS
from transformer_jax.config import EnsembleMean, Positions, SearchMethod
from transformer_jax.decoding.phrases import phrase_tokens, prefix_tokens
from transformer_jax.decoding.translator import BLANK, Request, Translator
from transformer_jax.errors import UserError

REQUESTS = [
    Request("a cat", prefix="the big"),
    "the dog sees a cat",
    Request("", prefix="the"),
    Request("dog", constraints=("cat", "a dog")),
    Request("a big dog", prefix="a", constraints=("small",), n_best=1),
    Request("the cat sees", constraints=("a", "a")),
    Request("small"),
]
SAMPLE = dataclasses.replace(SEARCH, method=SearchMethod.SAMPLE, top_p=0.95, seed=3)
change = dataclasses.replace


@functools.cache
def translator() -> Translator:
    return make_translator(make_tokenizer())


def encoded(text):
    return tuple(translator().tokenizer.encode_target([text])[0][:-1])


def has(tokens, phrase):
    return sum(tokens[start : start + len(phrase)] == phrase for start in range(len(tokens)))


@functools.cache
def found():
    return translator().translate(REQUESTS, SEARCH)


def test_prefixes_and_constraints_are_in_the_translations_or_these_say_not():
    seen = set()
    for request, n_best in zip(REQUESTS, found(), strict=True):
        if isinstance(request, str) or not request.source:
            continue
        for one in n_best:
            prefix = encoded(request.prefix) if request.prefix else ()
            assert one.tokens[: len(prefix)] == prefix
            wanted = {text: request.constraints.count(text) for text in request.constraints}
            assert one.satisfied == all(has(one.tokens, encoded(text)) >= times for text, times in wanted.items())
            assert one.satisfied or not one.finished
            seen.add((one.satisfied, bool(wanted)))
    assert (True, True) in seen
    assert found()[0][0].text.startswith("the big")
    assert found()[2] == [BLANK]


def test_a_request_says_how_many_translations_it_wants(caplog):
    assert [len(n_best) for n_best in found()] == [3, 3, 1, 3, 1, 3, 3]
    more = translator().translate([Request("a cat", n_best=3), "a cat"], change(SEARCH, top_beams=1))
    assert [len(n_best) for n_best in more] == [3, 1]
    assert_same(more, [found_alone := translator().translate(["a cat"], SEARCH)[0], found_alone[:1]])


def test_a_request_that_asks_for_nothing_is_its_line():
    assert translator().translate([Request(line) for line in LINES], SEARCH) == translator().translate(LINES, SEARCH)


@pytest.mark.parametrize("tokens", [1, 3000])
def test_a_request_has_the_same_n_best_list_in_any_batch_and_order(tokens):
    order = np.random.default_rng(1).permutation(len(REQUESTS))
    shuffled = translator().translate([REQUESTS[index] for index in order], change(SEARCH, tokens=tokens))
    assert_same(shuffled, [found()[index] for index in order])


@pytest.mark.parametrize(
    "search",
    [
        change(SEARCH, repetition_penalty=1.4, no_repeat_ngram=2, min_length=4, suppressed=(2,), alpha=1.0),
        pytest.param(
            change(SEARCH, beam_size=4, groups=2, diversity=1.0, forced_prefix=(7, 9)), marks=pytest.mark.slow
        ),
        change(SAMPLE, temperature=1.5, repetition_penalty=1.4),
    ],
)
def test_every_score_is_that_of_the_same_tokens_rescored_whatever_is_asked(search):
    requests = [request for request in REQUESTS if not isinstance(request, str) and request.source]
    if search.method == SearchMethod.SAMPLE:
        requests = [request._replace(constraints=()) for request in requests]
    n_bests = translator().translate(requests, search)
    pairs = [(request.source, one) for request, n in zip(requests, n_bests, strict=True) for one in n]
    rescored = translator().score([line for line, _ in pairs], [one.tokens for _, one in pairs], search)
    for (_, one), other in zip(pairs, rescored, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.tokens[: len(search.forced_prefix)] == search.forced_prefix
        assert len(one.tokens) >= search.min_length or not one.finished


def test_samples_are_the_same_in_any_batch_and_order_and_others_for_another_seed():
    requests = [request._replace(constraints=()) for request in REQUESTS if isinstance(request, Request)]
    drawn = translator().translate(requests, change(SAMPLE, tokens=1))
    order = np.random.default_rng(2).permutation(len(requests))
    shuffled = translator().translate([requests[index] for index in order], change(SAMPLE, tokens=3000))
    assert_same(shuffled, [drawn[index] for index in order])
    others = translator().translate(requests, change(SAMPLE, seed=4))
    assert [n_best[0].tokens for n_best in others] != [n_best[0].tokens for n_best in drawn]
    assert len({one.tokens for one in drawn[-1]}) > 1


def test_the_output_limit_is_a_part_of_the_source_but_never_cuts_a_prefix():
    search = change(SEARCH, length_factor=0.5, extra_length=2, min_length=99)
    prefix = " ".join(["big dog"] * 6)
    lines = ["the dog sees a cat and a dog", Request("cat", prefix=prefix)]
    one, other = (n_best[0] for n_best in translator().translate(lines, search))
    assert len(one.tokens) == len(translator().tokenizer.encode_source(lines[:1])[0]) // 2 + 2
    assert other.tokens[:-1] == encoded(prefix)


def test_a_line_in_parts_has_its_prefix_before_the_first_and_the_forced_one_before_each(caplog):
    long = " ".join(["the dog sees a cat"] * 12)
    with caplog.at_level(logging.WARNING):
        request = Request(long, prefix="big", constraints=("small",))
        (n_best,) = translator().translate([request], change(SEARCH, forced_prefix=(9,)), name="test.en")
    assert "test.en line 1: its constraints are those of its first part" in caplog.text
    for one in n_best:
        assert one.tokens[: 1 + len(encoded("big"))] == (9, *encoded("big"))
        assert one.tokens.count(9) >= 2


@pytest.mark.slow
def test_an_ensemble_of_one_model_with_itself_is_that_model():
    twice = change(translator(), others=(translator().params,))
    for mean in EnsembleMean:
        search = change(SEARCH, ensemble=mean)
        assert_same(twice.translate(LINES, search), translator().translate(LINES, search))


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_its_members():
    """For one token: of probabilities the arithmetic mean, of log-probabilities the geometric one, normalised."""
    one = translator()
    other = change(one, params=jax.tree.map(lambda leaf: 0.7 * leaf, one.params))
    both, swapped = change(one, others=(other.params,)), change(other, others=(one.params,))
    vocab = one.tokenizer.target_vocab
    targets = [[token] for token in range(1, vocab)]
    log_probs = [
        np.concatenate(some.token_log_probs(["a cat"] * (vocab - 1), targets)).astype(np.float64)
        for some in (one, other)
    ]
    expected = np.log(np.mean(np.exp(log_probs), axis=0))
    found = np.concatenate(both.token_log_probs(["a cat"] * (vocab - 1), targets))
    np.testing.assert_allclose(found, expected, atol=1e-4)

    mean = np.mean(log_probs, axis=0)
    options = {"ensemble": EnsembleMean.LOG_PROBABILITIES}
    found = np.concatenate(both.token_log_probs(["a cat"] * (vocab - 1), targets, **options)).astype(np.float64)
    np.testing.assert_allclose(found - mean, np.full(vocab - 1, (found - mean)[0]), atol=1e-4)

    for mean in EnsembleMean:
        search = change(SEARCH, ensemble=mean)
        n_bests = both.translate(LINES, search)
        assert_same(swapped.translate(LINES, search), n_bests)
        rescored = both.score([LINES[0]] * 3, [translation.tokens for translation in n_bests[0]], search)
        for translation, again in zip(n_bests[0], rescored, strict=True):
            assert translation.log_prob == pytest.approx(again.log_prob, abs=1e-4)


@pytest.mark.parametrize(
    ("request_", "search", "message"),
    [
        (Request("cat", n_best=0), SEARCH, r"input line 2: n_best is 0; expected 1 or more"),
        (Request("cat", n_best=4), SEARCH, r"top_beams .* is 4 and search.beam_size is 3"),
        (Request("cat", constraints=("dog",)), SAMPLE, "input line 2 has constraints, but search.method is sample"),
        (Request("cat"), change(SEARCH, suppressed=(999,)), "search.suppressed has the id 999, but the tokenizer only"),
        (Request("cat"), change(SEARCH, forced_prefix=(25,)), "search.forced_prefix has the id 25"),
    ],
)
def test_a_request_that_can_not_be_fulfilled_is_refused_by_its_line(request_, search, message):
    with pytest.raises(UserError, match=message):
        translator().translate(["a cat", request_], search)


def test_a_prefix_longer_than_the_table_of_positions_is_refused():
    short = make_translator(make_tokenizer(), positions=Positions.LEARNED, max_positions=12)
    with pytest.raises(UserError, match=r"input line 1: its prefix has 1\d tokens, but the model only 12 positions"):
        short.translate([Request("cat", prefix=" ".join(["dog"] * 12))], SEARCH)


def test_characters_that_the_vocabulary_does_not_have_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        translator().translate([Request("cat", prefix="猫")], SEARCH)
    assert "input line 1: its prefix or constraints have characters" in caplog.text


def test_a_prefix_has_no_end_and_a_constraint_is_cut_as_inside_a_sentence():
    tokenizer = translator().tokenizer
    sentence = tuple(tokenizer.encode_target(["the big cat sees a dog"])[0])
    assert sentence[: len(prefix_tokens("the big", tokenizer))] == prefix_tokens("the big", tokenizer)
    for text in ("cat", "big cat", " sees a "):
        assert has(sentence, phrase_tokens(text, tokenizer)) == 1
        assert EOS not in phrase_tokens(text, tokenizer)
    assert prefix_tokens(" ", tokenizer) == phrase_tokens("", tokenizer) == ()
