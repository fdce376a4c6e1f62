"""Translation of lines with a tiny model of random parameters, peaky enough that some hypotheses end."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import Positions, SearchConfig, TokenizerConfig, TransformerConfig, Tying
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.batches import padded_length, sentence_batches
from transformer_jax.decoding.parts import halves
from transformer_jax.decoding.pool import run
from transformer_jax.decoding.quality import quality
from transformer_jax.decoding.translator import BLANK, Translator
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer

LINES = ["a cat", "the dog sees a cat", "", "dog", " \t ", "a big dog", "the cat sees"]
SEARCH = SearchConfig(beam_size=3, top_beams=3, extra_length=8, tokens=150)


def make_tokenizer():
    words = ["a", "the", "cat", "dog", "sees", "see", "big", "small", "and"]
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, size=rng.integers(1, 9))) for _ in range(300)]
    return train_tokenizer([Pair(line, line) for line in lines], TokenizerConfig(vocab=25))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_translator(tokenizer, **options):
    config = TransformerConfig(
        encoder_layers=1,
        decoder_layers=1,
        width=16,
        heads=2,
        feed_forward=16,
        tying=Tying.NONE,
        vocab_multiple=8,
        source_vocab=tokenizer.source_vocab,
        target_vocab=tokenizer.target_vocab,
    )
    model = Transformer(dataclasses.replace(config, **options))
    ids = jnp.ones((1, 4), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), unpacked(ids, ids))
    table = params["params"]["projection"]["table"]
    params["params"]["projection"]["table"] = (3 * table).at[EOS].multiply(2)
    return Translator(model, params, tokenizer, max_length=40)


@pytest.fixture(scope="module")
def translator(tokenizer):
    return make_translator(tokenizer)


@pytest.fixture(scope="module")
def expected(translator):
    """Each line on its own."""
    return [translator.translate([line], SEARCH)[0] for line in LINES]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for n_best, other in zip(found, expected, strict=True):
        assert [one.tokens for one in n_best] == [one.tokens for one in other]
        assert [one.text for one in n_best] == [one.text for one in other]
        np.testing.assert_allclose([one.score for one in n_best], [one.score for one in other], atol=1e-4)


def test_the_tiny_model_has_finished_and_unfinished_hypotheses(expected):
    assert {one.finished for n_best in expected for one in n_best if one is not BLANK} == {True, False}


@pytest.mark.parametrize("tokens", [1, 150, 3000])
def test_a_line_has_the_same_n_best_list_in_any_batch(translator, expected, tokens):
    search = dataclasses.replace(SEARCH, tokens=tokens)
    assert_same(translator.translate(LINES, search), expected)


def test_a_line_has_the_same_n_best_list_in_any_order_and_beside_long_neighbours(translator, expected):
    order = np.random.default_rng(1).permutation(len(LINES))
    long = "the big dog and the small cat see a dog"
    found = translator.translate([long, *(LINES[index] for index in order), long], SEARCH)[1:-1]
    assert_same(found, [expected[index] for index in order])


def test_lines_without_text_are_empty_and_never_reach_the_model(tokenizer, translator):
    without_parameters = Translator(translator.model, None, tokenizer)
    lines = ["", " ", "\t", "\u2028", "\u3000 \x0c"]
    assert without_parameters.translate(lines, SEARCH) == [[BLANK]] * len(lines)
    assert without_parameters.translate([], SEARCH) == []


@pytest.mark.parametrize("beams", [1, 3])
def test_every_score_is_that_of_the_same_tokens_rescored(translator, beams):
    lines = [line for line in LINES if line.strip()]
    search = dataclasses.replace(SEARCH, beam_size=beams, top_beams=beams)
    pairs = [(line, one) for line, n in zip(lines, translator.translate(lines, search), strict=True) for one in n]
    rescored = translator.score([line for line, _ in pairs], [one.tokens for _, one in pairs], search)
    for (_, one), other in zip(pairs, rescored, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-4)
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
        assert (one.text, one.tokens, one.finished) == (other.text, other.tokens, other.finished)


def test_text_is_scored_as_its_tokens(tokenizer, translator):
    tokens = tokenizer.encode_target(["the cat"])
    by_text, by_tokens = (translator.score(["a dog"], target, SEARCH) for target in (["the cat"], tokens))
    assert by_text == by_tokens


def test_scores_are_log_probabilities_over_the_penalty(expected):
    for n_best in expected:
        for one in n_best:
            divisor = ((5 + len(one.tokens)) / 6) ** 0.6
            assert one.score == pytest.approx(one.log_prob / divisor, rel=1e-5)


def test_outputs_are_cut_at_the_limit_of_their_own_source(tokenizer, expected):
    for line, n_best in zip(LINES, expected, strict=True):
        (source,) = tokenizer.encode_source([line])
        for one in n_best:
            assert len(one.tokens) <= len(source) + SEARCH.extra_length
            assert one.finished or len(one.tokens) == len(source) + SEARCH.extra_length


def test_an_overlong_line_is_split_and_joined_with_a_warning_that_names_it(translator, caplog):
    long = " ".join(["the dog sees a cat"] * 12)
    with caplog.at_level(logging.WARNING):
        found = translator.translate(["cat", long, "dog"], SEARCH, name="test.en")
    assert "test.en line 2 has" in caplog.text
    assert "model's limit of 40" in caplog.text
    assert [len(n_best) for n_best in found] == [3, 3, 3]
    assert_same([found[0], found[2]], translator.translate(["cat", "dog"], SEARCH))
    for one in found[1]:
        assert one.tokens.count(EOS) <= 1
        assert len(one.text.split()) >= 4
        assert one.score == pytest.approx(one.log_prob / ((5 + len(one.tokens)) / 6) ** 0.6, rel=1e-5)


def test_a_line_without_spaces_is_split_too(translator):
    ((best, *_),) = translator.translate(["dog" * 200], SEARCH)
    assert "\n" not in best.text


@pytest.mark.parametrize("line", ["ab", "a b", "  a", "one two three four", "x" * 9, " " * 7])
def test_halves_lose_nothing_and_are_both_shorter(line):
    one, other = halves(line)
    assert one + other == line
    assert 0 < len(one) < len(line)


def test_a_table_of_positions_bounds_sources_and_outputs(tokenizer):
    translator = make_translator(tokenizer, positions=Positions.LEARNED, max_positions=12)
    found = translator.translate(["a cat", "the dog sees a cat " * 5], dataclasses.replace(SEARCH, extra_length=50))
    assert all(np.isfinite(one.score) for n_best in found for one in n_best)
    assert max(len(one.tokens) for one in found[0]) <= 12
    with pytest.raises(UserError, match="max_positions"):
        translator.score(["a cat"], [[5] * 13], SEARCH)


def test_a_model_that_is_not_finite_gives_no_translation_and_a_warning(translator, caplog):
    broken = dataclasses.replace(translator, params=jax.tree.map(lambda leaf: leaf * np.nan, translator.params))
    with caplog.at_level(logging.WARNING):
        assert broken.translate(["cat", ""], SEARCH) == [[], [BLANK]]
        assert broken.best(["cat", ""], SEARCH) == ["", ""]
    assert "line 1 has no translation" in caplog.text


def test_more_translations_than_beams_are_an_error(translator):
    with pytest.raises(UserError, match=r"top_beams .* is 4 and search.beam_size is 3"):
        translator.translate(["cat"], dataclasses.replace(SEARCH, top_beams=4))


def test_progress_counts_every_line_once(translator):
    done = []
    lines = [*LINES, " ".join(["the dog sees a cat"] * 12)]
    translator.translate(lines, SEARCH, progress=done.append)
    assert sum(done) == len(lines)


def test_new_parameters_need_no_new_program(tokenizer, translator):
    translator.translate(LINES, SEARCH)
    compiled = run._cache_size()
    other = make_translator(tokenizer)
    other.translate(LINES, SEARCH)
    assert run._cache_size() == compiled


@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_batches_hold_every_sentence_once_within_the_budget_in_few_shapes(tokens):
    lengths = np.random.default_rng(2).integers(1, 200, size=500).tolist()
    batches = sentence_batches(lengths, tokens=tokens)
    assert sorted(index for batch in batches for index in batch.sentences) == list(range(500))
    for batch in batches:
        assert len(batch.sentences) <= batch.rows
        assert max(lengths[index] for index in batch.sentences) <= batch.length
        assert batch.rows * batch.length <= tokens or batch.rows == 1
    used = {padded_length(length) for length in lengths}
    assert len({(batch.rows, batch.length) for batch in batches}) <= len(used) + 1


def test_lengths_are_padded_by_less_than_half():
    lengths = range(1, 600)
    assert all(length <= padded_length(length) < max(17, 1.5 * length) for length in lengths)
    assert sorted({padded_length(length) for length in range(1, 257)}) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256]


def test_quality_has_signatures_and_wants_a_reference_for_each_line():
    same = quality(["ein Hund sieht die Katze"], ["ein Hund sieht die Katze"])
    assert (round(same.bleu), round(same.chrf)) == (100, 100)
    assert "tok:13a" in str(same)
    assert "nc:6" in str(same)
    with pytest.raises(ValueError, match="1 translations and 2 references"):
        quality(["a"], ["a", "b"])
