"""Lines → what a model is given at once: the tokens of a line, or of the parts of one that is too long."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.batch import EOS
from transformer_jax.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Part(NamedTuple):
    line: int  # its index among the lines
    tokens: list[int]  # EOS last
    prefix: tuple[int, ...] = ()  # with which its translations begin
    constraints: tuple[tuple[int, ...], ...] = ()  # which its translations have


def parts_of_lines(
    lines: Sequence[str], tokenizer: Tokenizer, *, limit: int, name: str = "input", first_line: int = 1
) -> list[Part]:
    """The parts of all lines in order. Lines without text have none.

    A line of more than `limit` tokens, EOS counted, has several, and a warning that names it and the input, `name`,
    the number of whose first line is `first_line`.
    """
    parts = []
    for line, tokens in enumerate(tokenizer.encode_source(lines)):
        if not lines[line].strip():
            continue
        cut = [tokens] if len(tokens) <= limit else _cut(lines[line], tokenizer, limit)
        parts += [Part(line, tokens) for tokens in cut if tokens != [EOS]]
        if len(cut) > 1:
            log.warning(
                f"{name} line {first_line + line:,} has {len(tokens):,} tokens, more than the model's limit of "
                f"{limit}: it is translated in {len(cut)} parts."
            )
    return parts


def halves(line: str) -> tuple[str, str]:
    """A line cut at the space nearest to its middle, or in the very middle if its inner half has none."""
    middle, quarter = len(line) // 2, len(line) // 4
    spaces = [place for place in range(middle - quarter, middle + quarter) if line[place].isspace()]
    cut = min(spaces, key=lambda place: abs(place - middle), default=middle) or middle
    return line[:cut], line[cut:]


def _cut(line: str, tokenizer: Tokenizer, limit: int) -> list[list[int]]:
    """Halves the line, and its halves, until each part is within the limit."""
    (tokens,) = tokenizer.encode_source([line])
    if len(tokens) <= limit or len(line) < 2:
        return [tokens]
    return [tokens for half in halves(line) for tokens in _cut(half, tokenizer, limit)]
