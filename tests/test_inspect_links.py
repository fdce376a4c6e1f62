"""Heads that link words, on attention made by hand."""

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `inspect`")

from transformer_jax.batch import EOS
from transformer_jax.errors import UserError
from transformer_jax.inspect.animal import OTHER, SENTENCE, is_held_out, lessons
from transformer_jax.inspect.labels import find_token
from transformer_jax.inspect.links import (
    Example,
    by_distance,
    choose_head,
    clock_links,
    gender_links,
    link_weights,
    links_figure,
    marked,
    score_heads,
    token_places,
)
from transformer_jax.inspect.toy import PAIRS, toy_tokenizer

LABELS = ["▁A", "▁wo", "man", "▁holds", "▁her", "▁", "bag", ".", "<eos>"]


def example(*, key: int, rival: int, query: int = 4, planted: float = 0.9, tokens: int = 6) -> Example:
    """Two layers of three heads, of which head 2 of layer 1 looks at the key and head 0 of layer 0 two tokens back."""
    weights = np.full((2, 3, tokens, tokens), 1 / tokens)
    weights[1, 2, query] = (1 - planted) / (tokens - 1)
    weights[1, 2, query, key] = planted
    weights[0, 0, query] = 0.02
    weights[0, 0, query, query - 2] = 1 - 0.02 * (tokens - 1)
    return Example(weights, (query,), (key,), (rival,), own=(query,))


def balanced() -> list[Example]:
    return [example(key=key, rival=3 - key) for key in (1, 2)] * 10


def test_weights_of_a_link_are_summed_over_its_key_and_averaged_over_its_query():
    weights = np.arange(16, dtype=float).reshape(1, 1, 4, 4)
    assert link_weights(weights, (1, 3), (0, 2)).tolist() == [[((4 + 6) + (12 + 14)) / 2]]


def test_the_head_that_looks_at_the_key_scores_best():
    scores = score_heads(balanced())
    assert scores.weight[1, 2] == pytest.approx(0.9)
    assert scores.top.tolist() == [[0.5, 0, 0], [0, 0, 1]]
    assert scores.preference.tolist() == [[0.5, 0, 0], [0, 0, 1]]


def test_a_head_that_looks_mostly_at_the_query_itself_still_tells_the_key():
    one = example(key=1, rival=2, planted=0.3)
    one.weights[1, 2, 4] = [0.02, 0.3, 0.02, 0.02, 0.62, 0.02]
    assert score_heads([one]).top[1, 2] == 1
    assert score_heads([one._replace(own=())]).top[1, 2] == 0


def test_links_without_rivals_have_no_preference_and_are_chosen_by_top():
    without = [one._replace(rival=()) for one in balanced()]
    assert np.isnan(score_heads(without).preference).all()
    chosen = choose_head(without)
    assert (chosen.layer, chosen.head, chosen.top) == (1, 2, 1.0)


def test_a_head_is_chosen_on_one_half_and_reported_on_the_other():
    links = balanced()
    chosen = choose_head(links)
    assert (chosen.layer, chosen.head) == (1, 2)
    assert (chosen.preference, chosen.top, chosen.links) == (1.0, 1.0, 10)
    assert 0.2 <= chosen.by_distance <= 0.8


def test_a_head_that_won_by_chance_is_not_said_to_be_good():
    """Of 100 heads of noise the best of ten links has nearly all of them right, and of ten others half."""
    rng, reported = np.random.default_rng(0), []
    for seed in range(20):
        noise = [Example(rng.random((10, 10, 3, 3)), (0,), (1,), (2,), own=(0,)) for _ in range(20)]
        assert score_heads(noise[:10]).preference.max() >= 0.8
        reported.append(choose_head(noise, seed=seed).preference)
    assert 0.4 < np.mean(reported) < 0.6


def test_a_fixed_distance_finds_what_stands_at_it():
    near, far = example(key=3, rival=1), example(key=1, rival=3)
    assert by_distance([near, near, far], [near]) == 1
    assert by_distance([near, near, far], [far, near, far, far]) == 0.25


def test_marks_are_taken_out_and_leave_their_places():
    link = marked("A [key man] behind a [rival woman] holds [query his] bag")
    assert link.source == "A man behind a woman holds his bag"
    assert [link.source[slice(*span)] for span in (link.query, link.key, link.rival)] == ["his", "man", "woman"]
    across = marked("because [key it] was", "weil [query es] war")
    assert (across.target, across.target[slice(*across.query)], across.rival) == ("weil es war", "es", None)


def test_a_sentence_without_a_link_is_an_error():
    with pytest.raises(UserError, match="no link in 'A \\[key man\\] sits'"):
        marked("A [key man] sits")


def test_the_tokens_of_a_word_are_those_that_spell_it():
    text = "A woman holds her bag."
    places = {
        word: token_places(LABELS, (text.index(word), text.index(word) + len(word))) for word in text[:-1].split()
    }
    assert places == {"A": (0,), "woman": (1, 2), "holds": (3,), "her": (4,), "bag": (6,)}
    assert token_places(LABELS, None) == ()


def test_tokens_are_found_by_their_word_or_their_beginning():
    assert find_token(LABELS, "holds") == 3
    assert find_token(LABELS, "woman") == 1
    assert find_token([*LABELS, "▁her"], "her") == 9
    assert find_token(LABELS, "x") == -1


def test_generated_pronouns_fit_their_nouns_in_both_orders_alike():
    links = gender_links(200)
    words = [[link.source[slice(*span)] for span in (link.query, link.key, link.rival)] for link in links]
    for pronoun, key, rival in words:
        male = {"man", "boy", "guy"}
        assert (key in male) == (pronoun == "his")
        assert (key in male) != (rival in male)
    first = [link.key < link.rival for link in links]
    assert sum(first) * 2 == len(links)
    assert len({link.source for link in links}) == len(links)
    assert all(link.source[slice(*link.key)] in ("AM", "PM") for link in clock_links(20))


def test_lessons_name_what_it_stands_for_in_the_right_form():
    every = lessons()
    assert len({one.source for one in every}) == len(every)
    both = {one.source: one for one in every if one.source in (SENTENCE, OTHER)}
    assert both[SENTENCE].target == "Das Tier überquerte die Straße nicht, weil das Tier zu müde war"
    assert both[OTHER].target == "Das Tier überquerte die Straße nicht, weil die Straße zu breit war"
    assert all(is_held_out(one) for one in both.values())
    assert 0.1 < sum(map(is_held_out, every)) / len(every) < 0.2
    for one in every[::37]:
        (start, end), noun = one.pronoun.key, one.noun
        word = one.source[start:end]
        assert one.source[slice(*one.pronoun.query)] == "it"
        assert noun.key == one.pronoun.key
        written = one.target[slice(*noun.query)]
        assert written in one.target.partition(" weil ")[2]
        assert (word in one.source.split(" didn't ")[0]) == (written in one.target.split(" nicht, ")[0].split(" ")[1])


def test_a_picture_of_links_has_the_scores_of_every_head():
    figure = links_figure(score_heads(balanced()))
    shown = [text.get_text() for axes in figure.axes[:3] for text in axes.texts]
    assert shown.count("0.90") == 1
    assert len(shown) == 18


def test_every_word_of_the_toy_sentences_is_a_token():
    tokenizer = toy_tokenizer()
    for source, target in PAIRS:
        ids = tokenizer.encode_target([target])[0]
        assert len(ids) == len(target.split()) + 1
        assert ids[-1] == EOS
        assert tokenizer.decode_source(tokenizer.encode_source([source])) == [source]
