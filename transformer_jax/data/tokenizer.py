"""Text to ids and back, for two sides; and SentencePiece models trained for it.

Ids are the same in every tokenizer of this library: pad 0, EOS 1, unknown 2, no BOS. What one is made of, for each
side, is in `transformer_jax.data.segmenters`.

A tokenizer that is trained here does not normalise text, but that SentencePiece takes away spaces at the ends and all
but one of a run of them: any other text of known characters comes back from `decode` as it went in. SentencePiece's
usual normalisation, NFKC, makes "m2" of "m²", "..." of "…" and a plain space of a no-break one, and a model whose
targets never have them cannot write them.
"""

import hashlib
import io
import itertools
import json
import os
import pathlib
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece

from transformer_jax import disk
from transformer_jax.batch import EOS, PAD, UNK
from transformer_jax.config import TokenizerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.segmenters import (
    BYTES,
    CODES,
    MODEL,
    NO_BOS,
    VOCABULARY,
    Segmenter,
    SentencePieces,
    segmenter,
)
from transformer_jax.errors import UserError

FIELD = "config.data.tokenizer"
CHUNK = 8192  # pairs encoded together, and which share a seed of subword sampling
HASHES = "tokenizer.json"  # file → sha256, beside the files


class Tokenizer:
    """The source's segmenter and the target's; one and the same if they are made of the same files."""

    def __init__(self, source: Segmenter, target: Segmenter):
        self.source = source
        self.target = source if source.files == target.files else target

    @property
    def joint(self) -> bool:
        """Whether the ids of the two sides mean the same."""
        return self.source is self.target or self.source.pieces == self.target.pieces

    @property
    def source_vocab(self) -> int:
        return self.source.piece_size()

    @property
    def target_vocab(self) -> int:
        return self.target.piece_size()

    @property
    def files(self) -> dict[str, bytes]:
        """What it is made of, by file name: joint.model, or source.model and target.model, and so on."""
        if self.source is self.target:
            return {f"joint.{ending}": content for ending, content in self.source.files.items()}
        sides = (("source", self.source), ("target", self.target))
        return {f"{side}.{end}": content for side, segmenter in sides for end, content in segmenter.files.items()}

    @property
    def hash(self) -> str:
        """sha256 of the files, one after the other, in hexadecimal."""
        return _sha256(b"".join(self.files.values()))

    def encode_source(self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0) -> list[list[int]]:
        """The ids of each line, EOS last.

        `sampling` above 0 cuts each line into subwords at random; see `transformer_jax.data.subwords`. The same lines
        and seed give the same ids.
        """
        return _encode(self.source, lines, sampling=sampling, seed=seed)

    def encode_target(self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0) -> list[list[int]]:
        """As `encode_source`."""
        return _encode(self.target, lines, sampling=sampling, seed=seed)

    def encode_pairs(
        self, pairs: Iterable[Pair], *, sampling: float = 0.0, seed: int = 0
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The ids of each pair, both ending with EOS; pairs are read a few thousand at a time."""
        pairs = iter(pairs)
        for number in itertools.count():
            chunk = list(itertools.islice(pairs, CHUNK))
            if not chunk:
                return
            source_seed, target_seed = np.random.SeedSequence((seed, number)).generate_state(2).tolist()
            yield from zip(
                self.encode_source([pair.source for pair in chunk], sampling=sampling, seed=source_seed),
                self.encode_target([pair.target for pair in chunk], sampling=sampling, seed=target_seed),
                strict=True,
            )

    def decode_source(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids up to its first EOS."""
        return self.source.decode([_until_eos(sequence) for sequence in ids])

    def decode_target(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids up to its first EOS."""
        return self.target.decode([_until_eos(sequence) for sequence in ids])

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the files and their hashes into `directory`, which appears only when it is whole.

        Raises:
          UserError: if `directory` exists or can't be written.
        """
        directory = pathlib.Path(directory)
        if directory.exists():
            raise UserError(f"{directory} exists and is not written over. Choose another workdir, or remove it.")
        unfinished = directory.with_name(directory.name + disk.UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        hashes = {name: _sha256(content) for name, content in self.files.items()}
        with disk.writing(directory):
            unfinished.mkdir(parents=True)
            for name, content in self.files.items():
                disk.write_through(unfinished / name, content)
            disk.write_through(unfinished / HASHES, (json.dumps(hashes, indent=2) + "\n").encode())
            unfinished.rename(directory)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Tokenizer":
        """The tokenizer that `save` wrote.

        Raises:
          UserError: if a file is missing or is not the one that was saved.
        """
        directory = pathlib.Path(directory)
        hashes = _read_hashes(directory / HASHES)
        files = {name: _read_model(directory / name) for name in hashes}
        for name, content in files.items():
            if _sha256(content) != hashes[name]:
                raise UserError(
                    f"{directory / name} has sha256 {_sha256(content)}, but {HASHES} beside it says {hashes[name]}: it "
                    "is not the tokenizer the model was trained with. Restore it, or train again in another workdir."
                )
        sides = [
            segmenter({ending: files[f"{side}.{ending}"] for ending in endings}, name=str(directory / side))
            for side, endings in _by_side(files).items()
        ]
        return cls(sides[0], sides[-1])


def make_tokenizer(pairs: Iterable[Pair], config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the files that `config` gives, or else one trained on `pairs`."""
    if config.source_model or config.target_model:
        return given_tokenizer(config)
    return train_tokenizer(pairs, config)


def given_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the model files that `config` gives.

    Raises:
      UserError: if one is missing, or a joint vocabulary is asked for and they differ.
    """
    names = config.source_model, config.target_model
    if config.joint:
        names = names[0] or names[1], names[1] or names[0]
    missing = [field for field, name in zip(("source_model", "target_model"), names, strict=True) if not name]
    if missing:
        raise UserError(
            f"{FIELD}.{missing[0]} is not given, but the other model is and {FIELD}.joint is False. Give it."
        )
    models = [_read_model(pathlib.Path(name)) for name in names if name]
    if config.joint and models[0] != models[1]:
        raise UserError(
            f"{FIELD}.joint is True, but {names[0]} and {names[1]} are different models. "
            f"Give one of them, or set {FIELD}.joint=False."
        )
    return Tokenizer(*(SentencePieces(model, name=str(name)) for model, name in zip(models, names, strict=True)))


def train_tokenizer(pairs: Iterable[Pair], config: TokenizerConfig) -> Tokenizer:
    """A tokenizer trained on `config.sample` lines of `pairs`, drawn evenly; the same for the same pairs.

    `pairs` are read once, and only the sample is in memory. SentencePiece itself passes over lines longer than
    4,192 bytes.

    Raises:
      UserError: if there is no text, or the vocabulary is too large or too small for it.
    """
    sample = _sample(pairs, size=max(1, config.sample // 2))
    if config.joint:
        joint = SentencePieces(_train((line for pair in sample for line in pair), config), name="joint")
        return Tokenizer(joint, joint)
    models = (_train((pair[side] for pair in sample), config) for side in (0, 1))
    return Tokenizer(*(SentencePieces(model, name=name) for model, name in zip(models, SIDES, strict=True)))


SIDES = ("source", "target")
ENDINGS = (MODEL, VOCABULARY, BYTES, CODES)


def _encode(segmenter: Segmenter, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
    try:
        return segmenter.sample(lines, sampling=sampling, seed=seed) if sampling else segmenter.encode(lines)
    except Exception as error:  # whatever the libraries make of it
        for number, line in enumerate(lines, start=1):
            if not is_unicode(line):
                raise UserError(
                    f"text {number:,} of {len(lines):,}: half of a surrogate pair (\\ud800 to \\udfff) is no "
                    "character. Give both or neither."
                ) from error
        raise


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: Python and JSON can name halves of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _until_eos(ids: Sequence[int]) -> list[int]:
    return [int(token) for token in itertools.takewhile(lambda token: token != EOS, ids)]


def _sample(pairs: Iterable[Pair], *, size: int) -> list[Pair]:
    """`size` pairs, each with the same chance (reservoir sampling, algorithm R)."""
    pairs, draw = iter(pairs), random.Random(0)
    sample = list(itertools.islice(pairs, size))
    for number, pair in enumerate(pairs, start=size):
        place = int(draw.random() * (number + 1))
        if place < size:
            sample[place] = pair
    return sample


def _train(lines: Iterable[str], config: TokenizerConfig) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=str(config.kind),
            vocab_size=config.vocab,
            character_coverage=config.coverage,
            byte_fallback=config.byte_fallback,
            split_digits=config.split_digits,
            normalization_rule_name="identity",
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=NO_BOS,
            num_threads=16,  # the same everywhere: the model depends on it
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_training_error(str(error), config)) from error
    return model.getvalue()


def _training_error(message: str, config: TokenizerConfig) -> str:
    vocab = f"{FIELD}.vocab is {config.vocab:,}"
    if match := re.search(r"too high .* value <= (\d+)", message):
        return f"{vocab}, but the corpus has text for at most {int(match[1]):,} pieces. Set it to that or less."
    if match := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return (
            f"{vocab}, but the characters of the corpus alone need {int(match[1]):,} pieces. "
            f"Set it well above that, or {FIELD}.coverage below 1."
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return "the tokenizer has no text to be trained on: config.data.train has no usable pair."
    return f"SentencePiece cannot train a model with {vocab}: {message}"


def _read_model(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a SentencePiece model."
        ) from error


def _read_hashes(path: pathlib.Path) -> dict[str, str]:
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a tokenizer of a run ({error}). Give a whole run directory.") from error
    known = isinstance(hashes, dict) and all(name.partition(".")[2] in ENDINGS for name in hashes)
    known = known and all(isinstance(value, str) for value in hashes.values())
    if not known or tuple(_by_side(hashes)) not in (("joint",), SIDES):
        raise UserError(f"{path}: expected the hashes of joint.model, of source.model and target.model, or the like.")
    return hashes


def _by_side(names: Iterable[str]) -> dict[str, list[str]]:
    """File names of a tokenizer → how they end, by what they begin with."""
    sides: dict[str, list[str]] = {}
    for name in names:
        side, _, ending = name.partition(".")
        sides.setdefault(side, []).append(ending)
    return sides


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
