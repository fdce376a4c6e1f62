"""Every field of the search has a flag, which says what the field's comment says."""

import argparse
import dataclasses

import pytest

from transformer_jax.config import LengthPenalty, SearchConfig, SearchMethod
from transformer_jax.decoding.flags import add_search_flags, field_comments, search_config

CONFIG = SearchConfig(beam_size=7, suppressed=(3,), alpha=0.2)


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser()
    add_search_flags(parser)
    return parser


def test_without_flags_the_search_is_the_runs(parser):
    assert search_config(CONFIG, parser.parse_args([])) == CONFIG


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ("--beam_size 2", {"beam_size": 2}),
        ("--nbest 3", {"top_beams": 3}),
        ("--top_beams 3", {"top_beams": 3}),
        ("--batch_tokens 99 --alpha 0", {"tokens": 99, "alpha": 0.0}),
        ("--suppressed 2,17 --forced_prefix=4", {"suppressed": (2, 17), "forced_prefix": (4,)}),
        ("--suppressed=", {"suppressed": ()}),
        ("--penalty power --method sample", {"penalty": LengthPenalty.POWER, "method": SearchMethod.SAMPLE}),
    ],
)
def test_a_flag_takes_the_place_of_a_field(parser, flags, changes):
    assert search_config(CONFIG, parser.parse_args(flags.split())) == dataclasses.replace(CONFIG, **changes)


def test_every_field_can_be_given_as_it_is(parser):
    flags = []
    for field in dataclasses.fields(SearchConfig):
        value = getattr(CONFIG, field.name)
        flags.append(f"--{field.name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    assert search_config(SearchConfig(), parser.parse_args(flags)) == CONFIG


@pytest.mark.parametrize("flags", ["--beam_size x", "--penalty none_such", "--suppressed 1,x", "--no_such 1"])
def test_what_is_no_value_of_a_field_is_refused_by_its_flag(parser, flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(flags.split())
    assert flags.split()[0] in capsys.readouterr().err


def test_the_help_is_the_comments(parser):
    text = " ".join(parser.format_help().split())
    comments = field_comments(SearchConfig)
    assert comments["top_k"] == "only the k most probable tokens; 0: all"
    assert all(" ".join(comment.split()) in text for comment in comments.values())
