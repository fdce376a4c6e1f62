"""One side of a tokenizer: text → pieces → ids and back. Four kinds, and all have the ids of this library.

`SentencePieces` are numbered by their model. `NumberedPieces` are cut by a SentencePiece model and numbered by a list
of their own, as in Marian and its descendants. `BytePieces` are the byte-level BPE of BART and its relatives.
`WordPieces` are those of subword-nmt and fastBPE, which cut words that were tokenised before.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import sentencepiece

from transformer_jax.batch import EOS, PAD, UNK
from transformer_jax.data.subwords import SPACE, SubwordSampler
from transformer_jax.errors import UserError

NO_BOS = -1
MODEL, VOCABULARY, BYTES, CODES = "model", "vocabulary.json", "bytes.json", "codes"  # how the names of their files end
CONTINUED, END_OF_WORD = "@@", "</w>"  # the end of a piece that is not its word's last, and in the list of merges
LANGUAGE_TAG = re.compile(r">>[^<>\s]+<<")  # OPUS-MT's: which language to translate into


@runtime_checkable
class Segmenter(Protocol):
    """One side of a tokenizer."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """All pieces by their ids."""
        ...

    @property
    def files(self) -> dict[str, bytes]:
        """What it is made of, by the end of the file's name."""
        ...

    def piece_size(self) -> int: ...

    def id_to_piece(self, token: int) -> str: ...

    def piece_to_id(self, piece: str) -> int: ...

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of each line, EOS last."""
        ...

    def sample(self, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        """As `encode`, cut at random: see `transformer_jax.data.subwords`."""
        ...

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, which has no EOS and no pad."""
        ...


class Vocabulary(NamedTuple):
    """A numbered list of pieces which came with numbers of its own."""

    pieces: tuple[str, ...]  # by the ids of this library
    ids: tuple[int | None, ...]  # the number that each came with; None: it had none


def renumbered(pieces: Sequence[str], *, eos: int, unk: int, pad: int | None) -> Vocabulary:
    """Pieces by their own numbers → with pad 0, EOS 1 and unknown 2, and all others in their order.

    `pad` is the piece from which their decoder starts, if it starts from one of its own; without one 0 is a new piece.
    """
    special = (pad, eos, unk)
    order: list[int | None] = [*special, *(number for number in range(len(pieces)) if number not in special)]
    free = next(name for name in ("<pad>", "<start>", "<0>") if name not in pieces)
    return Vocabulary(tuple(free if number is None else pieces[number] for number in order), tuple(order))


class SentencePieces:
    """A SentencePiece model with the ids of this library.

    Raises:
      UserError: if it cannot be read, or has other ids than this library's for pad, EOS, unknown and BOS.
    """

    def __init__(self, model: bytes, *, name: str):
        self._model = model
        self._processor = _processor(model, name)
        found = tuple(getattr(self._processor, f"{kind}_id")() for kind in ("pad", "eos", "unk", "bos"))
        if found != (PAD, EOS, UNK, NO_BOS):
            raise UserError(
                f"{name}: the ids of pad, EOS, unknown and BOS are {', '.join(map(str, found))}; expected "
                f"{PAD}, {EOS}, {UNK}, {NO_BOS}. Train it with --pad_id={PAD} --eos_id={EOS} --unk_id={UNK} "
                f"--bos_id={NO_BOS}."
            )
        self._samplers: dict[float, SubwordSampler] = {}

    @property
    def files(self) -> dict[str, bytes]:
        return {MODEL: self._model}

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(map(self.id_to_piece, range(self.piece_size())))

    def piece_size(self) -> int:
        return self._processor.piece_size()

    def id_to_piece(self, token: int) -> str:
        return self._processor.id_to_piece(int(token))

    def piece_to_id(self, piece: str) -> int:
        return self._processor.piece_to_id(piece)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(lines), add_eos=True)

    def sample(self, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        if sampling not in self._samplers:
            self._samplers[sampling] = SubwordSampler(self._model, sampling=sampling)
        return self._samplers[sampling].encode(lines, seed=seed)

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return self._processor.decode([list(map(int, sequence)) for sequence in sequences])


class _Numbered:
    """What the two kinds share whose pieces have a list."""

    def __init__(self, vocabulary: Vocabulary, file: tuple[str, bytes]):
        self.vocabulary = vocabulary
        self._file = file
        self._ids = {piece: number for number, piece in enumerate(vocabulary.pieces)}

    @property
    def files(self) -> dict[str, bytes]:
        return dict([self._file, (VOCABULARY, _to_json(self.vocabulary))])

    @property
    def pieces(self) -> tuple[str, ...]:
        return self.vocabulary.pieces

    def piece_size(self) -> int:
        return len(self.pieces)

    def id_to_piece(self, token: int) -> str:
        return self.pieces[token]

    def piece_to_id(self, piece: str) -> int:
        return self._ids.get(piece, UNK)


class NumberedPieces(_Numbered):
    """A SentencePiece model cuts, a list numbers. A piece that is not in the list is unknown.

    A language tag of the list, such as `>>deu<<`, that a line begins with is one piece.

    Raises:
      UserError: if the model cannot be read.
    """

    def __init__(self, model: bytes, vocabulary: Vocabulary, *, name: str):
        super().__init__(vocabulary, (MODEL, model))
        self._model = model
        self._processor = _processor(model, name)
        self._text_ids = {piece: number for piece, number in self._ids.items() if number not in (PAD, EOS)}
        self._samplers: dict[float, SubwordSampler] = {}

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        tags, texts = self._without_tags(lines)
        cut = self._processor.encode(texts, out_type=str)
        return [[*tag, *map(self._text_id, pieces), EOS] for tag, pieces in zip(tags, cut, strict=True)]

    def sample(self, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        if sampling not in self._samplers:
            self._samplers[sampling] = SubwordSampler(self._model, sampling=sampling)
        tags, texts = self._without_tags(lines)
        drawn = self._samplers[sampling].encode(texts, seed=seed)
        return [
            [*tag, *(self._text_id(self._processor.id_to_piece(number)) for number in ids[:-1]), EOS]
            for tag, ids in zip(tags, drawn, strict=True)
        ]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        texts = (self._processor.decode([self.pieces[token] for token in sequence]) for sequence in sequences)
        # What only the other language's model knows comes back as it was, with its mark for a space.
        return [text.replace(SPACE, " ").strip() if SPACE in text else text for text in texts]

    def _text_id(self, piece: str) -> int:
        return self._text_ids.get(piece, UNK)

    def _without_tags(self, lines: Sequence[str]) -> tuple[list[list[int]], list[str]]:
        """The ids of the language tags that lines begin with, at most one each, and the lines without them."""
        found = [LANGUAGE_TAG.match(line) for line in lines]
        known = [match if match and match[0] in self._ids else None for match in found]
        tags = [[self._ids[match[0]]] if match else [] for match in known]
        return tags, [line[match.end() :] if match else line for line, match in zip(lines, known, strict=True)]


class BytePieces(_Numbered):
    """Byte-level BPE as the `tokenizers` library defines it, in its own JSON, numbered by a list.

    What its post-processor puts around a line, such as `<s>` and `</s>`, is part of the ids.

    Raises:
      UserError: if the library is not installed, or the definition cannot be read.
    """

    def __init__(self, definition: bytes, vocabulary: Vocabulary, *, name: str):
        super().__init__(vocabulary, (BYTES, definition))
        self._name = name
        self._tokenizer = _byte_tokenizer(definition, name)
        self._ours = {number: ours for ours, number in enumerate(vocabulary.ids) if number is not None}

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        found = (
            [self._ours.get(number, UNK) for number in one.ids] for one in self._tokenizer.encode_batch(list(lines))
        )
        return [ids if ids[-1:] == [EOS] else [*ids, EOS] for ids in found]

    def sample(self, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        raise UserError("config.data.tokenizer.sampling needs SentencePiece, but this is byte-level BPE. Set it to 0.")

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        theirs = [[self.vocabulary.ids[token] for token in sequence] for sequence in sequences]
        known: Any = [[number for number in numbers if number is not None] for numbers in theirs]
        return self._tokenizer.decode_batch(known, skip_special_tokens=True)


class WordPieces(_Numbered):
    """Words between spaces, cut by the merges of subword-nmt or fastBPE; without merges they are pieces already.

    A piece that is not the last of its word ends with `@@`.

    Raises:
      UserError: if the merges cannot be read, or the library `tokenizers`, which applies them, is not installed.
    """

    def __init__(self, codes: bytes, vocabulary: Vocabulary, *, name: str):
        super().__init__(vocabulary, (CODES, codes))
        self._bpe = _word_bpe(codes, name) if codes else None

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        return [[*(self._text_id(piece) for word in line.split() for piece in self._cut(word)), EOS] for line in lines]

    def sample(self, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        raise UserError("config.data.tokenizer.sampling needs SentencePiece, but these are merges. Set it to 0.")

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        texts = (" ".join(map(self.id_to_piece, sequence)) for sequence in sequences)
        return [f"{text} ".replace(f"{CONTINUED} ", "").rstrip(" ") for text in texts]

    def _cut(self, word: str) -> list[str]:
        if self._bpe is None:
            return [word]
        found = [token.value for token in self._bpe.tokenize(word)]
        return [one.removesuffix(END_OF_WORD) if one.endswith(END_OF_WORD) else one + CONTINUED for one in found]

    def _text_id(self, piece: str) -> int:
        number = self.piece_to_id(piece)
        return UNK if number in (PAD, EOS) else number


def segmenter(files: dict[str, bytes], *, name: str) -> Segmenter:
    """The one that is made of these files, which are named by how their names end; `name` is for messages."""
    match sorted(files):
        case [one] if one == MODEL:
            return SentencePieces(files[MODEL], name=f"{name}.{MODEL}")
        case [one, two] if (one, two) == (MODEL, VOCABULARY):
            vocabulary = _from_json(files[VOCABULARY], name=f"{name}.{VOCABULARY}")
            return NumberedPieces(files[MODEL], vocabulary, name=f"{name}.{MODEL}")
        case [one, two] if (one, two) == (BYTES, VOCABULARY):
            vocabulary = _from_json(files[VOCABULARY], name=f"{name}.{VOCABULARY}")
            return BytePieces(files[BYTES], vocabulary, name=f"{name}.{BYTES}")
        case [one, two] if (one, two) == (CODES, VOCABULARY):
            vocabulary = _from_json(files[VOCABULARY], name=f"{name}.{VOCABULARY}")
            return WordPieces(files[CODES], vocabulary, name=f"{name}.{CODES}")
        case _:
            raise UserError(f"{name}: expected a tokenizer's files, found {', '.join(sorted(files)) or 'none'}.")


def _processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    if not model:  # of which SentencePiece itself makes one that has no pieces
        raise UserError(f"{name}: empty. Give a .model file that spm_train wrote.")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        processor.id_to_piece(list(range(processor.piece_size())))  # raises where one is not UTF-8
    except (RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: not a SentencePiece model. Give a .model file that spm_train wrote.") from error
    return processor


def _byte_tokenizer(definition: bytes, name: str) -> Any:
    try:
        import tokenizers  # only models with byte-level BPE need it
    except ImportError as error:
        raise UserError(f"{name}: byte-level BPE needs the library tokenizers: pip install tokenizers.") from error
    try:
        return tokenizers.Tokenizer.from_str(definition.decode())
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{name}: not a tokenizer of the library tokenizers ({error}).") from error


def _word_bpe(codes: bytes, name: str) -> Any:
    """The merges of subword-nmt (version 0.2) or of fastBPE as a model of the library `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{name}: merges need the library tokenizers: pip install tokenizers.") from error
    try:
        lines = codes.decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    header = lines.pop(0).split() if lines[0].startswith("#version") else []
    merges: dict[tuple[str, str], None] = {}  # ordered, each once
    for number, line in enumerate(lines, start=2 if header else 1):
        parts = line.rstrip("\r").split(" ")
        if line and (len(parts) not in (2, 3) or not all(parts)):
            raise UserError(f"{name} line {number:,}: expected two pieces and perhaps a count, found {line[:80]!r}.")
        if line and len(parts) == 2 and header != ["#version:", "0.2"]:
            raise UserError(
                f"{name}: merges of subword-nmt's version 0.1, in which the end of a word is a piece of its own, can't "
                "be applied. Apply them to the text beforehand, and import the model without them."
            )
        if line:
            merges.setdefault((parts[0], parts[1]))
    known = {piece for pair in merges for piece in (*pair, "".join(pair))}
    alphabet = {character for piece in known for character in piece.removesuffix(END_OF_WORD)}
    known |= alphabet | {character + END_OF_WORD for character in alphabet}
    vocabulary = {piece: number for number, piece in enumerate(["<unk>", *sorted(known - {"<unk>"})])}
    return tokenizers.models.BPE(vocabulary, list(merges), unk_token="<unk>", end_of_word_suffix=END_OF_WORD)


def _to_json(vocabulary: Vocabulary) -> bytes:
    return (json.dumps(vocabulary._asdict(), ensure_ascii=False, indent=0) + "\n").encode()


def _from_json(content: bytes, *, name: str) -> Vocabulary:
    try:
        values = json.loads(content)
        vocabulary = Vocabulary(tuple(values["pieces"]), tuple(values["ids"]))
        "".join(vocabulary.pieces).encode()  # half of a surrogate pair, which JSON can name, is no text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{name}: not the vocabulary of a tokenizer ({error}). Restore it.") from error
    pieces, ids = vocabulary
    are_numbers = all(number is None or (type(number) is int and 0 <= number < 2**31) for number in ids)
    if len(pieces) < 3 or len(pieces) != len(ids) or len(set(pieces)) < len(pieces) or not are_numbers:
        raise UserError(f"{name}: expected different pieces, with a number each. Restore it.")
    return vocabulary
