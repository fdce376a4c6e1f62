"""A configuration that no run could come to its end with is refused by the name of its field, before all else."""

import dataclasses
import math
import typing

import pytest
from test_configs import CONFIGS, load

from transformer_jax.config import (
    AttentionKernel,
    Config,
    PlanKind,
    Positions,
    SearchConfig,
    SearchMethod,
    Tying,
    flatten,
)
from transformer_jax.config_check import RANGES, SEARCH_RANGES, check, check_search
from transformer_jax.errors import UserError
from transformer_jax.training.loop import train


def changed(**values) -> Config:
    """The default configuration with other values of `model__width` and the like."""
    config = Config()
    for name, value in values.items():
        *path, field = name.split("__")
        part = config
        for step in path:
            part = getattr(part, step)
        assert hasattr(part, field)
        setattr(part, field, value)
    return config


def number_fields(kind, prefix="") -> set[str]:
    """The fields of a config whose type is a number, optional or not."""
    found = set()
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= number_fields(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *typing.get_args(hint)} and typing.get_origin(hint) is not tuple:
            found.add(prefix + name)
    return found


def test_every_number_has_a_range():
    fields = {name for name in number_fields(Config) if not name.startswith(("search.", "dev_search."))}
    assert fields == set(RANGES)
    assert number_fields(SearchConfig) == set(SEARCH_RANGES)


def test_the_default_is_fine():
    check(Config())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_is_fine(name):
    check(load(name))


@pytest.mark.parametrize("field", sorted(RANGES))
def test_a_number_outside_its_range_is_refused_by_name(field):
    value = -2.5 if field in ("data.max_ratio", "optimizer.clip") or type(flatten(Config())[field]) is float else -2
    with pytest.raises(UserError, match=rf"^config\.{field} is {value}; expected .*\. Change it; its default is"):
        check(changed(**{field.replace(".", "__"): value}))


@pytest.mark.parametrize("field", ["model.dropout", "optimizer.peak", "data.tokenizer.coverage", "search.alpha"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_are_finite(field, value):
    with pytest.raises(UserError, match=f"config.{field} is {value}"):
        check(changed(**{field.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run__steps": 0}, "config.run.steps is 0; expected 1 or more"),
        ({"model__dropout": 1.0}, "config.model.dropout is 1.0; expected at least 0 and less than 1"),
        ({"optimizer__ema": 1.0}, "config.optimizer.ema is 1.0"),
        ({"mesh__data": 0}, "config.mesh.data is 0; expected 1 or more, or -1"),
        ({"mesh__fsdp": -1}, "config.mesh.data and config.mesh.fsdp are -1, but only one axis"),
        ({"mesh__fsdp": 3}, r"config.mesh.fsdp is 3, which does not divide config.model.width \(512\)"),
        ({"mesh__tensor": 16}, r"config.mesh.tensor is 16, which does not divide config.model.heads \(8\)"),
        ({"model__width": "wide"}, "model: width is 'wide'; expected"),
        ({"run__steps": 1.5}, "run: steps is 1.5; expected"),
        ({"model__heads": 7}, r"width is 512, which config.model.heads \(7\) does not divide"),
        ({"model__width": 511, "model__heads": 7}, "config.model.width is 511; sinusoids need an even one"),
        ({"model__positions": Positions.ROTARY, "model__key_width": 5}, "the width of a head is 5"),
        (
            {"model__positions": Positions.LEARNED, "model__max_positions": 100},
            r"max_positions is 100, fewer than config.data.max_length \(256\)",
        ),
        ({"data__tokenizer__joint": False}, "tying is all, but config.data.tokenizer.joint is False"),
        ({"model__source_vocab": 10, "model__target_vocab": 11}, "source_vocab is 10 and target_vocab 11"),
        ({"model__attention_kernel": AttentionKernel.CUDNN}, "attention_kernel is cudnn, .* needs bfloat16"),
        ({"data__train": ()}, "config.data.train is empty"),
        ({"data__weights": (1.0, 2.0)}, r"weights is \(1.0, 2.0\); expected 1 numbers above 0"),
        ({"data__weights": (0.0,)}, r"weights is \(0.0,\); expected 1 numbers above 0"),
        ({"data__plan__kind": PlanKind.PACKING}, r"row_length is 128, less than config.data.max_length \(256\)"),
        ({"data__plan__tokens": 255}, r"tokens is 255; expected room for rows_multiple \(1\) rows .* to 256"),
        (
            {"data__plan__kind": PlanKind.PACKING, "data__plan__row_length": 512, "data__plan__rows_multiple": 9},
            r"tokens is 4096; expected room for rows_multiple \(9\) rows of .*row_length \(512\)\. Raise it to 4608",
        ),
        ({"optimizer__accumulate": 2}, r"rows_multiple is 1, which config.optimizer.accumulate \(2\) does not divide"),
        ({"optimizer__weight_decay": 0.1}, "weight_decay is 0.1, but only config.optimizer.kind adamw has one"),
        ({"search__top_beams": 5}, r"config.search.top_beams \(n-best\) is 5 and config.search.beam_size is 4"),
        ({"dev_search__beam_size": 0}, "config.dev_search.beam_size is 0; expected 1 or more"),
        ({"search__groups": 3}, r"config.search.groups is 3, which does not divide config.search.beam_size \(4\)"),
        ({"search__top_p": 0.0}, "config.search.top_p is 0.0; expected more than 0 and at most 1"),
        ({"search__repetition_penalty": 0.0}, "config.search.repetition_penalty is 0.0; expected more than 0"),
        ({"search__forced_prefix": (5, 1)}, "config.search.forced_prefix has the id 1; expected ids from 2"),
        ({"search__suppressed": (-1,)}, "config.search.suppressed has the id -1; expected ids from 0"),
        (
            {"search__method": SearchMethod.SAMPLE, "search__groups": 2},
            "config.search.groups is 2, but config.search.method is sample",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(values, message):
    with pytest.raises(UserError, match=message):
        check(changed(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"model__heads": 7, "model__key_width": 64, "model__value_width": 64},
        {"model__positions": Positions.ROTARY, "model__width": 9, "model__heads": 1, "model__key_width": 8},
        {"data__tokenizer__joint": False, "model__tying": Tying.DECODER},
        {"optimizer__accumulate": 2, "data__plan__rows_multiple": 4},
        {"data__train": ("a.tsv", "b.tsv"), "data__weights": (1.0, 0.5)},
        {"search__method": SearchMethod.SAMPLE, "search__top_beams": 9},
    ],
)
def test_what_fits_together_is_let_through(values):
    check(changed(**values))


def test_a_search_alone_is_refused_in_the_same_words():
    with pytest.raises(UserError, match=r"^search\.tokens is 0; expected 1 or more"):
        check_search(SearchConfig(tokens=0))


def test_training_writes_nothing_under_a_wrong_configuration(tmp_path):
    with pytest.raises(UserError, match=r"config\.run\.steps is 0"):
        train(changed(run__steps=0), tmp_path / "run")
    assert not list(tmp_path.iterdir())
