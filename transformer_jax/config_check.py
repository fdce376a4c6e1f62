"""What a configuration has to be, looked at before anything is read or written."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from transformer_jax.batch import EOS
from transformer_jax.config import (
    AttentionKernel,
    Beam,
    Config,
    DataConfig,
    DType,
    OptimizerConfig,
    OptimizerKind,
    PlanKind,
    Positions,
    SearchConfig,
    SearchMethod,
    TransformerConfig,
    Tying,
    flatten,
    from_json,
    to_json,
)
from transformer_jax.errors import UserError


class Range(NamedTuple):
    """The numbers that a field may have; None is allowed wherever the field's type allows it."""

    expected: str
    holds: Callable[[float], bool]


def _at_least(low: int, most: int | None = None) -> Range:
    if most is None:
        return Range(f"{low} or more", lambda value: low <= value < math.inf)
    return Range(f"{low} or more, and at most {most:,}", lambda value: low <= value <= most)


COUNT = 2**31 - 1  # what int32 can count: steps, tokens, pairs
SIZE = 2**20  # of an axis of a parameter; far more than any model has, and no memory is asked for what is above it
LAYERS = 1000
BEAMS = 10_000
ABOVE_ZERO = Range("more than 0", lambda value: 0 < value < math.inf)
SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
PART = Range("from 0 to 1", lambda value: 0 <= value <= 1)

RANGES: dict[str, Range] = {
    **dict.fromkeys(("model.encoder_layers", "model.decoder_layers"), _at_least(1, LAYERS)),
    **dict.fromkeys(
        (
            *("model.width", "model.heads", "model.key_width", "model.value_width", "model.feed_forward"),
            *("model.max_positions", "model.relative_distance", "model.vocab_multiple"),
        ),
        _at_least(1, SIZE),
    ),
    **dict.fromkeys(
        (
            *("data.tokenizer.sample", "data.plan.tokens", "data.plan.shapes", "data.plan.row_length"),
            *("data.plan.rows_multiple", "optimizer.accumulate", "run.steps", "run.log_every", "run.eval_every"),
            *("run.checkpoint_every", "run.keep", "run.patience", "run.average"),
        ),
        _at_least(1, COUNT),
    ),
    "data.max_ratio": _at_least(1),
    "data.max_length": _at_least(2, COUNT),  # a token and EOS
    **dict.fromkeys(("model.source_vocab", "model.target_vocab", "data.tokenizer.vocab"), _at_least(4, SIZE)),
    "model.first_position": _at_least(0, SIZE),
    **dict.fromkeys(("optimizer.warmup", "run.keep_best", "run.samples"), _at_least(0, COUNT)),
    **dict.fromkeys(("optimizer.peak", "optimizer.weight_decay"), _at_least(0)),
    **dict.fromkeys(("optimizer.epsilon", "optimizer.clip", "model.norm_epsilon"), ABOVE_ZERO),
    **dict.fromkeys(("model.dropout", "model.attention_dropout", "model.feed_forward_dropout"), SHARE),
    **dict.fromkeys(("optimizer.beta1", "optimizer.beta2", "optimizer.ema", "optimizer.label_smoothing"), SHARE),
    **dict.fromkeys(("data.tokenizer.sampling", "optimizer.floor"), PART),
    "data.tokenizer.coverage": Range("more than 0 and at most 1", lambda value: 0 < value <= 1),
    "run.seed": Range("from 0 to 2147483647", lambda value: 0 <= value < 2**31),
    **dict.fromkeys(
        ("mesh.data", "mesh.fsdp", "mesh.tensor"),
        Range("1 or more, or -1 for all devices that are left", lambda value: value == -1 or 1 <= value <= COUNT),
    ),
}
SEARCH_RANGES: dict[str, Range] = {
    **dict.fromkeys(("beam_size", "top_beams", "groups"), _at_least(1, BEAMS)),
    "tokens": _at_least(1, COUNT),
    **dict.fromkeys(("extra_length", "min_length", "no_repeat_ngram", "top_k"), _at_least(0, SIZE)),
    "length_factor": _at_least(0, 1000),
    **dict.fromkeys(("repetition_penalty", "temperature"), ABOVE_ZERO),
    **dict.fromkeys(("min_p", "epsilon"), SHARE),
    "alpha": Range("a number", math.isfinite),
    "diversity": _at_least(0),
    "top_p": Range("more than 0 and at most 1", lambda value: 0 < value <= 1),
    "seed": Range("from 0 to 2147483647", lambda value: 0 <= value < 2**31),
}


def check(config: Config) -> None:
    """Refuses a configuration with which no run can come to its end.

    Raises:
      UserError: for the first field that is wrong.
    """
    from_json(to_json(config), path="config")  # the types of all fields
    _check_ranges(flatten(config), RANGES, name="config", defaults=flatten(Config()))
    check_search(config.search, name="config.search")
    check_search(config.dev_search, name="config.dev_search")
    _check_heads(config.model)
    _check_positions(config.model, config.data)
    _check_tying(config)
    _check_kernel(config.model)
    _check_corpora(config.data)
    _check_plan(config.data)
    _check_optimizer(config.optimizer, rows_multiple=config.data.plan.rows_multiple)
    _check_mesh(config)


def check_search(search: SearchConfig, *, name: str = "search") -> None:
    """Refuses a search that finds nothing; `name` is what the message calls it.

    Raises:
      UserError: for the first field that is wrong.
    """
    _check_ranges(flatten(search), SEARCH_RANGES, name=name, defaults=flatten(SearchConfig()))
    if search.method == SearchMethod.BEAM:
        _check_beams(search, name=name)
    if search.method == SearchMethod.SAMPLE and search.groups > 1:
        raise UserError(
            f"{name}.groups is {search.groups}, but {name}.method is sample, and samples have none. "
            "Set groups=1, or method=beam."
        )
    for field, least in (("forced_prefix", EOS + 1), ("suppressed", 0)):
        wrong = [token for token in getattr(search, field) if token < least]
        if wrong:
            raise UserError(f"{name}.{field} has the id {wrong[0]}; expected ids from {least}. Leave it out.")


def _check_beams(search: SearchConfig, *, name: str) -> None:
    if search.top_beams > search.beam_size:
        raise UserError(
            f"{name}.top_beams (n-best) is {search.top_beams} and {name}.beam_size is {search.beam_size}: "
            "expected 1 ≤ top_beams ≤ beam_size. Widen the beam or ask for fewer."
        )
    if search.groups > 1 and search.beam == Beam.FULL:
        raise UserError(
            f"{name}.groups is {search.groups}, but {name}.beam is full, and groups of beams shrink. "
            "Set groups=1, or beam=shrinking."
        )
    if search.beam_size % search.groups:
        raise UserError(
            f"{name}.groups is {search.groups}, which does not divide {name}.beam_size ({search.beam_size}): groups "
            "are equally wide. Change one of them."
        )


def check_divides(model: TransformerConfig, sizes: Mapping[str, int]) -> None:
    """Refuses a mesh whose axes, of these sizes, do not divide what they split; -1 is not known yet.

    Raises:
      UserError: for the first field that is not divided.
    """
    for axis, field in (("fsdp", "width"), ("tensor", "heads"), ("tensor", "feed_forward")):
        value = getattr(model, field)
        if value % max(sizes[axis], 1):
            raise UserError(
                f"config.mesh.{axis} is {sizes[axis]}, which does not divide config.model.{field} ({value}). "
                "Change one of them."
            )


def _check_ranges(
    values: Mapping[str, object], ranges: Mapping[str, Range], *, name: str, defaults: Mapping[str, object]
) -> None:
    for field, allowed in ranges.items():
        value = values[field]
        if isinstance(value, int | float) and not allowed.holds(value):
            raise UserError(
                f"{name}.{field} is {value}; expected {allowed.expected}. Change it; its default is {defaults[field]}."
            )


def _check_heads(model: TransformerConfig) -> None:
    if model.width % model.heads and None in (model.key_width, model.value_width):
        raise UserError(
            f"config.model.width is {model.width}, which config.model.heads ({model.heads}) does not divide. "
            "Change one of them, or set key_width and value_width of a head."
        )


def _check_positions(model: TransformerConfig, data: DataConfig) -> None:
    if model.positions == Positions.SINUSOIDAL and model.width % 2:
        raise UserError(
            f"config.model.width is {model.width}; sinusoids need an even one. Change it, or set model.positions."
        )
    head_width = model.key_width or model.width // model.heads
    if model.positions == Positions.ROTARY and head_width % 2:
        raise UserError(
            f"the width of a head is {head_width} (config.model.key_width, or width / heads); rotary positions need "
            "an even one. Set key_width."
        )
    if model.positions == Positions.LEARNED and model.max_positions < data.max_length:
        raise UserError(
            f"config.model.max_positions is {model.max_positions}, fewer than config.data.max_length "
            f"({data.max_length}). Raise it to that, or lower max_length."
        )


def _check_tying(config: Config) -> None:
    if config.model.tying != Tying.ALL:
        return
    if not config.data.tokenizer.joint:
        raise UserError(
            "config.model.tying is all, but config.data.tokenizer.joint is False: the two languages have ids of their "
            "own. Set joint=True, or tying=decoder."
        )
    vocabularies = config.model.source_vocab, config.model.target_vocab
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"config.model.tying is all, but source_vocab is {vocabularies[0]} and target_vocab {vocabularies[1]}. "
            "Leave both unset, or set tying=decoder."
        )


def _check_kernel(model: TransformerConfig) -> None:
    if model.attention_kernel == AttentionKernel.CUDNN and model.dtype != DType.BFLOAT16:
        raise UserError(
            f"config.model.attention_kernel is cudnn, but config.model.dtype is {model.dtype}; it needs bfloat16. "
            "Set dtype=bfloat16, or attention_kernel=xla."
        )


def _check_corpora(data: DataConfig) -> None:
    if not data.train:
        raise UserError("config.data.train is empty. Give at least one corpus, such as phrasebook or a.en,a.de.")
    weights = data.weights
    if weights and (len(weights) != len(data.train) or not all(ABOVE_ZERO.holds(weight) for weight in weights)):
        raise UserError(
            f"config.data.weights is {weights}; expected {len(data.train)} numbers above 0, one for each corpus of "
            "config.data.train, or () for once each."
        )


def _check_plan(data: DataConfig) -> None:
    """The longest pair that is let in has to fit."""
    plan = data.plan
    row, field = data.max_length, "config.data.max_length"
    if plan.kind == PlanKind.PACKING:
        if plan.row_length < data.max_length:
            raise UserError(
                f"config.data.plan.row_length is {plan.row_length}, less than config.data.max_length "
                f"({data.max_length}): a pair may be longer than a row. Raise it to that, or lower max_length."
            )
        row, field = plan.row_length, "config.data.plan.row_length"
    least = plan.rows_multiple * row
    if plan.tokens < least:
        raise UserError(
            f"config.data.plan.tokens is {plan.tokens}; expected room for rows_multiple ({plan.rows_multiple}) rows of "
            f"{field} ({row}). Raise it to {least}, or lower those."
        )


def _check_optimizer(optimizer: OptimizerConfig, *, rows_multiple: int) -> None:
    if rows_multiple % optimizer.accumulate:
        raise UserError(
            f"config.data.plan.rows_multiple is {rows_multiple}, which config.optimizer.accumulate "
            f"({optimizer.accumulate}) does not divide. Set it to a multiple of accumulate × the number of devices."
        )
    if optimizer.weight_decay and optimizer.kind != OptimizerKind.ADAMW:
        raise UserError(
            f"config.optimizer.weight_decay is {optimizer.weight_decay}, but only config.optimizer.kind adamw has one, "
            f"and it is {optimizer.kind}. Set kind=adamw, or weight_decay=0."
        )


def _check_mesh(config: Config) -> None:
    sizes = dataclasses.asdict(config.mesh)
    rest = [f"config.mesh.{axis}" for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise UserError(f"{' and '.join(rest)} are -1, but only one axis can have the devices that are left. Set one.")
    check_divides(config.model, sizes)
