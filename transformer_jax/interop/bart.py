"""Hugging Face's `BartForConditionalGeneration`: a directory with config.json, weights, and the tokenizer's
tokenizer.json or vocab.json and merges.txt.

Their decoder starts from `</s>` and then writes `<s>`; so does every source begin, and every reference. Here id 0 has
the embedding of `</s>` and is out of the softmax, EOS is 1 and `<unk>` 2; `<s>`, `<pad>` and all others follow in their
order. The probabilities stay what they were.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import Positions, TransformerConfig, Tying
from transformer_jax.config_check import check
from transformer_jax.data.segmenters import BytePieces, Vocabulary, renumbered
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.fairseq_names import rules_of_stacks
from transformer_jax.interop.huggingface import (
    ACTIVATIONS,
    CONFIG,
    EPSILON,
    GENERATION,
    Fields,
    imported_config,
    read_bytes,
    read_json,
    read_weights,
    search_config,
)
from transformer_jax.interop.mapping import Rule, apply_rules, layer_count, vocabulary_rows
from transformer_jax.interop.model import OUT_OF_SOFTMAX, Imported, Model

FIRST_POSITION = 2  # the row of the first position in their tables
SHARED, BIAS = "model.shared.weight", "final_logits_bias"
NOT_COVERED = "normalize_before", "add_final_layer_norm", "static_position_embeddings"  # of configurations of 2020
UNUSED = r"(model\.)?(encoder|decoder)\.version|model\.(encoder|decoder)\.embed_tokens\.weight|model\.shared\.weight"


class Tables(NamedTuple):
    """The names of the tensors with a row for each token."""

    source: str
    target: str
    output: str


def read(directory: pathlib.Path) -> Imported:
    """
    Raises:
      UserError: if a file is missing or damaged, or the model has what this library's Transformer has not.
    """
    fields = Fields(read_json(directory / CONFIG), str(directory / CONFIG))
    _check_kind(fields)
    path, found = read_weights(directory)
    tensors = _with_prefix(found)
    tables = _tables(tensors, fields, str(path))
    model = _model_config(tensors, tables, fields)
    definition, vocabulary = _vocabulary(directory, fields, rows=len(tensors[tables.source]))
    model.source_vocab = model.target_vocab = len(vocabulary.pieces)
    search, notes = search_config(directory, fields.options, vocabulary)
    config = imported_config(model, search, joint=True, limit=model.max_positions)
    check(config)
    start = _start(directory, fields, rows=len(tensors[tables.source]))
    rules = [*_rules(tables, model, vocabulary, start), *_with_model(rules_of_stacks(model))]
    if BIAS not in tensors:  # what is saved of a BartModel
        tensors[BIAS] = np.zeros((1, len(tensors[tables.output])), np.float32)
    unused = UNUSED if fields.get("tie_word_embeddings", True) is False else UNUSED + r"|lm_head\.weight"
    params, mapped = apply_rules(rules, tensors, model, path=str(path), unused=unused)
    name = str(directory / TOKENIZER_FILE)
    tokenizer = Tokenizer(*[BytePieces(definition, vocabulary, name=name)] * 2)
    notes = ["id 0 has the embedding from which the decoder starts, and is out of the softmax", *notes]
    return Imported(Model(config, params, tokenizer), mapped, notes)


TOKENIZER_FILE, PIECES, MERGES = "tokenizer.json", "vocab.json", "merges.txt"


def _check_kind(fields: Fields) -> None:
    if fields.options.get("model_type") != "bart":
        raise fields.error("model_type", "only `bart` can be imported as BART: mBART's sources end with a language")
    for name in NOT_COVERED:
        if fields.get(name, False):
            raise fields.error(name, "such a model can't be imported")


def _with_prefix(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of a BartForConditionalGeneration, where a BartModel was saved."""
    if "shared.weight" not in tensors:
        return dict(tensors)
    return {name if name == BIAS else f"model.{name}": tensor for name, tensor in tensors.items()}


def _tables(tensors: Mapping[str, np.ndarray], fields: Fields, path: str) -> Tables:
    """
    Raises:
      UserError: if one is missing, or has another size than the configuration says.
    """

    def first(*names: str) -> str:
        return next((name for name in names if name in tensors), names[-1])

    encoder, decoder = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
    if fields.get("tie_word_embeddings", True):
        tables = Tables(*[first(SHARED, encoder, decoder)] * 3)
    else:
        tables = Tables(first(encoder, SHARED), first(decoder, SHARED), first("lm_head.weight", decoder, SHARED))
    shape = fields.size("vocab_size"), fields.size("d_model")
    for name in tables:
        if name not in tensors:
            raise UserError(f"{path}: the tensor {name} is missing. Give a whole BartForConditionalGeneration.")
        if tensors[name].shape != shape:
            raise UserError(
                f"{path}: the tensor {name} has shape {list(tensors[name].shape)}, but vocab_size and d_model of "
                f"{CONFIG} are {list(shape)}. The two are not of one model: copy both again."
            )
    return tables


def _model_config(tensors: Mapping[str, np.ndarray], tables: Tables, fields: Fields) -> TransformerConfig:
    activation = fields.get("activation_function", "gelu")
    if activation not in ACTIVATIONS:
        raise fields.error("activation_function", f"expected one of {', '.join(ACTIVATIONS)}")
    for side in ("encoder", "decoder"):
        if fields.size(f"{side}_layers") != layer_count(tensors, f"model.{side}.layers."):
            raise fields.error(f"{side}_layers", f"the weights have {layer_count(tensors, f'model.{side}.layers.')}")
    source, target, output = (tensors[name] for name in tables)
    tied = np.array_equal(target, output)
    return TransformerConfig(
        encoder_layers=fields.size("encoder_layers"),
        decoder_layers=fields.size("decoder_layers"),
        width=fields.size("d_model"),
        heads=fields.same("attention_heads"),
        feed_forward=max(fields.size("encoder_ffn_dim"), fields.size("decoder_ffn_dim")),
        activation=ACTIVATIONS[activation],
        attention_bias=True,
        norm_epsilon=EPSILON,
        embedding_scale=fields.get("scale_embedding", False),
        embedding_norm=True,
        output_bias=True,
        positions=Positions.LEARNED,
        max_positions=fields.size("max_position_embeddings"),
        tying=(Tying.ALL if np.array_equal(source, target) else Tying.DECODER) if tied else Tying.NONE,
        dropout=float(fields.get("dropout", 0.1)),
        attention_dropout=float(fields.get("attention_dropout", 0.0)),
        feed_forward_dropout=float(fields.get("activation_dropout", 0.0)),
    )


def _start(directory: pathlib.Path, fields: Fields, *, rows: int) -> int:
    """The id from which the decoder starts."""
    path = directory / GENERATION
    options = {**fields.options, **(read_json(path) if path.exists() else {})}
    start = next((options[name] for name in ("decoder_start_token_id", "eos_token_id") if name in options), 2)
    if type(start) is not int or not 0 <= start < rows:
        raise UserError(f"{path}: decoder_start_token_id is {start!r}; expected an id of the vocabulary.")
    return start


def _rules(tables: Tables, config: TransformerConfig, vocabulary: Vocabulary, start: int) -> Iterator[Rule]:
    """Embeddings, positions, projection and its bias."""
    order = [number for number in vocabulary.ids if number is not None]
    rows = vocabulary_rows(order, start=start, multiple=config.vocab_multiple)

    def bias(tensor: np.ndarray) -> np.ndarray:
        values = rows(tensor.reshape(-1))
        values[0] = OUT_OF_SOFTMAX
        return values

    yield Rule("source_embedding/table", tables.source, rows)
    if config.tying != Tying.ALL:
        yield Rule("target_embedding/table", tables.target, rows)
    if config.tying == Tying.NONE:
        yield Rule("projection/table", tables.output, rows)
    yield Rule("output_bias", BIAS, bias)
    for ours, theirs in (("source_positions", "encoder"), ("target_positions", "decoder")):
        yield Rule(ours, f"model.{theirs}.embed_positions.weight", lambda table: table[FIRST_POSITION:])


def _with_model(rules: Iterator[Rule]) -> Iterator[Rule]:
    return (rule._replace(theirs=f"model.{rule.theirs}") for rule in rules)


def _vocabulary(directory: pathlib.Path, fields: Fields, *, rows: int) -> tuple[bytes, Vocabulary]:
    """The definition of the tokenizer, and its pieces, one for each row of the embeddings.

    A piece without a row, as `<mask>` in bart-large-cnn, is unknown to the model; a row without a piece is never met.
    """
    tokenizer = _tokenizer(directory)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    by_id = {number: piece for piece, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    pieces = [by_id.get(number, f"<row {number}>") for number in range(rows)]
    special = {name: _special(tokenizer, fields, name, default) for name, default in SPECIAL.items()}
    if tokenizer.encode("").ids != [special["bos"], special["eos"]]:
        raise UserError(f"{directory}: the tokenizer does not put <s> and </s> around a text. Give BART's own.")
    return tokenizer.to_str().encode(), renumbered(pieces, eos=special["eos"], unk=special["unk"], pad=None)


SPECIAL = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}


def _special(tokenizer: Any, fields: Fields, name: str, piece: str) -> int:
    found, expected = tokenizer.token_to_id(piece), fields.options.get(f"{name}_token_id")
    if found is None or expected not in (None, found):
        raise fields.error(f"{name}_token_id", f"the tokenizer gives {piece} the id {found}")
    return found


def _tokenizer(directory: pathlib.Path) -> Any:
    """The tokenizer of the library `tokenizers`: its own file, or made of GPT-2's two."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            f"{directory}: BART's tokenizer needs the library tokenizers: pip install tokenizers."
        ) from error
    path = directory / TOKENIZER_FILE
    try:
        if path.exists():
            return tokenizers.Tokenizer.from_str(read_bytes(path).decode())
        path = directory / PIECES
        pieces, merges = read_json(path), _merges(directory / MERGES)
        model = tokenizers.models.BPE(pieces, merges)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        special = [piece for piece in ("<s>", "<pad>", "</s>", "<unk>") if piece in pieces]
        tokenizer.add_special_tokens(special)
        if "<mask>" in pieces:
            tokenizer.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True, special=True)])
        tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
            ("</s>", pieces["</s>"]), ("<s>", pieces["<s>"]), True, False
        )
        return tokenizer
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path}: not BART's tokenizer ({error!s:.200}). Copy it again.") from error


def _merges(path: pathlib.Path) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, one a line; a first line that begins with #version is none."""
    try:
        lines = read_bytes(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}). Copy it again.") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        one, _, other = line.rstrip("\r").partition(" ")
        if not one or not other or " " in other:
            raise UserError(f"{path} line {number:,}: expected two pieces, found {line[:80]!r}.")
        pairs.append((one, other))
    return pairs
