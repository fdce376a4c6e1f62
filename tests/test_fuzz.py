"""Configurations, JSON lines and text that nobody would write: an answer, or an error for the user, and never a crash.

What was found is kept as examples.
"""

import copy
import functools
import json
import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer_jax.batch import EOS, PAD
from transformer_jax.config import Config, TokenizerConfig, TokenizerKind, flatten, from_json, to_json
from transformer_jax.config_check import check
from transformer_jax.data.corpus import Pair, read_lines
from transformer_jax.data.segmenters import NumberedPieces, Vocabulary, WordPieces
from transformer_jax.data.subwords import bpe_cut
from transformer_jax.data.tokenizer import Tokenizer, train_tokenizer
from transformer_jax.decoding.output import Format, formatted
from transformer_jax.decoding.requests import InputFormat, read_entries
from transformer_jax.errors import UserError

FEW = settings(max_examples=60, deadline=None)
TEXT = st.text(st.characters(codec=None, exclude_categories=()))  # halves of surrogate pairs too
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**9, 2**31, 2**63, 10**30, 10**400, -1, 0, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)

# Configurations

PATHS = [tuple(name.split(".")) for name in flatten(Config())]
PATHS += sorted({path[:count] for path in PATHS for count in range(1, len(path))})


def checked(text: str) -> Config | None:
    """The configuration, or None if the user is told what is wrong with it."""
    config, said = None, ""
    try:
        config = from_json(text, path="config.json")
        check(config)
    except UserError as error:
        config, said = None, str(error)
    assert len(said.encode()) < 2000
    return config


@FEW
@given(st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=2))
@example({("optimizer", "peak"): 10**400})
@example({("data", "source"): "\ud800"})
@example({("run", "steps"): 10**30})
@example({("data", "weights"): [float("nan")]})
@example({("search", "length_factor"): 1e308})
def test_a_configuration_with_other_values_is_one_or_is_refused(changes):
    values = json.loads(to_json(Config()))
    for path, value in changes.items():
        part = values
        for name in path[:-1]:
            part = part[name] if isinstance(part, dict) and isinstance(part.get(name), dict) else {}
        part[path[-1]] = copy.deepcopy(value)
    config = checked(json.dumps(values))
    if config is not None:
        assert from_json(to_json(config), path="again") == config


@FEW
@given(st.text() | VALUES.map(json.dumps))
@example("[" * 100_000)
@example('{"run": {"steps": ' + "9" * 5000 + "}}")
@example('{"model": {"width": 16, "width": 32}}')
@example("")
def test_a_configuration_of_any_text_is_refused_or_one(text):
    checked(text)


# JSON lines


def answers(lines: list[bytes]) -> list[str]:
    """The lines of the output, where nothing is translated; an error comes after what was before it."""
    found, said = [], None
    try:
        for entry in read_entries(read_lines(lines), format=InputFormat.JSON, name="in.jsonl"):
            found += formatted([entry.fields], [[]], format=Format.JSON, first_line=len(found) + 1)
    except UserError as error:
        said = str(error)
    assert said is None or re.search(rf"line {len(found) + 1:,}: ", said)
    assert said is None or len(said.encode()) < 2000
    return found


def refuse(name: str):
    raise AssertionError(f"{name} is no JSON")


def assert_json(lines: list[str]) -> None:
    for line in lines:
        json.loads(line.encode(), parse_constant=refuse)


REQUEST = b'{"source": "a cat", "prefix": "eine", "constraints": ["Katze"], "n_best": 3, "id": [1, null, {"x": 1.5}]}'
NAMES = st.sampled_from(["source", "prefix", "constraints", "n_best", "id", "line", "translations"]) | TEXT


@FEW
@given(st.dictionaries(NAMES, VALUES, max_size=4).map(lambda fields: {"source": "a", **fields}))
@example({"source": "a", "x": float("nan")})
@example({"source": "a", "x": [float("inf")]})
@example({"source": "a", "x": "\ud800"})
@example({"source": "a", "\udfff": 1})
@example({"source": "a", "n_best": 10**30})
@example({"source": "a", "n_best": True})
def test_a_request_of_any_fields_has_an_answer_in_json_or_is_refused(fields):
    assert_json(answers([REQUEST, json.dumps(fields).encode()]))


@FEW
@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=3))
@example([b'{"source": "a", "x": 1e999}'])
@example([b'{"source": "a", "x": ' + b"9" * 5000 + b"}"])
@example([b'{"source": "\xff"}'])
@example([b"\xef\xbb\xbf" + REQUEST])
@example([b'{"source": "a", "source": 1}'])
def test_lines_of_any_bytes_have_answers_or_are_refused_by_number(lines):
    found = answers([REQUEST, *lines])
    assert len(found) >= 1
    assert_json(found)


@FEW
@given(st.integers(0, len(REQUEST) - 1), st.binary(max_size=3), st.integers(0, 5))
def test_a_request_that_was_damaged_has_an_answer_or_is_refused(place, put, gone):
    damaged = (REQUEST[:place] + put + REQUEST[place + gone :]).replace(b"\n", b"")
    assert_json(answers([damaged, REQUEST]))


@pytest.mark.parametrize("depth", [99, 100, 500, *range(900, 1000, 7), 100_000])
def test_what_is_read_can_be_written_however_deep_it_is(depth):
    """Python reads deeper objects than it writes from further within a program."""
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        line = '{"source": "a", "x": ' + opening * depth + "1" * (opening != "[") + closing * depth + "}"
        assert_json(found := answers([line.encode()]))
        assert len(found) == (depth < 100)


# Text

PAIRS = [
    Pair(f"{number} red balls on {letter}", f"{letter} auf {number} rote Bälle")
    for number, letter in zip(range(200), "abcdefghijklmnopqrstuvwxyz" * 8, strict=False)
]
AWKWARD = ["\0", "▁", "▁▁a", "a\u2028b", "\U0010ffff", "\ufeff", "\u202e", "é", "e\u0301", "<pad></s><unk>", "<0x41>"]
LONG = {"a word": "a" * 100_000, "bytes": "ж" * 20_000, "spaces": " " * 1_000_000, "words": "red ab " * 10_000}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """Of each kind that needs no library of others."""
    if kind in ("unigram", "bpe"):
        return train_tokenizer(PAIRS, TokenizerConfig(kind=TokenizerKind(kind), vocab=310, byte_fallback=True))
    vocabulary = Vocabulary(("<pad>", "</s>", "<unk>", "a", "red", "▁red"), (None, 0, 1, 2, 3, 4))
    if kind == "words":
        one = WordPieces(b"", vocabulary, name="words")
    else:
        model = train_tokenizer(PAIRS, TokenizerConfig(vocab=60)).files["joint.model"]
        one = NumberedPieces(model, vocabulary, name="numbered")
    return Tokenizer(one, one)


def is_text(text: str) -> bool:
    return not re.search("[\ud800-\udfff]", text)


def ids_of(kind: str, text: str, **options) -> list[int] | None:
    """The ids, or None for what is no text, of which the user is told."""
    if kind != "words" and not is_text(text):  # words are looked up, whatever they are
        with pytest.raises(UserError, match="half of a surrogate pair"):
            tokenizer(kind).encode_source([text], **options)
        return None
    (ids,) = tokenizer(kind).encode_source([text], **options)
    assert ids[-1] == EOS
    assert not {PAD, EOS} & set(ids[:-1])
    assert max(ids) < tokenizer(kind).source_vocab
    return ids


@pytest.mark.parametrize("kind", ["unigram", "bpe", "numbered", "words"])
@FEW
@given(TEXT)
@example("\ud800")
@example("a\0b")
@example(">>xx<< a")
@example("".join(AWKWARD))
def test_any_text_has_ids_and_ids_have_a_text(kind, text):
    ids = ids_of(kind, text)
    if ids is not None:
        (back,) = tokenizer(kind).decode_source([ids])
        back.encode()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@FEW
@given(TEXT)
@example(" a  b ")
@example("a\tb\r")
def test_text_comes_back_but_for_spaces(kind, text):
    """With bytes for what was never seen, all is covered. `▁` is SentencePiece's own sign for a space."""
    for ids in (ids_of(kind, text), ids_of(kind, text, sampling=0.5, seed=1)):
        if ids is not None:
            (back,) = tokenizer(kind).decode_source([ids])
            assert back == re.sub(" +", " ", text.replace("▁", " ")).strip(" ")


@pytest.mark.parametrize("kind", ["unigram", "bpe", "numbered", "words"])
@pytest.mark.parametrize("name", LONG)
def test_a_very_long_line_is_cut_in_time(kind, name):
    assert ids_of(kind, LONG[name])


@pytest.mark.slow
def test_a_megabyte_without_a_space_is_cut_in_time():
    assert ids_of("unigram", "ab" * 500_000)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_subwords_of_a_very_long_word_are_drawn_in_time(kind):
    """Merges look at all pairs of neighbours again and again."""
    word = "redballs" * 2_000
    ids = ids_of(kind, word, sampling=0.1, seed=0) or []
    assert tokenizer(kind).decode_source([ids]) == [word]


class Counting(random.Random):
    calls = 0

    def random(self) -> float:
        self.calls += 1
        return super().random()


def test_merges_of_a_very_long_word_take_time_in_proportion_to_it():
    draw, word = Counting(0), "a" * 5_000
    pieces = bpe_cut({"a" * 2**power: -float(power) for power in range(12)}, dropout=0.1)(word, draw)
    assert "".join(pieces) == word
    assert draw.calls < 300 * len(word)


@FEW
@given(st.lists(st.integers(3, 309), max_size=30))
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_any_ids_have_a_text_that_can_be_written(kind, ids):
    (text,) = tokenizer(kind).decode_source([[number % tokenizer(kind).source_vocab for number in ids]])
    text.encode()
