"""A model of this library as a directory of Hugging Face's `MarianMTModel` and `MarianTokenizer`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from transformer_jax.batch import EOS, PAD, UNK
from transformer_jax.config import (
    Activation,
    Config,
    LengthPenalty,
    Norm,
    NormPlace,
    Positions,
    SinusoidLayout,
    TransformerConfig,
    Tying,
)
from transformer_jax.data.segmenters import MODEL, NumberedPieces, Segmenter, Vocabulary
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.interop.fairseq_names import rules_of_stacks
from transformer_jax.interop.huggingface import (
    BIAS,
    CONFIG,
    EMBEDDINGS,
    GENERATION,
    HEAD,
    MAX_LENGTH,
    OURS,
    PADDING,
    POSITIONS,
    SAFETENSORS,
    SHARED,
    SIDES,
    TOKENIZER,
    rescaled,
    residual_factor,
)
from transformer_jax.interop.model import Mapped, Model, Path, new_directory
from transformer_jax.nn.positions import sinusoids
from transformer_jax.parameters import STORED, flat


def write(model: Model, path: Path, *, dtype: str = "float32") -> list[Mapped]:
    """Writes a directory that `MarianMTModel.from_pretrained` and `MarianTokenizer.from_pretrained` read.

    Its config.json has this library's configuration as well, from which an import takes what theirs has no field for.

    Raises:
      UserError: if the model has a part that theirs has not; it names the field.
    """
    config, vocabularies = model.config.model, _own_vocabularies(model.tokenizer)
    _check_writable(config)
    segmenters = [_sentence_model(side) for side in (model.tokenizer.source, model.tokenizer.target)]
    tensors, mapped = _tensors(model, vocabularies, STORED[dtype])
    with new_directory(path) as unfinished:
        for side, content in zip(("source", "target"), segmenters, strict=True):
            (unfinished / f"{side}.spm").write_bytes(content)
        for name, vocabulary in zip(("vocab.json", "target_vocab.json"), vocabularies, strict=True):
            if name == "vocab.json" or config.tying != Tying.ALL:
                _write_json(unfinished / name, {piece: number for number, piece in enumerate(_by_their_id(vocabulary))})
        _write_json(unfinished / CONFIG, _their_config(model, vocabularies))
        _write_json(unfinished / GENERATION, _their_generation(model.config, vocabularies[1]))
        _write_json(
            unfinished / TOKENIZER,
            {
                "tokenizer_class": "MarianTokenizer",
                "source_lang": model.config.data.source,
                "target_lang": model.config.data.target,
                "separate_vocabs": config.tying != Tying.ALL,
                "eos_token": vocabularies[0].pieces[EOS],
                "unk_token": vocabularies[0].pieces[UNK],
                "pad_token": vocabularies[0].pieces[PAD],
                "model_max_length": model.config.data.max_length,
            },
        )
        save_file(tensors, unfinished / SAFETENSORS, metadata={"format": "pt"})
        save_file(_padding(model), unfinished / PADDING)
    return mapped


def _padding(model: Model) -> dict[str, np.ndarray]:
    """The rows that fill up tables to a multiple: no logit sees them, but an import gives back what was exported."""
    sizes = {"source_embedding/table": model.config.model.source_vocab}
    sizes |= dict.fromkeys(
        ("target_embedding/table", "projection/table", "output_bias"), model.config.model.target_vocab
    )
    leaves = flat(model.params)
    return {path: np.ascontiguousarray(leaves[path][size:]) for path, size in sizes.items() if path in leaves}


NEEDED = {  # fields of a model that theirs has, and nothing else
    "norm": (Norm.LAYER,),
    "norm_place": (NormPlace.POST,),
    "gated": (False,),
    "embedding_norm": (False,),
    "positions": (Positions.SINUSOIDAL, Positions.LEARNED),
}


def _check_writable(config: TransformerConfig) -> None:
    head = config.width // config.heads
    needed = NEEDED | {"key_width": (None, head), "value_width": (None, head)}
    for field, values in needed.items():
        if getattr(config, field) not in values:
            raise UserError(
                f"config.model.{field} is {getattr(config, field)}; a MarianMTModel of Hugging Face has only "
                f"{' or '.join(map(str, values))}. Export the model as a bundle, or to CTranslate2."
            )


def _own_vocabularies(tokenizer: Tokenizer) -> list[Vocabulary]:
    """What each side numbers its pieces with: the ids that they came with, or else this library's."""
    sides = (tokenizer.source, tokenizer.target)
    return [
        side.vocabulary if isinstance(side, NumberedPieces) else Vocabulary(side.pieces, tuple(range(len(side.pieces))))
        for side in sides
    ]


def _sentence_model(side: Segmenter) -> bytes:
    if MODEL not in side.files:
        raise UserError("the tokenizer is byte-level BPE; a MarianTokenizer has SentencePiece only. Export a bundle.")
    return side.files[MODEL]


def _their_ids(vocabulary: Vocabulary) -> list[int]:
    """The id that each of our ids has there: the one it came with; pieces that came with none are the last."""
    new = sum(number is not None for number in vocabulary.ids)
    return [new if number is None else number for number in vocabulary.ids]


def _by_their_id(vocabulary: Vocabulary) -> list[str]:
    return [piece for _, piece in sorted(zip(_their_ids(vocabulary), vocabulary.pieces, strict=True))]


def _tensors(
    model: Model, vocabularies: Sequence[Vocabulary], dtype: np.dtype
) -> tuple[dict[str, np.ndarray], list[Mapped]]:
    config, factor = model.config.model, residual_factor(model.config.model)
    leaves = rescaled(flat(model.params), config, factor)
    source, target = (np.argsort(_their_ids(vocabulary)) for vocabulary in vocabularies)
    if config.tying == Tying.ALL:
        names = {"source_embedding/table": SHARED}
    else:
        names = {"source_embedding/table": EMBEDDINGS["encoder"], "target_embedding/table": EMBEDDINGS["decoder"]}
    names |= {"projection/table": HEAD} if config.tying == Tying.NONE else {}
    tensors, mapped = {}, []

    def add(theirs: str, ours: str, tensor: np.ndarray) -> None:
        tensors[theirs] = np.ascontiguousarray(tensor, dtype)
        mapped.append(Mapped(theirs, ours, tensor.shape))

    for ours, theirs in names.items():
        add(theirs, ours, leaves[ours][source if ours.startswith("source") else target])
    bias = leaves["output_bias"] if config.output_bias else np.zeros(len(target), np.float32)
    add(BIAS, "output_bias", bias[target][None])
    for ours, theirs in SIDES.items():
        if config.positions == Positions.LEARNED:
            add(POSITIONS[theirs], f"{ours}_positions", leaves[f"{ours}_positions"])
        elif config.sinusoid_layout != SinusoidLayout.CONCATENATED or config.first_position or factor != 1:
            add(POSITIONS[theirs], "sinusoids", position_table(config, MAX_LENGTH) * np.float32(factor))
    for rule in rules_of_stacks(config):
        leaf = leaves.get(rule.ours)
        if leaf is None:  # no bias on attention: theirs always has one
            leaf = np.zeros(leaves[rule.ours.replace("/bias", "/kernel")].shape[1], np.float32)
        add(f"model.{rule.theirs}", rule.ours, leaf.T)
    return tensors, mapped


def position_table(config: TransformerConfig, count: int) -> np.ndarray:
    """The sinusoids of the first positions, float32 [positions, D]."""
    positions = jnp.arange(config.first_position, config.first_position + count)
    return np.asarray(sinusoids(positions, config.width, SinusoidLayout(config.sinusoid_layout)))


def _their_config(model: Model, vocabularies: Sequence[Vocabulary]) -> dict[str, Any]:
    config = model.config.model
    source, target = (_their_ids(vocabulary) for vocabulary in vocabularies)
    activation = {Activation.GELU_TANH: "gelu_pytorch_tanh"}.get(config.activation, str(config.activation))
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "is_encoder_decoder": True,
        "vocab_size": len(source),
        "decoder_vocab_size": len(target),
        "d_model": config.width,
        **{f"{side}_layers": getattr(config, f"{side}_layers") for side in SIDES.values()},
        **{f"{side}_attention_heads": config.heads for side in SIDES.values()},
        **{f"{side}_ffn_dim": config.feed_forward for side in SIDES.values()},
        "activation_function": activation,
        "scale_embedding": config.embedding_scale,
        "static_position_embeddings": config.positions == Positions.SINUSOIDAL,
        "max_position_embeddings": config.max_positions if config.positions == Positions.LEARNED else MAX_LENGTH,
        "share_encoder_decoder_embeddings": config.tying == Tying.ALL,
        "tie_word_embeddings": config.tying != Tying.NONE,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.feed_forward_dropout,
        "pad_token_id": target[PAD],
        "decoder_start_token_id": target[PAD],
        "bos_token_id": None,
        "eos_token_id": target[EOS],
        "forced_eos_token_id": None,
        OURS: dataclasses.asdict(model.config),
    }


def _their_generation(config: Config, target: Vocabulary) -> dict[str, Any]:
    """Their search, as near to ours as its fields allow: its limit does not depend on the source, and it has no GNMT
    length penalty, for which a plain division by the length stands."""
    ids, search = _their_ids(target), config.search
    penalty = {LengthPenalty.POWER: search.alpha, LengthPenalty.NONE: 0.0}.get(search.penalty, 1.0)
    forced = {"forced_bos_token_id": ids[search.forced_prefix[0]]} if len(search.forced_prefix) == 1 else {}
    return {
        "bad_words_ids": [[ids[token]] for token in (PAD, *search.suppressed)],
        "decoder_start_token_id": ids[PAD],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
        "max_length": MAX_LENGTH,
        "num_beams": search.beam_size,
        "length_penalty": penalty,
        "no_repeat_ngram_size": search.no_repeat_ngram,
        **forced,
    }


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
