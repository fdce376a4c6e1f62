"""Marian's models: a model.npz, which has its options inside, with vocabularies and SentencePiece models beside it.

Marian's decoder starts from zeros, and knows no padding: this library's id 0 is a row of zeros outside the softmax.
"""

import functools
import io
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import yaml

from transformer_jax.batch import UNK
from transformer_jax.config import (
    Activation,
    LengthPenalty,
    NormPlace,
    Positions,
    SearchConfig,
    SinusoidLayout,
    TransformerConfig,
    Tying,
)
from transformer_jax.config_check import check
from transformer_jax.data.segmenters import NumberedPieces, Vocabulary, renumbered
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.huggingface import imported_config, read_bytes
from transformer_jax.interop.mapping import Rule, apply_rules, vocabulary_rows
from transformer_jax.interop.model import OUT_OF_SOFTMAX, Imported, Model
from transformer_jax.interop.vocab_yml import read_vocabulary

OPTIONS = "special:model.yml"
EPSILON = 1e-6  # of Marian's norms
LENGTH_FACTOR = 3.0  # Marian's max-length-factor: an output is no longer than so many times its source
BEAM, NORMALIZE = 4, 1.0  # where no decoder.yml says others
GELU_RATE = 1.702  # Marian's gelu is x σ(1.702 x)

ACTIVATIONS = {"relu": Activation.RELU, "swish": Activation.SWISH, "gelu": Activation.SWISH}
COVERED: dict[str, tuple] = {  # options of a model, and the values with which it is one of this library's
    "type": ("transformer",),
    "transformer-ffn-activation": tuple(ACTIVATIONS),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-attention-mask": ("default",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-postprocess-emb": ("", "d", "n", "nd"),
    "lemma-dim-emb": (0,),
    "factors-dim-emb": (0,),
    "lemma-dependency": ("",),
    "input-types": ([],),
    "output-approx-knn": ([],),
    **dict.fromkeys(
        (
            *("transformer-no-projection", "transformer-no-bias", "transformer-no-affine", "transformer-pool"),
            *("transformer-disable-position-embeddings", "transformer-alibi-shift", "transformer-alibi-trainable"),
            *("ulr", "right-left", "transformer-rnn-projection"),
        ),
        (False,),
    ),
}
POST_NORM = {"preprocess": ("", "d"), "postprocess": ("dan", "an"), "postprocess-top": ("", "d")}
PRE_NORM = {"preprocess": ("n",), "postprocess": ("da", "a"), "postprocess-top": ("n", "dn")}


class _Files(NamedTuple):
    model: pathlib.Path
    vocabularies: tuple[pathlib.Path, pathlib.Path]
    segmenters: tuple[pathlib.Path, pathlib.Path]
    decoder: Mapping[str, Any]  # the options of translation


def read(path: pathlib.Path) -> Imported:
    """
    Args:
      path: the .npz, or a directory with one.

    Raises:
      UserError: if a file is missing or damaged, or the model has what this library's Transformer has not.
    """
    files = find_files(path)
    tensors, options = read_npz(files.model)
    options.check()
    pieces, notes = _pieces(files, tensors, options)
    source, target = (_renumbered(own, name) for own, name in zip(pieces, files.vocabularies, strict=True))
    model = _model_config(tensors, options, sizes=(len(source.pieces), len(target.pieces)))
    if model.norm_place == NormPlace.PRE:
        notes.append(
            "in pre-norm models keys and values of the self-attention are normalised here, as CTranslate2 does it; a "
            "model of a version of Marian that did not normalise them translates worse here than there"
        )
    config = imported_config(model, search_config(files.decoder), joint=source == target)
    check(config)
    rules = _rules(model, options, source, target, transposed=LOGITS not in tensors)
    added = {} if LOGITS_BIAS in tensors else {"output_bias": _bias(np.zeros(len(target.pieces) - 1), target, model)}
    if added:
        rules = [rule for rule in rules if rule.ours != "output_bias"]
    params, mapped = apply_rules(rules, tensors, model, path=str(files.model), added=added)
    tokenizer = Tokenizer(
        *(
            NumberedPieces(read_bytes(file), vocabulary, name=str(file))
            for file, vocabulary in zip(files.segmenters, (source, target), strict=True)
        )
    )
    return Imported(Model(config, params, tokenizer), mapped, notes)


# Files


def find_files(path: pathlib.Path) -> _Files:
    """
    Raises:
      UserError: if there is no model, or it is not clear which files belong to it; the message says what to do.
    """
    directory = path if path.is_dir() else path.parent
    decoder = _read_yaml(directory / "decoder.yml") if (directory / "decoder.yml").exists() else {}
    model = (
        path
        if path.is_file()
        else _one(_named(decoder, "models", directory) or _glob(directory, "*.npz"), directory, "a model, *.npz")
    )
    segmenters = tuple(directory / f"{side}.spm" for side in ("source", "target"))
    vocabularies = _named(decoder, "vocabs", directory) or _vocabularies(directory)
    if not segmenters[0].exists():
        if all(file.suffix == ".spm" for file in vocabularies):
            segmenters = tuple(vocabularies)
        else:
            found = ", ".join(file.name for file in _glob(directory, "*.bpe")) or "none"
            raise UserError(
                f"{segmenters[0]}: missing. Models whose text SentencePiece cuts can be imported; put source.spm and "
                f"target.spm beside {model.name}. (Files of another segmentation here: {found}.)"
            )
    return _Files(model, (vocabularies[0], vocabularies[-1]), (segmenters[0], segmenters[-1]), decoder)


def _vocabularies(directory: pathlib.Path) -> list[pathlib.Path]:
    """The vocabulary of both sides, or those of source and target."""
    found = [*_glob(directory, "*vocab*.yml"), *_glob(directory, "*vocab*.yaml"), *_glob(directory, "*vocab*.spm")]
    source = [file for file in found if ".src." in file.name or file.name.startswith("src")]
    target = [file for file in found if any(part in file.name for part in (".trg.", ".tgt."))]
    target += [file for file in found if file.name.startswith(("trg", "tgt"))]
    if len(source) == 1 and len(target) == 1:
        return [source[0], target[0]]
    if not found and (both := [directory / f"{side}.spm" for side in ("source", "target")])[0].exists():
        return both
    return [_one(found, directory, "a vocabulary, *vocab.yml (or *.src.vocab.yml and *.trg.vocab.yml)")]


def _named(decoder: Mapping[str, Any], field: str, directory: pathlib.Path) -> list[pathlib.Path]:
    """The files that a decoder.yml names, by their last names: the directories are those of another machine."""
    names = decoder.get(field)
    files = [directory / pathlib.PurePosixPath(str(name)).name for name in (names if isinstance(names, list) else [])]
    return files if files and all(file.exists() for file in files) else []


def _glob(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    return sorted(directory.glob(pattern))


def _one(files: list[pathlib.Path], directory: pathlib.Path, what: str) -> pathlib.Path:
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise UserError(
            f"{directory}: expected {what}, found {found}. Put the files of one model into a directory of their own."
        )
    return files[0]


def _read_yaml(path: pathlib.Path) -> Mapping[str, Any]:
    return _parsed(read_bytes(path), str(path))


def _parsed(content: bytes, name: str) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(content.decode())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: not YAML ({str(error).splitlines()[0]}). Copy it again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{name}: expected options, found {str(values)[:80]!r}.")
    return values


def read_npz(path: pathlib.Path) -> tuple[dict[str, np.ndarray], "Options"]:
    """The tensors of a model and its options. Nothing that the file says is executed.

    Raises:
      UserError: if it is damaged, or has no options inside.
    """
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("one array, not several")
            tensors = {name: archive[name] for name in archive.files}
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        MemoryError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise UserError(
            f"{path}: not a whole .npz of arrays ({str(error).splitlines()[0]:.200}). Copy it again."
        ) from error
    if OPTIONS not in tensors:
        raise UserError(f"{path}: {OPTIONS} is missing: not a model of Marian, or of a version before 1.2.")
    content = tensors.pop(OPTIONS).tobytes().rstrip(b"\0")  # it ends in one NUL or several
    return tensors, Options(_parsed(content, f"{path}: {OPTIONS}"), f"{path}: {OPTIONS}")


class Options:
    """The options of a model, and messages that name them."""

    def __init__(self, values: Mapping[str, Any], path: str):
        self.values, self.path = values, path

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        return default if value is None else value

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(name, "expected a whole number above 0")
        return value

    def error(self, name: str, what: str) -> UserError:
        return UserError(f"{self.path}: {name} is {self.values.get(name)!r}; {what}.")

    @property
    def pre_norm(self) -> bool:
        return "n" in str(self.get("transformer-preprocess", ""))

    def check(self) -> None:
        """
        Raises:
          UserError: for the first option whose value this library's Transformer does not cover.
        """
        places = PRE_NORM if self.pre_norm else POST_NORM
        covered = COVERED | {f"transformer-{name}": values for name, values in places.items()}
        for name, values in covered.items():
            found = self.get(name, values[0])
            if found not in values or isinstance(found, bool) != isinstance(values[0], bool):
                named = " or ".join(repr(value) for value in values)
                raise self.error(name, f"models with {named} can be imported")
        if len(self.get("dim-vocabs", [0, 0])) != 2:
            raise self.error("dim-vocabs", "models of one source and one target can be imported")


# Vocabulary


def _pieces(
    files: _Files, tensors: Mapping[str, np.ndarray], options: Options
) -> tuple[tuple[list[str], list[str]], list[str]]:
    """The pieces of both sides. Marian leaves out those beyond its table."""
    notes, cut = [], []
    for side, file in enumerate(files.vocabularies):
        pieces, name = read_vocabulary(file), _table(tensors, options, side)
        if name not in tensors or tensors[name].ndim != 2:
            raise UserError(f"{files.model}: the tensor {name} is missing, or no matrix. Give a whole model.")
        rows = len(tensors[name])
        if len(pieces) < rows:
            raise UserError(f"{file}: {len(pieces):,} pieces, but {name} of {files.model.name} has {rows:,} rows.")
        if len(pieces) > rows:
            notes.append(f"{file.name} has {len(pieces):,} pieces; those beyond the {rows:,} of the model are unknown")
        cut.append(pieces[:rows])
    return (cut[0], cut[1]), notes


def _renumbered(pieces: list[str], file: pathlib.Path) -> Vocabulary:
    for piece in ("</s>", "<unk>"):
        if piece not in pieces:
            raise UserError(f"{file}: the piece {piece} is missing. Give the vocabulary of the model.")
    return renumbered(pieces, eos=pieces.index("</s>"), unk=pieces.index("<unk>"), pad=None)


# Configuration


def _shared(options: Options) -> bool:
    return bool(options.get("tied-embeddings-all", False) or options.get("tied-embeddings-src", False))


def _table(tensors: Mapping[str, np.ndarray], options: Options, side: int) -> str:
    return "Wemb" if _shared(options) else ("encoder_Wemb", "decoder_Wemb")[side]


def _tying(options: Options) -> Tying:
    """Which output is tied; with `tied-embeddings-src` alone only the two inputs are, which then have a table each."""
    if not options.get("tied-embeddings-all", False) and not options.get("tied-embeddings", False):
        return Tying.NONE
    return Tying.ALL if _shared(options) else Tying.DECODER


def _model_config(tensors: Mapping[str, np.ndarray], options: Options, *, sizes: tuple[int, int]) -> TransformerConfig:
    learned = bool(
        options.get("transformer-train-position-embeddings", False) or options.get("transformer-train-positions", False)
    )
    if learned and tensors.get("Wpos", np.zeros(0)).ndim != 2:
        raise options.error("transformer-train-position-embeddings", "but the model has no matrix Wpos")
    width = options.size("dim-emb")
    for side, name in enumerate(("encoder_Wemb", "decoder_Wemb")):
        found = tensors[_table(tensors, options, side)].shape[1]
        if found != width:
            raise options.error("dim-emb", f"but the embeddings ({name}) have {found} columns")
    hidden = options.size("transformer-dim-ffn"), options.get("transformer-decoder-dim-ffn", 0)
    layers = {"encoder": options.size("enc-depth"), "decoder": options.size("dec-depth")}
    for side, name in (("encoder", "enc-depth"), ("decoder", "dec-depth")):
        if layers[side] > len(tensors):
            raise options.error(name, f"but the model has only {len(tensors)} tensors")
    return TransformerConfig(
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        width=width,
        heads=options.size("transformer-heads"),
        feed_forward=max(hidden),
        activation=ACTIVATIONS[options.get("transformer-ffn-activation", "swish")],
        attention_bias=True,
        norm_place=NormPlace.PRE if options.pre_norm else NormPlace.POST,
        norm_epsilon=EPSILON,
        embedding_scale=not learned,
        embedding_norm="n" in options.get("transformer-postprocess-emb", "d"),
        output_bias=True,
        positions=Positions.LEARNED if learned else Positions.SINUSOIDAL,
        sinusoid_layout=SinusoidLayout.T2T,
        max_positions=len(tensors["Wpos"]) if learned else TransformerConfig.max_positions,
        tying=_tying(options),
        source_vocab=sizes[0],
        target_vocab=sizes[1],
    )


def search_config(decoder: Mapping[str, Any]) -> SearchConfig:
    """Marian's search: sums divided by L^normalize, L with EOS; no `<unk>`; at most 3 × the tokens of the source."""
    beam, normalize = decoder.get("beam-size", BEAM), decoder.get("normalize", NORMALIZE)
    return SearchConfig(
        beam_size=beam if isinstance(beam, int) and beam > 0 else BEAM,
        penalty=LengthPenalty.POWER,
        alpha=float(normalize) if isinstance(normalize, int | float) else NORMALIZE,
        length_factor=LENGTH_FACTOR,
        extra_length=0,
        suppressed=(UNK,),
    )


# Tensors

LOGITS, LOGITS_TRANSPOSED = "decoder_ff_logit_out_W", "decoder_ff_logit_out_Wt"
LOGITS_BIAS = "decoder_ff_logit_out_b"
ATTENTIONS = {"self_attention": "self", "cross_attention": "context"}
PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}


def _rules(
    model: TransformerConfig, options: Options, source: Vocabulary, target: Vocabulary, *, transposed: bool
) -> list[Rule]:
    """The rules; `transposed` says whether an output matrix of its own is [V, D] and not [D, V]."""
    tables = ("Wemb", "Wemb") if _shared(options) else ("encoder_Wemb", "decoder_Wemb")
    rules = [Rule("source_embedding/table", tables[0], functools.partial(_rows, vocabulary=source, model=model))]
    if model.tying != Tying.ALL:
        rows = functools.partial(_rows, vocabulary=target, model=model)
        rules.append(Rule("target_embedding/table", tables[1], rows))
    if model.tying == Tying.NONE:
        name, turn = (LOGITS_TRANSPOSED, np.asarray) if transposed else (LOGITS, np.transpose)
        rules.append(Rule("projection/table", name, lambda tensor: _rows(turn(tensor), target, model)))
    rules.append(Rule("output_bias", LOGITS_BIAS, lambda tensor: _bias(tensor, target, model)))
    if model.positions == Positions.LEARNED:
        rules += [Rule(f"{side}_positions", "Wpos") for side in ("source", "target")]
    rules += _stack_rules("encoder", range(1, model.encoder_layers + 1), options, model)
    rules += _stack_rules("decoder", _tied_layers(options, model), options, model)
    return rules


def _tied_layers(options: Options, model: TransformerConfig) -> list[int]:
    """Whose tensors each layer of the decoder has."""
    tied = options.get("transformer-tied-layers", []) or list(range(1, model.decoder_layers + 1))
    if len(tied) != model.decoder_layers or not all(isinstance(layer, int) for layer in tied):
        raise options.error("transformer-tied-layers", f"expected one of the {model.decoder_layers} layers for each")
    return tied


def _stack_rules(stack: str, layers: Any, options: Options, model: TransformerConfig) -> Iterator[Rule]:
    pre = "_pre" if options.pre_norm else ""
    units = (options.get("transformer-decoder-dim-ffn", 0) if stack == "decoder" else 0) or options.size(
        "transformer-dim-ffn"
    )
    filled = functools.partial(_feed_forward, units=units, width=model.feed_forward)
    rate = GELU_RATE if options.get("transformer-ffn-activation", "swish") == "gelu" else 1.0
    for index, layer in enumerate(layers):
        ours, theirs = f"{stack}/layers_{index}", f"{stack}_l{layer}"
        for our, their in list(ATTENTIONS.items())[: 1 if stack == "encoder" else 2]:
            for our_part, part in PROJECTIONS.items():
                yield Rule(f"{ours}/{our}/{our_part}/kernel", f"{theirs}_{their}_W{part}")
                yield Rule(f"{ours}/{our}/{our_part}/bias", f"{theirs}_{their}_b{part}", np.ravel)
            yield from _norm(f"{ours}/{our}_residual/normalize", f"{theirs}_{their}_Wo", pre)
        # x σ(r x) = swish(r x) / r: where that is the activation, r is put into the matrices around it.
        for part, number, factor in (("hidden", 1, rate), ("output", 2, 1 / rate)):
            change = functools.partial(filled, part=part, factor=factor)
            yield Rule(f"{ours}/feed_forward/{part}/kernel", f"{theirs}_ffn_W{number}", change)
        change = functools.partial(filled, part="hidden", factor=rate)
        yield Rule(f"{ours}/feed_forward/hidden/bias", f"{theirs}_ffn_b1", lambda b, change=change: change(np.ravel(b)))
        yield Rule(f"{ours}/feed_forward/output/bias", f"{theirs}_ffn_b2", np.ravel)
        yield from _norm(f"{ours}/feed_forward_residual/normalize", f"{theirs}_ffn_ffn", pre)
    if options.pre_norm:
        yield from _norm(f"{stack}/final_norm", f"{stack}_top", "")
    if model.embedding_norm:
        side = "source" if stack == "encoder" else "target"
        yield from _norm(f"{side}_embedding_norm", f"{stack}_emb", "_pre")


def _norm(ours: str, theirs: str, suffix: str) -> Iterator[Rule]:
    yield Rule(f"{ours}/scale", f"{theirs}_ln_scale{suffix}", np.ravel)
    yield Rule(f"{ours}/bias", f"{theirs}_ln_bias{suffix}", np.ravel)


def _feed_forward(tensor: np.ndarray, *, part: str, units: int, width: int, factor: float) -> np.ndarray:
    """The matrix or bias of so many units, with units of zeros up to `width`, which change nothing."""
    axis = tensor.ndim - 1 if part == "hidden" else 0
    if tensor.shape[axis] != units:
        raise ValueError("another number of units")
    padding = [(0, width - units) if axis == other else (0, 0) for other in range(tensor.ndim)]
    filled = np.pad(tensor, padding)
    return filled if factor == 1 else filled.astype(np.float32) * np.float32(factor)


def _rows(table: np.ndarray, vocabulary: Vocabulary, model: TransformerConfig) -> np.ndarray:
    """Our rows of a table; the first is zero."""
    order = [number for number in vocabulary.ids[1:] if number is not None]
    rows = vocabulary_rows(order, start=order[0], multiple=model.vocab_multiple)(table)
    rows[0] = 0
    return rows


def _bias(bias: np.ndarray, vocabulary: Vocabulary, model: TransformerConfig) -> np.ndarray:
    values = _rows(np.ravel(bias).astype(np.float32), vocabulary, model)
    values[0] = OUT_OF_SOFTMAX
    return values
