"""SentencePiece: train, load, encode, decode.

Ids are the same in every tokenizer of this library: pad 0, EOS 1, unknown 2, no BOS.

Text is not normalised, but that SentencePiece takes away spaces at the ends and all but one of a run of them: any other
text of known characters comes back from `decode` as it went in. SentencePiece's usual normalisation, NFKC, makes "m2"
of "m²", "..." of "…" and a plain space of a no-break one, and a model whose targets never have them cannot write them.
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

from transformer_jax.batch import EOS, PAD, UNK
from transformer_jax.config import TokenizerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.subwords import SubwordSampler
from transformer_jax.errors import UserError

FIELD = "config.data.tokenizer"
NO_BOS = -1
CHUNK = 8192  # pairs encoded together, and which share a seed of subword sampling
HASHES = "tokenizer.json"  # model file → sha256, beside the model files


class Tokenizer:
    """The SentencePiece models of source and target; one and the same if joint.

    Raises:
      UserError: if a model cannot be read, or has other ids than this library's for pad, EOS, unknown and BOS.
    """

    def __init__(self, source_model: bytes, target_model: bytes, *, names: tuple[str, str] = ("source", "target")):
        self.models = source_model, target_model
        self.joint = source_model == target_model
        self.source = _processor(source_model, names[0])
        self.target = self.source if self.joint else _processor(target_model, names[1])
        self._samplers: dict[tuple[bytes, float], SubwordSampler] = {}

    @property
    def source_vocab(self) -> int:
        return self.source.piece_size()

    @property
    def target_vocab(self) -> int:
        return self.target.piece_size()

    @property
    def hash(self) -> str:
        """sha256 of the model, or of the two models one after the other, in hexadecimal."""
        return _sha256(self.models[0] if self.joint else b"".join(self.models))

    def encode_source(self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0) -> list[list[int]]:
        """The ids of each line, EOS last.

        `sampling` above 0 cuts each line into subwords at random; see `transformer_jax.data.subwords`. The same lines
        and seed give the same ids.
        """
        return self._encode(0, lines, sampling=sampling, seed=seed)

    def encode_target(self, lines: Sequence[str], *, sampling: float = 0.0, seed: int = 0) -> list[list[int]]:
        """As `encode_source`."""
        return self._encode(1, lines, sampling=sampling, seed=seed)

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

    def _encode(self, side: int, lines: Sequence[str], *, sampling: float, seed: int) -> list[list[int]]:
        if sampling:
            return self._sampler(side, sampling).encode(lines, seed=seed)
        return (self.source, self.target)[side].encode(list(lines), add_eos=True)

    def _sampler(self, side: int, sampling: float) -> SubwordSampler:
        key = self.models[side], sampling
        if key not in self._samplers:
            self._samplers[key] = SubwordSampler(self.models[side], sampling=sampling)
        return self._samplers[key]

    def decode_source(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids up to its first EOS."""
        return self.source.decode([_until_eos(sequence) for sequence in ids])

    def decode_target(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids up to its first EOS."""
        return self.target.decode([_until_eos(sequence) for sequence in ids])

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the models and their hashes into `directory`, which appears only when it is whole.

        Raises:
          UserError: if `directory` exists.
        """
        directory = pathlib.Path(directory)
        if directory.exists():
            raise UserError(f"{directory} exists and is not written over. Choose another workdir, or remove it.")
        files = {"joint.model": self.models[0]} if self.joint else dict(zip(_SEPARATE, self.models, strict=True))
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name, model in files.items():
            (unfinished / name).write_bytes(model)
        hashes = {name: _sha256(model) for name, model in files.items()}
        (unfinished / HASHES).write_text(json.dumps(hashes, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(directory)

    @classmethod
    def load(cls, directory: str | os.PathLike) -> "Tokenizer":
        """The tokenizer that `save` wrote.

        Raises:
          UserError: if a file is missing or is not the one that was saved.
        """
        directory = pathlib.Path(directory)
        hashes = _read_hashes(directory / HASHES)
        models = [_read_model(directory / name) for name in hashes]
        for (name, expected), model in zip(hashes.items(), models, strict=True):
            if _sha256(model) != expected:
                raise UserError(
                    f"{directory / name} has sha256 {_sha256(model)}, but {HASHES} beside it says {expected}: it is "
                    "not the tokenizer the model was trained with. Restore it, or train again in another workdir."
                )
        return cls(models[0], models[-1], names=(str(directory / min(hashes)), str(directory / max(hashes))))


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
    return Tokenizer(*models, names=(str(names[0]), str(names[1])))


def train_tokenizer(pairs: Iterable[Pair], config: TokenizerConfig) -> Tokenizer:
    """A tokenizer trained on `config.sample` lines of `pairs`, drawn evenly; the same for the same pairs.

    `pairs` are read once, and only the sample is in memory. SentencePiece itself passes over lines longer than
    4,192 bytes.

    Raises:
      UserError: if there is no text, or the vocabulary is too large or too small for it.
    """
    sample = _sample(pairs, size=max(1, config.sample // 2))
    if config.joint:
        model = _train((line for pair in sample for line in pair), config)
        return Tokenizer(model, model)
    return Tokenizer(_train((pair.source for pair in sample), config), _train((pair.target for pair in sample), config))


_SEPARATE = ("source.model", "target.model")


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


def _processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UserError(f"{name}: not a SentencePiece model. Give a .model file that spm_train wrote.") from error
    found = processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id()
    if found != (PAD, EOS, UNK, NO_BOS):
        raise UserError(
            f"{name}: the ids of pad, EOS, unknown and BOS are {', '.join(map(str, found))}; expected "
            f"{PAD}, {EOS}, {UNK}, {NO_BOS}. Train it with --pad_id={PAD} --eos_id={EOS} --unk_id={UNK} "
            f"--bos_id={NO_BOS}."
        )
    return processor


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
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a tokenizer of a run ({error}). Give a whole run directory.") from error
    if not isinstance(hashes, dict) or tuple(hashes) not in (("joint.model",), _SEPARATE):
        raise UserError(f"{path}: expected the hash of joint.model, or of source.model and target.model.")
    return hashes


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
