"""Translations → lines of a file, and back. Lines are numbered from 1."""

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from transformer_jax.decoding.scoring import Scored
from transformer_jax.decoding.translator import Translation


class Format(enum.StrEnum):
    """How translations, and with --score the scores of given ones, are written.

    text: the best translation, a line for each line of the input. With n > 1, `line ||| text ||| score`, as Moses.
        Scores: the log-probability of the translation, then of each of its tokens.
    tsv: line, rank, score, log-probability, `finished` or `unfinished`, text.
        Scores: line, score, log-probability, then token and log-probability of each token.
    json: an object for each line of the input.
    """

    TEXT = "text"
    TSV = "tsv"
    JSON = "json"


def formatted(
    fields: Sequence[Mapping[str, Any]],
    n_bests: Sequence[Sequence[Translation]],
    *,
    format: Format,
    n: int = 1,
    first_line: int = 1,
) -> Iterator[str]:
    """The lines of the output, without their ends. `fields` of each line of the input are repeated in JSON."""
    for line, (given, n_best) in enumerate(zip(fields, n_bests, strict=True), start=first_line):
        match format:
            case Format.TEXT if n == 1:
                yield n_best[0].text if n_best else ""
            case Format.TEXT:
                yield from (f"{line} ||| {one.text} ||| {one.score:.6f}" for one in n_best)
            case Format.TSV:
                yield from _tsv(line, n_best)
            case Format.JSON:
                yield _json({"line": line, **given, "translations": [one._asdict() for one in n_best]})


def formatted_scores(
    fields: Sequence[Mapping[str, Any]], scored: Sequence[Scored], *, format: Format, first_line: int = 1
) -> Iterator[str]:
    """The lines of the output, without their ends, for translations that were given."""
    for line, (given, one) in enumerate(zip(fields, scored, strict=True), start=first_line):
        match format:
            case Format.TEXT:
                yield " ".join(f"{log_prob:.6f}" for log_prob in (one.translation.log_prob, *one.token_log_probs))
            case Format.TSV:
                head = f"{line}\t{one.translation.score:.6f}\t{one.translation.log_prob:.6f}"
                pairs = zip(one.pieces, one.token_log_probs, strict=True)
                yield head + "".join(f"\t{piece}\t{log_prob:.6f}" for piece, log_prob in pairs)
            case Format.JSON:
                found = {"pieces": one.pieces, "token_log_probs": one.token_log_probs}
                yield _json({"line": line, **given, **one.translation._asdict(), **found})


def best_texts(lines: Iterable[str], *, format: Format, n: int = 1, count: int) -> list[str]:
    """The best translation of each of `count` lines of the input, read from what `formatted` made of them."""
    if format == Format.TEXT and n == 1:
        return list(lines)
    best = [""] * count
    for line in reversed(list(lines)):  # the first of each is the best
        if format == Format.JSON:
            given = json.loads(line)
            number, text = given["line"], given["translations"][0]["text"] if given["translations"] else ""
        elif format == Format.TSV:
            number, *_, text = line.split("\t", 5)
        else:
            number, text = line.rpartition(" ||| ")[0].split(" ||| ", 1)
        best[int(number) - 1] = text
    return best


def write_lines(stream: BinaryIO, lines: Iterable[str]) -> None:
    """UTF-8, with a line feed after each line."""
    for line in lines:
        stream.write(line.encode() + b"\n")


def _tsv(line: int, n_best: Sequence[Translation]) -> Iterator[str]:
    for rank, one in enumerate(n_best, start=1):
        state = "finished" if one.finished else "unfinished"
        yield f"{line}\t{rank}\t{one.score:.6f}\t{one.log_prob:.6f}\t{state}\t{one.text}"


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False)
