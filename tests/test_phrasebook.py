"""The built-in corpus: a deterministic, disjoint, learnable function from phrases to phrases."""

import datetime
import random
import subprocess
import sys

import pytest
from sentencepiece import SentencePieceNormalizer

from transformer_jax.data.phrasebook import (
    ATOM_SHARE,
    DATES,
    LISTS,
    MEASURES,
    RELATIVES,
    TIMES,
    Name,
    names,
    normalize,
    phrasebook,
    phrases,
)
from transformer_jax.errors import UserError

PAIRS = [("en", "de"), ("de", "ja"), ("ar", "en"), ("zh-Hant", "ru"), ("fa", "pt_BR")]


@pytest.fixture(scope="module")
def train():
    return phrases(split="train", size=12_000)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_translation_is_a_function_across_splits_and_seeds(source, target):
    translations = {}
    for split in ("train", "test"):
        for seed in (0, 1):
            for text, translation in phrases(source, target, split=split, seed=seed, size=300):
                assert translations.setdefault(text, translation) == translation, text


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_phrases_are_not_empty_and_are_as_sentencepiece_normalizes_them(source, target):
    normalizer = SentencePieceNormalizer(rule_name="nmt_nfkc", add_dummy_prefix=False, escape_whitespaces=False)
    for pair in phrases(source, target, split="train", size=300):
        for text in pair:
            assert text
            assert normalizer.normalize(text) == text


def test_splits_share_no_source_text_whatever_their_sizes_and_seeds(train):
    other_train, dev, test = (
        {text for text, _ in phrases(split=split, seed=seed, size=size)}
        for split, seed, size in (("train", 1, 2_000), ("dev", 2, 200), ("test", 3, 500))
    )
    train = {text for text, _ in train}
    assert (len(dev), len(test)) == (200, 500)  # and they do not repeat
    assert not (train | other_train) & (dev | test)
    assert not dev & test


def test_same_seed_gives_same_phrases_and_another_seed_others():
    made_again = phrases.__wrapped__  # without the cache
    assert phrases(split="dev", seed=5) == made_again(split="dev", seed=5)
    assert phrases(split="dev", seed=5) != phrases(split="dev", seed=6)


def test_phrases_do_not_depend_on_the_process():
    script = "from transformer_jax.data.phrasebook import phrases; print(phrases(split='train', size=200))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, encoding="utf-8").stdout
    assert printed.strip() == str(phrases(split="train", size=200))


def test_smaller_size_is_a_beginning_of_a_larger_one(train):
    assert train[:700] == phrases(split="train", size=700)


def test_atoms_are_in_train_only(train):
    atoms = phrasebook("en", "de").atoms
    assert atoms["Germany"] == "Deutschland"
    assert atoms["1 week"] == "1 Woche"
    assert not any(text in atoms for split in ("dev", "test") for text, _ in phrases(split=split))
    assert sum(text in atoms for text, _ in train[:5_000]) == pytest.approx(ATOM_SHARE * 5_000, rel=0.5)


def test_every_name_is_met_many_times_in_training(train):
    book = phrasebook("en", "de")
    text = "\n".join(text for text, _ in train)
    met = {name: text.count(called) for name, called in names(book.source).items() if called in book.atoms}
    assert len(met) > 500
    assert min(met.values()) >= 2, min(met, key=met.__getitem__)  # ten times that in 120,000


@pytest.mark.parametrize(
    ("forms", "content", "expected"),
    [
        (RELATIVES, (35, "week"), ("in 35 weeks", "in 35 Wochen")),
        (RELATIVES, (-40, "year"), ("40 years ago", "vor 40 Jahren")),
        (MEASURES, (12, "length-kilometer"), ("12 kilometers", "12 Kilometer")),
        (LISTS, (Name("territory", "ER"), Name("territory", "CN")), ("Eritrea and China", "Eritrea und China")),
        (DATES, datetime.datetime(2021, 3, 4), ("March 4, 2021", "4. März 2021")),
        (TIMES, datetime.datetime(2021, 3, 4, 15, 6), ("3:06 PM", "15:06")),
    ],
)
def test_first_form_says_what_cldr_says(forms, content, expected):
    assert phrasebook("en", "de").translate(forms, forms[0], content) == expected


def test_every_kind_is_drawn_as_often_as_its_share_says():
    book = phrasebook("en", "de")
    years_ago = sum(text.endswith(" ago") for text, _ in phrases(split="test"))
    share = book.kinds["relative time"].share / sum(kind.share for kind in book.kinds.values())
    assert years_ago / 1_000 == pytest.approx(share / 2, rel=0.4)


def test_forms_that_read_alike_have_one_translation():
    book = phrasebook("en", "de")
    rng = random.Random(0)
    drawn = [book.draw(rng, book.kinds["date"]) for _ in range(2_000)]
    in_may = [translation for text, translation in drawn if text.startswith("May ") and ", " in text]
    assert in_may
    assert all("Mai" in translation for translation in in_may)  # long and medium date are the same in May


@pytest.mark.parametrize("kind", list(phrasebook("en", "de").kinds))
def test_default_pair_has_every_kind_and_each_draws_pairs(kind):
    book = phrasebook("en", "de")
    for text, translation in (book.draw(random.Random(seed), book.kinds[kind]) for seed in range(20)):
        assert text
        assert translation


def test_locale_with_little_in_it_leaves_kinds_out():
    assert 0 < len(phrasebook("en", "vo").kinds) < len(phrasebook("en", "de").kinds)
    assert len(phrases("en", "vo", split="test", size=50)) == 50


def test_unknown_locale_is_named_with_close_ones():
    with pytest.raises(UserError, match=r"target is 'de_DX'.*de_DE"):
        phrases("en", "de_DX", split="dev")
    with pytest.raises(UserError, match="source is 'klingon'"):
        phrases("klingon", "de", split="dev")


def test_a_bad_size_is_a_user_error():
    with pytest.raises(UserError, match="size is 0"):
        phrases(split="dev", size=0)


def test_normalize_makes_plain_spaces_and_drops_direction_marks():
    assert normalize("35\u00a0%") == "35 %"
    assert normalize("3:04\u202fPM") == "3:04 PM"
    assert normalize("\u200f5\u00a0m²") == "5 m2"
