"""Tuples on the command line: `--config.data.train=a.en,a.de`, the flag several times for several, or a literal.

ml_collections' own parser takes `/data/a.en,/data/a.de` for a broken literal.
"""

import ast
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import config_flags
from ml_collections.config_flags import tuple_parser


def register() -> None:
    """Teaches `config_flags` the kinds of tuples that a `Config` has."""
    config_flags.register_flag_parser_for_type(tuple[str, ...], Parser(texts))
    config_flags.register_flag_parser_for_type(tuple[int, ...], Parser(ids))
    config_flags.register_flag_parser_for_type(tuple[float, ...], Parser(numbers))


class Parser(tuple_parser.TupleParser):
    """`parse_text` gives the items of one flag's value."""

    def __init__(self, parse_text: Callable[[str], tuple]):
        self.parse_text = parse_text

    def parse(self, argument: str | Sequence[Any] | None) -> tuple:
        return self.parse_text(argument) if isinstance(argument, str) else tuple(argument or ())


def texts(argument: str) -> tuple[str, ...]:
    """`('a', 'b')`, `['a']`, `()` and `'a'` are literals; all else is one text, whatever characters it has."""
    value = _literal(argument)
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, tuple | list) and all(isinstance(item, str) for item in items):
        return tuple(items)
    return (argument,)


def ids(argument: str) -> tuple[int, ...]:
    """`(1, 2)`, `1,2`, `1` and `()`."""
    value = _literal(argument)
    items = value if isinstance(value, tuple | list) else (value,)
    if not all(type(item) is int for item in items):
        raise ValueError("expected whole numbers, such as 2,5")
    return tuple(items)


def numbers(argument: str) -> tuple[float, ...]:
    """`(1, 2.5)`, `1,2.5`, `1` and `()`."""
    value = _literal(argument)
    items = value if isinstance(value, tuple | list) else (value,)
    if not all(type(item) in (int, float) for item in items):
        raise ValueError("expected numbers, such as 1.0,2.0")
    return tuple(float(item) for item in items)


def _literal(argument: str) -> Any:
    """The value of a Python literal; None for what is not one."""
    try:
        return ast.literal_eval(argument.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
