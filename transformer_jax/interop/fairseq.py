"""Transformers that fairseq trained: MODEL.pt with dict.SOURCE.txt and dict.TARGET.txt, and beside them what cuts
words into pieces: one SentencePiece .model, or the merges of subword-nmt or fastBPE (bpecodes, codes or code). Without
either the text to translate has to be cut already.

Their ids are `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3 and then the lines of dict.txt, and their decoder starts with
`</s>`. Here id 0 has the embedding of `</s>` and is out of the softmax, EOS is 1 and `<unk>` 2; `<s>`, `<pad>` and all
others follow in their order. The probabilities stay what they were.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import (
    Activation,
    Beam,
    LengthPenalty,
    NormPlace,
    Positions,
    SearchConfig,
    SinusoidLayout,
    TransformerConfig,
    Tying,
)
from transformer_jax.data.segmenters import CODES, NumberedPieces, Segmenter, WordPieces, renumbered
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop import torch_file
from transformer_jax.interop.fairseq_names import rules_of_stacks
from transformer_jax.interop.huggingface import imported_config
from transformer_jax.interop.mapping import Rule, apply_rules, layer_count, vocabulary_rows
from transformer_jax.interop.model import OUT_OF_SOFTMAX, Imported, Mapped, Model

BOS, PAD, EOS, UNK = range(4)  # fairseq's
SPECIAL: tuple[str, ...] = ("<s>", "<pad>", "</s>", "<unk>")
FIRST_POSITION = PAD + 1  # positions count from here
STACKS = "encoder", "decoder"
TABLES = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"
CODE_FILES = "bpecodes", "codes", "code", "bpe.codes"
OVERWRITE = "#fairseq:overwrite"

SEARCH = SearchConfig(  # what fairseq-generate does if it is told nothing
    beam_size=5,
    beam=Beam.FULL,
    penalty=LengthPenalty.POWER,
    alpha=1.0,
    length_factor=0.0,
    extra_length=201,  # 200 and EOS, whatever the source
    min_length=2,  # something before EOS
    suppressed=(4,),  # <pad>
)

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_accurate": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "swish": Activation.SWISH,
    "silu": Activation.SWISH,
}
OTHER_MODELS = (
    *("_lm", "bart", "autoregressive", "autoencoder", "monotonic", "unidirectional", "multilingual", "pointer"),
)
NOT_COVERED = (  # options that change the model, and are off if missing, empty, false or zero
    *("adaptive_input", "adaptive_softmax_cutoff", "tie_adaptive_weights", "base_layers", "char_inputs"),
    *("cross_self_attention", "no_cross_attention", "encoder_layers_to_keep", "decoder_layers_to_keep"),
    *("encoder_add_adapters", "decoder_add_adapters"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config", "merge_src_tgt_embed", "use_factorized_embedding"),
    *("no_token_positional_embeddings", "quant_noise_pq", "quant_noise_scalar", "no_decoder_final_norm"),
)


class Weights(NamedTuple):
    params: dict[str, Any]
    config: TransformerConfig
    mapped: list[Mapped]


def read(path: pathlib.Path) -> Imported:
    """The model of a checkpoint, or of a directory with one, `checkpoint_best.pt` or `model.pt` before others.

    Raises:
      UserError: if something is missing, damaged or of another kind than this library's.
    """
    checkpoint = _checkpoint(path)
    tensors, options = read_checkpoint(checkpoint)
    params, model, mapped = weights(tensors, options, path=str(checkpoint))
    languages = tuple(str(options.get(f"{side}_lang")) for side in ("source", "target"))
    tokenizer = _tokenizer(checkpoint.parent, languages)
    for side, language in zip(("source", "target"), languages, strict=True):
        found, expected = getattr(tokenizer, f"{side}_vocab"), getattr(model, f"{side}_vocab")
        if found != expected:
            raise UserError(
                f"{checkpoint.parent / f'dict.{language}.txt'}: {found - 1:,} symbols with fairseq's four, but the "
                f"model has {expected - 1:,}. Give the dict.txt that the model was trained with."
            )
    positions = model.max_positions if model.positions == Positions.LEARNED else 1024
    longest = min(int(_number(options, "max_source_positions", str(checkpoint)) or positions), positions)
    config = imported_config(model, SEARCH, joint=tokenizer.joint, limit=longest)
    config.data = dataclasses.replace(config.data, source=languages[0], target=languages[1])
    notes = ["id 0 has the embedding of </s>, from which the decoder starts, and is out of the softmax"]
    if isinstance(tokenizer.source, WordPieces):
        cut = "cut by the merges here" if tokenizer.source.files[CODES] else "cut into pieces"
        notes.append(f"the text to translate has to be tokenised as for training, and is then {cut}")
    return Imported(Model(config, params, tokenizer), mapped, notes)


def read_checkpoint(path: str | pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the options of a checkpoint, the model's and the task's in one dictionary.

    Raises:
      UserError: if the file is damaged, would run code, or is no checkpoint of fairseq.
    """
    saved = torch_file.read(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path}: not a checkpoint of fairseq, which has an entry `model`.")
    try:
        args, cfg = torch_file.plain(saved.get("args")), torch_file.plain(saved.get("cfg"))
    except RecursionError as error:
        raise UserError(f"{path}: the options of the checkpoint contain themselves.") from error
    if not isinstance(args, dict) and not isinstance(cfg, dict):
        raise UserError(f"{path}: the checkpoint has neither `args` nor `cfg`, so its options are not known.")
    cfg = cfg if isinstance(cfg, dict) else {}
    parts = [args, cfg.get("task"), cfg.get("model")]
    options = {name: value for part in parts if isinstance(part, dict) for name, value in _flat(part).items()}
    model, task = cfg.get("model"), cfg.get("task")
    if isinstance(model, dict):
        options["arch"] = model.get("arch") or model.get("_name")
    if isinstance(task, dict):
        options["task"] = task.get("_name") or task.get("task")
    tensors = {str(name): tensor for name, tensor in saved["model"].items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            raise UserError(f"{path}: {name} is a {type(tensor).__name__}; expected tensors alone in `model`.")
    simple = (str, int, float, list, type(None))
    return tensors, {name: value for name, value in options.items() if isinstance(value, simple)}


def read_dictionary(path: str | pathlib.Path) -> list[str]:
    """The symbols of a dict.txt, fairseq's four first. A word is read before the last space of its line.

    Raises:
      UserError: for a line that is not `word count`, and for a word that comes twice.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}). Give the dict.txt of the model.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    symbols, seen = list(SPECIAL), set(SPECIAL)
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        word, _, count = line.rstrip().rpartition(" ")
        overwrite = count == OVERWRITE
        if overwrite:
            word, _, count = word.rpartition(" ")
        if " " not in line.rstrip() or not count.lstrip("-").isdecimal():
            raise UserError(f"{path} line {number:,}: expected `word count`, found {line[:80]!r}.")
        if word in seen and not overwrite:
            raise UserError(
                f"{path} line {number:,}: the word {word!r} comes a second time. If it is meant to take the place of "
                f"the first, end the line with {OVERWRITE}."
            )
        if word in seen:
            symbols[symbols.index(word)] = f"{word} (overwritten)"
        symbols.append(word)
        seen.add(word)
    return symbols


def _checkpoint(path: pathlib.Path) -> pathlib.Path:
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.pt"))
    best = [file for name in ("checkpoint_best.pt", "model.pt") for file in found if file.name == name]
    if not best and len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise UserError(f"{path}: expected one checkpoint of fairseq (.pt), found {names}. Give the path of one.")
    return (best or found)[0]


def _tokenizer(directory: pathlib.Path, languages: tuple[str, ...]) -> Tokenizer:
    """dict.txt numbers the pieces; what cuts them lies beside it."""
    models = sorted(directory.glob("*.model"))
    codes = [file for name in CODE_FILES if (file := directory / name).exists()]
    if len(models) + len(codes) > 1:
        names = ", ".join(file.name for file in (*models, *codes))
        raise UserError(f"{directory}: several files say how words are cut: {names}. Leave the one of this model.")

    def side(language: str) -> Segmenter:
        path = directory / f"dict.{language}.txt"
        numbered = renumbered(read_dictionary(path), eos=EOS, unk=UNK, pad=None)
        if models:
            return NumberedPieces(models[0].read_bytes(), numbered, name=str(models[0]))
        return WordPieces(codes[0].read_bytes() if codes else b"", numbered, name=str(codes[0] if codes else path))

    return Tokenizer(*map(side, languages))


def id_order(size: int) -> list[int]:
    """fairseq's ids of our ids 1, 2, 3, …"""
    return [EOS, UNK, BOS, PAD, *range(4, size)]


def weights(tensors: Mapping[str, np.ndarray], options: Mapping[str, Any], *, path: str) -> Weights:
    """The parameters and the configuration of a model from what `read_checkpoint` gives.

    Raises:
      UserError: if it is of another kind than this library's, or the tensors and the options don't belong together.
    """
    _check_kind(options, path)
    tensors = _upgraded(tensors)
    for name in TABLES:
        if name not in tensors or tensors[name].ndim != 2:
            raise UserError(f"{path}: the matrix {name} is missing. Give the whole file of a translation model.")
    config = _config(tensors, options, path)
    rules = [*_vocabulary_rules(tensors, config), *rules_of_stacks(config)]
    unused = r"(encoder|decoder)\.(version|embed_positions\.(_float_tensor|weights))"
    if config.tying != Tying.NONE:
        unused += r"|decoder\.output_projection\.weight"
    if config.tying == Tying.ALL:
        unused += r"|decoder\.embed_tokens\.weight"
    bias = {"output_bias": out_of_softmax(config)}
    params, mapped = apply_rules(rules, tensors, config, path=path, unused=unused, added=bias)
    return Weights(params, config, mapped)


def out_of_softmax(config: TransformerConfig) -> np.ndarray:
    """An output bias that takes id 0 out of the softmax, float32 [padded V]."""
    assert config.target_vocab is not None
    rows = -(-config.target_vocab // config.vocab_multiple) * config.vocab_multiple
    return np.where(np.arange(rows) == 0, np.float32(OUT_OF_SOFTMAX), np.float32(0))


def _vocabulary_rules(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> Iterator[Rule]:
    """Embeddings, projection and learned positions."""

    def table(ours: str, theirs: str) -> Rule:
        order = id_order(len(tensors[theirs]))
        return Rule(f"{ours}/table", theirs, vocabulary_rows(order, start=EOS, multiple=config.vocab_multiple))

    yield table("source_embedding", TABLES[0])
    if config.tying != Tying.ALL:
        yield table("target_embedding", TABLES[1])
    if config.tying == Tying.NONE:
        yield table("projection", TABLES[2])
    if config.positions == Positions.LEARNED:
        last = FIRST_POSITION + config.max_positions
        for ours, theirs in (("source_positions", "encoder"), ("target_positions", "decoder")):
            yield Rule(ours, f"{theirs}.embed_positions.weight", lambda rows: rows[FIRST_POSITION:last])


def _check_kind(options: Mapping[str, Any], path: str) -> None:
    arch, task = str(options.get("arch")), str(options.get("task") or "translation")
    if "transformer" not in arch or any(part in arch for part in OTHER_MODELS):
        raise UserError(f"{path}: the architecture is {arch}; only fairseq's `transformer` models can be imported.")
    if task not in ("translation", "translation_with_alignment"):
        raise UserError(f"{path}: trained for the task {task}; only models of the task `translation` can be imported.")
    for name in NOT_COVERED:
        if options.get(name) not in (None, False, 0, "", "[]", []):
            raise UserError(f"{path}: trained with {name}={options[name]!r}, which this library's Transformer has not.")


def _config(tensors: Mapping[str, np.ndarray], options: Mapping[str, Any], path: str) -> TransformerConfig:
    """What the tensors say, and the options where they don't."""
    activation = str(options.get("activation_fn") or "relu")
    if activation not in ACTIVATIONS:
        raise UserError(f"{path}: the activation {activation!r} is not one of {', '.join(ACTIVATIONS)}.")
    learned = _both(tensors, "embed_positions.weight", "learned positions", path)
    positions = [len(tensors[f"{name}.embed_positions.weight"]) for name in STACKS if learned]
    source, target, output = (tensors[name] for name in TABLES)
    return TransformerConfig(
        encoder_layers=layer_count(tensors, "encoder.layers."),
        decoder_layers=layer_count(tensors, "decoder.layers."),
        width=source.shape[1],
        heads=_heads(options, path),
        feed_forward=max((len(tensor) for name, tensor in tensors.items() if name.endswith(".fc1.bias")), default=0),
        activation=ACTIVATIONS[activation],
        attention_bias=True,
        norm_place=NormPlace.PRE if _pre_norm(tensors, options, path) else NormPlace.POST,
        norm_epsilon=1e-5,
        embedding_scale=not options.get("no_scale_embedding"),
        embedding_norm=_both(tensors, "layernorm_embedding.weight", "a norm of the embeddings", path),
        output_bias=True,
        positions=Positions.LEARNED if learned else Positions.SINUSOIDAL,
        sinusoid_layout=SinusoidLayout.T2T,
        first_position=FIRST_POSITION,
        max_positions=min(positions) - FIRST_POSITION if learned else 1024,
        tying=_tying(source, target, output),
        dropout=_number(options, "dropout", path),
        attention_dropout=_number(options, "attention_dropout", path),
        feed_forward_dropout=_number(options, "activation_dropout", path) or _number(options, "relu_dropout", path),
        source_vocab=len(source) + 1,
        target_vocab=len(target) + 1,
    )


def _tying(source: np.ndarray, target: np.ndarray, output: np.ndarray) -> Tying:
    """What is equal is one matrix: checkpoints hold a copy for each name."""
    if not np.array_equal(target, output):
        return Tying.NONE
    return Tying.ALL if np.array_equal(source, target) else Tying.DECODER


def _pre_norm(tensors: Mapping[str, np.ndarray], options: Mapping[str, Any], path: str) -> bool:
    final = _both(tensors, "layer_norm.weight", "a final norm", path)
    before = [bool(options.get(f"{name}_normalize_before")) for name in STACKS]
    if before != [final, final]:
        raise UserError(
            f"{path}: encoder_normalize_before is {before[0]} and decoder_normalize_before {before[1]}, and the stacks "
            f"have {'final norms' if final else 'no final norm'}. Stacks of two kinds, and pre-norm stacks without a "
            "final norm, can't be imported."
        )
    return final


def _number(options: Mapping[str, Any], name: str, path: str) -> float:
    """An option that is a number; 0 if it is missing."""
    value = options.get(name) or 0.0
    if not isinstance(value, int | float):
        raise UserError(f"{path}: {name} is {value!r:.80}; expected a number.")
    return float(value)


def _heads(options: Mapping[str, Any], path: str) -> int:
    encoder, decoder = (options.get(f"{name}_attention_heads") for name in STACKS)
    if encoder != decoder or not isinstance(encoder, int):
        raise UserError(
            f"{path}: encoder_attention_heads is {encoder} and decoder_attention_heads {decoder}; only models with one "
            "number for both can be imported."
        )
    return encoder


def _both(tensors: Mapping[str, np.ndarray], name: str, what: str, path: str) -> bool:
    """Whether both stacks have the tensor."""
    encoder, decoder = (f"{stack}.{name}" in tensors for stack in STACKS)
    if encoder != decoder:
        one, other = STACKS if encoder else reversed(STACKS)
        raise UserError(f"{path}: the {one} has {what} and the {other} has not. It can't be imported.")
    return encoder


def _upgraded(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names and the split projections of fairseq 0.9 and later."""
    upgraded = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in ("in_proj_weight", "in_proj_bias"):
            thirds = np.split(tensor, 3) if len(tensor) % 3 == 0 else [tensor] * 3
            for part, third in zip("qkv", thirds, strict=True):
                upgraded[f"{stem}.{part}_proj.{last.removeprefix('in_proj_')}"] = third
        elif stem.partition(".layer_norms.")[1]:
            layer, _, number = stem.partition(".layer_norms.")
            norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
            norms = norms if name.startswith("decoder") else norms[::2]
            upgraded[f"{layer}.{norms[min(int(number), len(norms) - 1)]}.{last}"] = tensor
        elif name == "decoder.embed_out":
            upgraded["decoder.output_projection.weight"] = tensor
        else:
            upgraded[name] = tensor
    if "decoder.output_projection.weight" not in upgraded and "decoder.embed_tokens.weight" in upgraded:
        upgraded["decoder.output_projection.weight"] = upgraded["decoder.embed_tokens.weight"]
    return upgraded


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """{"encoder": {"layers": 6}} → {"encoder_layers": 6}: the options of configurations of both kinds."""
    flat = {}
    for name, value in options.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{inner}": item for inner, item in value.items()}
        else:
            flat[name] = value
    return flat
