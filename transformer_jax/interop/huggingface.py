"""Hugging Face's `MarianMTModel`: a directory with config.json, weights, vocab.json, source.spm and target.spm.

Their decoder starts from `<pad>`, a row of zeros, which is this library's id 0. Its logit stays in the softmax, as it
does there.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from transformer_jax import config as configs
from transformer_jax.batch import PAD
from transformer_jax.config import (
    Activation,
    Beam,
    Config,
    DataConfig,
    LengthPenalty,
    NormPlace,
    OptimizerConfig,
    Positions,
    Schedule,
    SearchConfig,
    SinusoidLayout,
    TokenizerConfig,
    TransformerConfig,
    Tying,
)
from transformer_jax.config_check import check
from transformer_jax.data.segmenters import NumberedPieces, Vocabulary, renumbered
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop import torch_file
from transformer_jax.interop.fairseq_names import rules_of_stacks
from transformer_jax.interop.mapping import Rule, apply_rules, layer_count, vocabulary_rows
from transformer_jax.interop.model import OUT_OF_SOFTMAX, Imported, Model
from transformer_jax.nn.positions import sinusoids
from transformer_jax.parameters import flat, nested

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SAFETENSORS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SHARED, HEAD, BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
EMBEDDINGS = {side: f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
POSITIONS = {side: f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
PADDING = "padding.safetensors"  # rows of our tables beyond the vocabulary, which theirs have not
OURS = "transformer_jax"  # the field of an exported config.json that holds our own

EPSILON = 1e-5  # of their norms, which no field changes
MAX_LENGTH = 512  # where a configuration says none
TABLE_ERROR = 1e-3  # of sinusoids in half precision

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "swish": Activation.SWISH,
    "silu": Activation.SWISH,
}


def read(directory: pathlib.Path) -> Imported:
    """
    Raises:
      UserError: if a file is missing or damaged, or the model has what this library's Transformer has not.
    """
    options = read_json(directory / CONFIG)
    weights_path, tensors = read_weights(directory)
    fields = Fields(options, str(directory / CONFIG))
    tables = _tables(tensors, fields, str(weights_path))
    source, target = _vocabularies(directory, fields, tables)
    model = _model_config(fields, tensors, tables)
    config, notes = _config(directory, fields, model, target)
    model = config.model = dataclasses.replace(
        config.model, source_vocab=len(source.pieces), target_vocab=len(target.pieces)
    )
    check(config)
    rules, added = _rules(model, tables, source, target, fields)
    params, mapped = apply_rules(
        rules, tensors, model, path=str(weights_path), unused=_unused(tensors, tables, model), added=added
    )
    if OURS in options:
        leaves = rescaled(flat(params), model, 1 / residual_factor(model))
        params = nested(_with_padding(leaves, directory / PADDING))
    segmenters = [
        NumberedPieces(read_bytes(directory / f"{side}.spm"), vocabulary, name=str(directory / f"{side}.spm"))
        for side, vocabulary in (("source", source), ("target", target))
    ]
    return Imported(Model(config, params, Tokenizer(*segmenters)), mapped, notes)


# Files


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """
    Raises:
      UserError: if it can't be read, is not an object, or has a name twice.
    """
    try:
        values = json.loads(read_bytes(path), object_pairs_hook=lambda pairs: _distinct(pairs, path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}). Copy it again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object. Copy it again.")
    return values


def read_bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}). Give a whole directory of a model.") from error


def _distinct(pairs: Sequence[tuple[str, Any]], path: pathlib.Path) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: {twice!r} comes twice. It has to be one or the other.")
    return values


def read_weights(directory: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """The file of the weights and its tensors. Nothing that a file says is executed.

    Raises:
      UserError: if none is there, or it is damaged.
    """
    if (directory / SAFETENSORS).exists():
        return directory / SAFETENSORS, _read_safetensors(directory / SAFETENSORS)
    if (directory / INDEX).exists():
        names = read_json(directory / INDEX).get("weight_map")
        if not isinstance(names, dict) or any(pathlib.PurePath(str(name)).name != name for name in names.values()):
            raise UserError(f"{directory / INDEX}: weight_map has to give a file beside it for each tensor.")
        parts = (_read_safetensors(directory / name) for name in sorted(set(names.values())))
        return directory / INDEX, {name: tensor for part in parts for name, tensor in part.items()}
    if (directory / PICKLE).exists():
        saved = torch_file.read(directory / PICKLE)
        if not isinstance(saved, dict) or not all(isinstance(tensor, np.ndarray) for tensor in saved.values()):
            raise UserError(f"{directory / PICKLE}: expected tensors by name. Give the weights of a model.")
        return directory / PICKLE, {str(name): np.asarray(tensor) for name, tensor in saved.items()}
    raise UserError(f"{directory}: no weights here; expected {SAFETENSORS} or {PICKLE}.")


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a whole file of safetensors ({reason:.200}). Copy it again.") from error


# Configuration


class Fields:
    """The fields of a config.json, and messages that name them."""

    def __init__(self, options: Mapping[str, Any], path: str):
        self.options, self.path = options, path

    def get(self, name: str, default: Any) -> Any:
        """A field of the default's type; null and a missing one are the default."""
        value = self.options.get(name)
        value = default if value is None else value
        if isinstance(default, bool) != isinstance(value, bool) or not isinstance(
            value, (int, float) if isinstance(default, float) else type(default)
        ):
            raise self.error(name, f"expected a {type(default).__name__}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.options.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.error(name, "expected a whole number above 0")
        return value

    def same(self, name: str) -> int:
        """A size that the encoder and the decoder have to have alike."""
        encoder, decoder = self.size(f"encoder_{name}"), self.size(f"decoder_{name}")
        if encoder != decoder:
            raise self.error(f"decoder_{name}", f"encoder_{name} is {encoder}, and models with two can't be imported")
        return encoder

    def error(self, name: str, what: str) -> UserError:
        return UserError(f"{self.path}: {name} is {self.options.get(name)!r}; {what}.")


class _Tables(NamedTuple):
    """The names of the tensors with a row for each piece."""

    source: str
    target: str
    output: str
    source_rows: int
    target_rows: int
    width: int


def _tables(tensors: Mapping[str, np.ndarray], fields: Fields, path: str) -> _Tables:
    """
    Raises:
      UserError: if they don't fit each other or the configuration.
    """
    shared = fields.get("share_encoder_decoder_embeddings", True)
    source = SHARED if shared and SHARED in tensors else EMBEDDINGS["encoder"]
    target = source if shared else EMBEDDINGS["decoder"]
    output = target if fields.get("tie_word_embeddings", True) else HEAD
    for name in (source, target, output):
        if name not in tensors or tensors[name].ndim != 2:
            raise UserError(f"{path}: the tensor {name} is missing, or no matrix. Give a whole MarianMTModel.")
    rows = tensors[source].shape[0], tensors[target].shape[0]
    if tensors[output].shape != tensors[target].shape:
        raise UserError(f"{path}: {output} is {list(tensors[output].shape)}, {target} {list(tensors[target].shape)}.")
    sizes = {"d_model": tensors[source].shape[1], "vocab_size": rows[0]}
    sizes |= {} if shared or fields.options.get("decoder_vocab_size") is None else {"decoder_vocab_size": rows[1]}
    sizes |= {f"{side}_layers": layer_count(tensors, f"model.{side}.layers.") for side in ("encoder", "decoder")}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_ffn_dim": size for size in _units(tensors, side) if size != fields.size(f"{side}_ffn_dim")}
    for field, found in sizes.items():
        if fields.size(field) != found:
            raise fields.error(field, f"but the tensors of {path} say {found}")
    return _Tables(source, target, output, *rows, sizes["d_model"])


def _units(tensors: Mapping[str, np.ndarray], side: str) -> set[int]:
    """How many units the feed-forward layers of a stack have, by each of their tensors."""
    prefix, axes = f"model.{side}.layers.", {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}
    names = [
        (name, axis) for name in tensors for end, axis in axes.items() if name.startswith(prefix) and name.endswith(end)
    ]
    return {tensors[name].shape[axis] for name, axis in names if tensors[name].ndim > axis}


def _model_config(fields: Fields, tensors: Mapping[str, np.ndarray], tables: _Tables) -> TransformerConfig:
    activation = fields.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise fields.error("activation_function", f"expected one of {', '.join(ACTIVATIONS)}")
    positions = {side: _positions(tensors.get(name), tables.width) for side, name in POSITIONS.items()}
    if positions["encoder"] != positions["decoder"]:
        raise UserError(f"{fields.path}: the encoder's table of positions is of another kind than the decoder's.")
    return TransformerConfig(
        encoder_layers=fields.size("encoder_layers"),
        decoder_layers=fields.size("decoder_layers"),
        width=tables.width,
        heads=fields.same("attention_heads"),
        feed_forward=max(fields.size("encoder_ffn_dim"), fields.size("decoder_ffn_dim")),
        activation=ACTIVATIONS[activation],
        attention_bias=True,
        norm_place=NormPlace.PRE if fields.get("normalize_before", False) else NormPlace.POST,
        norm_epsilon=EPSILON,
        embedding_scale=fields.get("scale_embedding", False),
        embedding_norm=fields.get("normalize_embedding", False),
        output_bias=True,
        tying=_tying(tables),
        dropout=float(fields.get("dropout", 0.1)),
        attention_dropout=float(fields.get("attention_dropout", 0.0)),
        feed_forward_dropout=float(fields.get("activation_dropout", 0.0)),
        **positions["encoder"],
    )


def _positions(table: np.ndarray | None, width: int) -> dict[str, Any]:
    """The fields of the configuration that a table of positions stands for; without one they are theirs."""
    if table is None:
        return {"sinusoid_layout": SinusoidLayout.CONCATENATED}
    if table.ndim == 2 and table.shape[1] == width and width % 2 == 0:
        for layout in SinusoidLayout:
            own = np.asarray(sinusoids(jnp.arange(len(table)), width, layout))
            if np.abs(own - table.astype(np.float32)).max(initial=0) < TABLE_ERROR:
                return {"sinusoid_layout": layout}
    return {"positions": Positions.LEARNED, "max_positions": len(table)}


def _tying(tables: _Tables) -> Tying:
    if tables.output != tables.target:
        return Tying.NONE
    return Tying.ALL if tables.source == tables.target else Tying.DECODER


def _config(
    directory: pathlib.Path, fields: Fields, model: TransformerConfig, target: Vocabulary
) -> tuple[Config, list[str]]:
    """The whole configuration: what an export of ours left there, or else what theirs says."""
    if isinstance(fields.options.get(OURS), dict):
        config = configs.from_json(json.dumps(fields.options[OURS]), path=f"{fields.path}: {OURS}")
        return config, []
    search, notes = search_config(directory, fields.options, target)
    languages = {
        name: value
        for name in ("source", "target")
        if isinstance(value := _tokenizer_options(directory).get(f"{name}_lang"), str) and value
    }
    limit = model.max_positions if model.positions == Positions.LEARNED else MAX_LENGTH
    config = imported_config(model, search, joint=fields.get("share_encoder_decoder_embeddings", True), limit=limit)
    config.data = dataclasses.replace(config.data, **languages)
    return config, notes


def imported_config(model: TransformerConfig, search: SearchConfig, *, joint: bool, limit: int = MAX_LENGTH) -> Config:
    """A configuration around a model of another system: its search, and a training that goes on from its weights."""
    return Config(
        model=model,
        data=DataConfig(max_length=limit, tokenizer=TokenizerConfig(joint=joint)),
        optimizer=OptimizerConfig(schedule=Schedule.INVERSE_SQRT, peak=1e-4, warmup=400),
        search=search,
        dev_search=dataclasses.replace(search, beam_size=1, top_beams=1),
    )


def search_config(
    directory: pathlib.Path, options: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[SearchConfig, list[str]]:
    """The search that `generate` does, and what of it is left out.

    Scores are sums divided by L^length_penalty, where L counts the generated tokens with EOS. `max_length` counts the
    start token too, and with a forced EOS the last token is that.
    """
    path = directory / GENERATION
    generation = {**options, **(read_json(path) if path.exists() else {})}
    fields = Fields(generation, str(path if path.exists() else directory / CONFIG))
    ours = {number: token for token, number in enumerate(vocabulary.ids) if number is not None}
    notes = []

    def known(field: str, number: Any) -> int:
        if number not in ours:
            raise fields.error(field, f"the vocabulary has no id {number!r}")
        return ours[number]

    suppressed = set()
    for words in fields.get("bad_words_ids", []):
        if isinstance(words, list) and len(words) == 1:
            suppressed.add(known("bad_words_ids", words[0]))
        else:
            notes.append(f"bad_words_ids has a sequence, {words}, which is not forbidden here")
    suppressed |= {known("suppress_tokens", number) for number in fields.get("suppress_tokens", [])}
    forced = fields.options.get("forced_bos_token_id")
    most = fields.size("max_length", MAX_LENGTH) - 1
    if isinstance(new := fields.options.get("max_new_tokens"), int):
        most = new
    if fields.options.get("forced_eos_token_id") is not None:
        most -= 1
    for field, off in (("repetition_penalty", 1.0), ("encoder_no_repeat_ngram_size", 0), ("num_beam_groups", 1)):
        if fields.get(field, off) != off:
            notes.append(f"{field} is {fields.options[field]} there, and off here")
    beams = fields.size("num_beams", 1)
    config = SearchConfig(
        beam_size=beams,
        beam=Beam.FULL,
        penalty=LengthPenalty.POWER,
        alpha=float(fields.get("length_penalty", 1.0)),
        length_factor=0.0,
        extra_length=max(most, 1),
        min_length=fields.get("min_length", 0),  # theirs counts the start, but compares before EOS is there
        forced_prefix=() if forced is None else (known("forced_bos_token_id", forced),),
        suppressed=tuple(sorted(suppressed - {PAD})),
        no_repeat_ngram=fields.get("no_repeat_ngram_size", 0),
    )
    return config, notes


def _tokenizer_options(directory: pathlib.Path) -> dict[str, Any]:
    return read_json(directory / TOKENIZER) if (directory / TOKENIZER).exists() else {}


# Vocabulary


def _vocabularies(directory: pathlib.Path, fields: Fields, tables: _Tables) -> tuple[Vocabulary, Vocabulary]:
    shared = fields.get("share_encoder_decoder_embeddings", True)
    options = _tokenizer_options(directory)
    path = directory / "vocab.json"
    source = read_pieces(path, rows=tables.source_rows)
    separate = not shared and (options.get("separate_vocabs") or (directory / "target_vocab.json").exists())
    other = directory / "target_vocab.json" if separate else path
    target = read_pieces(other, rows=tables.target_rows) if separate or not shared else source
    pad, eos = (_token_id(fields, name, len(target)) for name in ("pad_token_id", "eos_token_id"))
    start = _token_id(fields, "decoder_start_token_id", len(target), default=pad)
    special = {name: str(_text(options.get(f"{name}_token"), default)) for name, default in SPECIAL.items()}
    for pieces, where in ((source, path), (target, other)):
        for piece in special.values():
            if piece not in pieces:
                raise UserError(f"{where}: the piece {piece} is missing. Copy it again.")
    unk = target.index(special["unk"])
    target_vocabulary = renumbered(target, eos=eos, unk=unk, pad=None if start in (eos, unk) else start)
    if source is target:
        return target_vocabulary, target_vocabulary
    ids = {name: source.index(piece) for name, piece in special.items()}
    pad = _token_id(fields, "pad_token_id", len(source))
    return renumbered(source, **ids, pad=None if pad in ids.values() else pad), target_vocabulary


SPECIAL = {"eos": "</s>", "unk": "<unk>"}


def _text(token: Any, default: str) -> Any:
    """A token of tokenizer_config.json, which may be an object around its text."""
    return token.get("content", default) if isinstance(token, dict) else (token or default)


def _token_id(fields: Fields, name: str, size: int, default: int | None = None) -> int:
    value = fields.options.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise fields.error(name, f"expected an id of the vocabulary, from 0 to {size - 1}")
    return value


def read_pieces(path: pathlib.Path, *, rows: int) -> list[str]:
    """The pieces of a vocab.json by their ids, with those of an added_tokens.json beside it.

    Raises:
      UserError: unless every id from 0 to `rows` − 1 has one piece.
    """
    ids = read_json(path)
    added = path.with_name("added_tokens.json")
    ids |= read_json(added) if added.exists() else {}
    by_id: dict[Any, str] = {}
    for piece, number in ids.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < rows:
            raise UserError(f"{path}: the piece {piece!r} has the id {number!r}, but the table has {rows:,} rows.")
        if number in by_id:
            raise UserError(f"{path}: the pieces {by_id[number]!r} and {piece!r} have one id, {number}.")
        by_id[number] = piece
    if len(by_id) < rows:
        missing = next(number for number in range(rows) if number not in by_id)
        raise UserError(f"{path}: no piece has the id {missing}, but the table has {rows:,} rows.")
    return [by_id[number] for number in range(rows)]


# Tensors


def _rules(
    model: TransformerConfig, tables: _Tables, source: Vocabulary, target: Vocabulary, fields: Fields
) -> tuple[list[Rule], dict[str, np.ndarray]]:
    """The rules, and the parameters that come from no tensor."""
    start = _token_id(fields, "decoder_start_token_id", tables.target_rows, default=fields.options.get("pad_token_id"))
    multiple = model.vocab_multiple

    def rows(vocabulary: Vocabulary):
        order = [number for number in vocabulary.ids[1:] if number is not None]
        first = start if vocabulary.ids[0] is None else vocabulary.ids[0]
        return vocabulary_rows(order, start=first, multiple=multiple)

    def bias(tensor: np.ndarray) -> np.ndarray:
        values = rows(target)(tensor.reshape(-1))
        if target.ids[0] is None:
            values[0] = OUT_OF_SOFTMAX
        return values

    rules = [Rule("source_embedding/table", tables.source, rows(source))]
    if model.tying != Tying.ALL:
        rules.append(Rule("target_embedding/table", tables.target, rows(target)))
    if model.tying == Tying.NONE:
        rules.append(Rule("projection/table", tables.output, rows(target)))
    if model.output_bias:
        rules.append(Rule("output_bias", BIAS, bias))
    if model.positions == Positions.LEARNED:
        rules += [Rule(f"{ours}_positions", POSITIONS[side]) for ours, side in SIDES.items()]
    rules += [rule._replace(theirs=f"model.{rule.theirs}") for rule in rules_of_stacks(model)]
    return [rule for rule in rules if model.attention_bias or not is_attention_bias(rule.ours)], {}


SIDES = {"source": "encoder", "target": "decoder"}


def is_attention_bias(path: str) -> bool:
    return path.endswith("/bias") and "_attention/" in path


def _unused(tensors: Mapping[str, np.ndarray], tables: _Tables, model: TransformerConfig) -> str:
    """A pattern of the names of copies of what is used, and of what is computed here."""
    used = (tables.source, tables.target, tables.output)
    copies = [
        name
        for name in (SHARED, *EMBEDDINGS.values(), HEAD)
        if name in tensors and name not in used and any(np.array_equal(tensors[name], tensors[other]) for other in used)
    ]
    if model.positions != Positions.LEARNED:
        copies += POSITIONS.values()
    if not model.output_bias and BIAS in tensors and not np.any(tensors[BIAS]):
        copies.append(BIAS)
    if not model.attention_bias:
        copies += [name for name in tensors if name.endswith("_proj.bias") and not np.any(tensors[name])]
    return "|".join(name.replace(".", r"\.") for name in copies)


def residual_factor(config: TransformerConfig) -> float:
    """By what the residual stream of an exported model is larger than ours, a power of two.

    A norm with ε of s x is a norm with ε / s² of x, and their ε is fixed: with s = 4 theirs, 1e-5, is as 6.25e-7, next
    to our usual 1e-6.
    """
    return 2.0 ** round(math.log2(EPSILON / config.norm_epsilon) / 2)


def rescaled(leaves: Mapping[str, np.ndarray], config: TransformerConfig, factor: float) -> dict[str, np.ndarray]:
    """The parameters of a post-norm model that computes the same with a residual stream `factor` times as large.

    What writes to the stream is multiplied and what reads from it divided; as `factor` is a power of two, both are
    exact, and 1 / `factor` brings the same parameters back.
    """
    last = f"decoder/layers_{config.decoder_layers - 1}/feed_forward_residual/"
    reads = ("query/kernel", "key/kernel", "value/kernel", "hidden/kernel")
    writes = ("/output/kernel", "/output/bias", "/scale", "normalize/bias", "_embedding/table", "_positions")

    def change(path: str) -> float:
        if path.startswith(last):  # read by the output only, whose table may be that of the embeddings
            return 1 / factor if config.tying != Tying.NONE else 1.0
        if path.endswith(reads):
            return 1 / factor
        return factor if path.endswith(writes) else 1.0

    return {path: leaf * np.float32(change(path)) for path, leaf in leaves.items()}


def _with_padding(leaves: dict[str, np.ndarray], path: pathlib.Path) -> dict[str, np.ndarray]:
    for name, rows in (_read_safetensors(path) if path.exists() else {}).items():
        if name not in leaves or rows.shape[1:] != leaves[name].shape[1:] or len(rows) > len(leaves[name]):
            raise UserError(f"{path}: {name} does not fit the model. Remove the file: its rows have no effect.")
        leaves[name] = np.concatenate([leaves[name][: len(leaves[name]) - len(rows)], rows.astype(np.float32)])
    return leaves
