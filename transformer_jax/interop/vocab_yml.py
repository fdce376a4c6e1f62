"""Marian's vocabularies: YAML with `piece: id` on each line, plain text with a piece on each line, or SentencePiece.

The YAML is read line by line, and lines end at newlines only: YAML itself also ends them at U+0085, U+2028 and U+2029,
which are pieces of real vocabularies, and allows no control characters, which are too.
"""

import json
import pathlib
import re
import sys

import sentencepiece

from transformer_jax.data.tokenizer import is_unicode
from transformer_jax.errors import UserError

ESCAPES = {
    **{"0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b"},
    **{" ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029", "\t": "\t"},
}
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
ENTRY = re.compile(r"(?P<key>\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|.*?)[ \t]*:[ \t]+(?P<id>[0-9]{1,18})[ \t]*", re.DOTALL)


def read_vocabulary(path: pathlib.Path) -> list[str]:
    """The pieces by their ids.

    Raises:
      UserError: if the file can't be read, a line of it is no entry, or a piece or an id comes twice or is missing.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}). Give the vocabulary of the model.") from error
    if path.suffix in (".spm", ".model"):
        return _sentence_pieces(content, path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}). Copy it again.") from error
    if path.suffix == ".json":
        return by_id(_json_entries(text, path), path)
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if path.suffix in (".yml", ".yaml"):
        return by_id(_yaml_entries(lines, path), path)
    pieces = lines[:-1] if lines[-1] == "" else lines
    return by_id([(piece, number, f"line {number + 1:,}") for number, piece in enumerate(pieces)], path)


Entry = tuple[str, int, str]  # a piece, its id, and where it stands


def by_id(entries: list[Entry], path: pathlib.Path) -> list[str]:
    """
    Raises:
      UserError: unless there is one piece for each id from 0 on, and no piece twice.
    """
    pieces: dict[int, str] = {}
    seen: dict[str, str] = {}
    for piece, number, place in entries:
        if not is_unicode(piece):
            raise UserError(f"{path} {place}: {piece!r} has half of a surrogate pair, which is no character.")
        if piece in seen:
            raise UserError(f"{path} {place}: the piece {piece!r} comes twice, first in {seen[piece]}.")
        if number in pieces:
            raise UserError(f"{path} {place}: {piece!r} has the id {number}, which {pieces[number]!r} has already.")
        pieces[number], seen[piece] = piece, place
    missing = next((number for number in range(len(pieces)) if number not in pieces), None)
    if missing is not None or not pieces:
        raise UserError(f"{path}: no piece has the id {missing or 0}. Copy it again.")
    return [pieces[number] for number in range(len(pieces))]


def _yaml_entries(lines: list[str], path: pathlib.Path) -> list[Entry]:
    entries, key = [], None
    for number, line in enumerate(lines, start=1):
        if key is None and (not line.strip(" \t") or line.startswith(("# ", "---", "%YAML"))):
            continue
        if key is None and line.startswith("? "):  # a long key has a line of its own, and its id the next
            key = line[2:]
            continue
        entry = ENTRY.fullmatch(line if key is None else f"{key}{line}")
        if entry is None:
            raise UserError(f"{path} line {number:,}: expected `piece: id`, found {line[:80]!r}.")
        entries.append((_unquoted(entry["key"], f"{path} line {number:,}"), int(entry["id"]), f"line {number:,}"))
        key = None
    return entries


def _unquoted(key: str, place: str) -> str:
    if key.startswith("'"):
        return key[1:-1].replace("''", "'")
    if not key.startswith('"'):
        return key

    def character(match: re.Match) -> str:
        code = match[1] or match[2] or match[3]
        if match[4] not in ESCAPES if code is None else int(code, 16) > sys.maxunicode:
            raise UserError(f"{place}: unknown escape {match[0]!r} in {key!r}.")
        return ESCAPES[match[4]] if code is None else chr(int(code, 16))

    return ESCAPE.sub(character, key[1:-1])


def _json_entries(text: str, path: pathlib.Path) -> list[Entry]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
        return [(str(piece), int(number), f"entry {place:,}") for place, (piece, number) in enumerate(pairs, start=1)]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}: expected an object of pieces with their ids ({error}).") from error


def _sentence_pieces(content: bytes, path: pathlib.Path) -> list[str]:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        return [processor.id_to_piece(number) for number in range(processor.piece_size())]
    except (RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a SentencePiece model. Give the vocabulary of the model.") from error
