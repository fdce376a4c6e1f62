"""The fields of `SearchConfig` as flags of `decode.py`: `--beam_size 8`, `--method sample`, `--suppressed 2,17`."""

import argparse
import dataclasses
import enum
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from transformer_jax.config import SearchConfig

MORE_NAMES = {"top_beams": "--nbest", "tokens": "--batch_tokens"}  # what other systems call them


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each field. One that is not given is the run's."""
    group = parser.add_argument_group("search", "By default the run's, config.search in its config.json.")
    hints, comments = typing.get_type_hints(SearchConfig), field_comments(SearchConfig)
    for field in dataclasses.fields(SearchConfig):
        kind = hints[field.name]
        choices = list(kind) if isinstance(kind, enum.EnumType) else None
        names = [f"--{field.name}", *([MORE_NAMES[field.name]] if field.name in MORE_NAMES else [])]
        group.add_argument(
            *names,
            dest=_destination(field.name),
            type=_parser(kind),
            choices=choices,
            metavar=None if choices else _metavar(kind),
            help=(str(inspect.getdoc(kind)) if choices else comments[field.name]).replace("%", "%%"),
        )


def search_config(config: SearchConfig, options: argparse.Namespace) -> SearchConfig:
    """The run's search, with what the flags say otherwise."""
    given = {field.name: getattr(options, _destination(field.name)) for field in dataclasses.fields(SearchConfig)}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})


def field_comments(kind: type) -> dict[str, str]:
    """Field of a dataclass → the comment on its line."""
    found = re.finditer(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(kind), re.MULTILINE)
    return {match[1]: match[2] for match in found}


def numbers(text: str) -> tuple[int, ...]:
    """`2,17` → (2, 17); nothing is ()."""
    return tuple(int(number) for number in text.split(",")) if text.strip() else ()


def _destination(field: str) -> str:
    return f"search_{field}"


def _parser(kind: Any) -> Callable[[str], Any]:
    if typing.get_origin(kind) is tuple:
        return numbers
    return kind


def _metavar(kind: Any) -> str:
    return {int: "N", float: "X"}.get(kind, "ID,ID")
