"""Tiny models in the files of other systems, and of this library, for the tests of `transformer_jax.interop`."""

import functools
import io
import json
import pathlib

import numpy as np
import sentencepiece

from transformer_jax.config import Config, DataConfig, SearchConfig, TokenizerConfig, TransformerConfig, Tying
from transformer_jax.data.corpus import Pair
from transformer_jax.data.phrasebook import phrases
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.interop.model import Model
from transformer_jax.parameters import nested, shapes

D, N, F, LAYERS = 16, 4, 24, 2
PAIRS = [Pair(*phrase) for phrase in phrases("en", "de", split="train", size=300)]
LINES = [pair.source for pair in PAIRS[:6]]


@functools.cache
def sentence_model(side: str) -> bytes:
    """A SentencePiece model as Marian trains them: EOS 0, unknown 1."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([getattr(pair, side) for pair in PAIRS]),
        model_writer=model,
        vocab_size=90,
        eos_id=0,
        unk_id=1,
        bos_id=-1,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


@functools.cache
def own_pieces(side: str) -> tuple[str, ...]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=sentence_model(side))
    return tuple(processor.id_to_piece(number) for number in range(processor.piece_size()))


@functools.cache
def joint_pieces() -> tuple[str, ...]:
    """A joint vocabulary in which `</s>` is not the first, with a language tag."""
    rest = sorted({*own_pieces("source"), *own_pieces("target")} - {"</s>", "<unk>"})
    return (">>deu<<", *rest[:20], "</s>", *rest[20:], "<unk>")


def write_segmenters(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for side in ("source", "target"):
        (directory / f"{side}.spm").write_bytes(sentence_model(side))


def marian_weights(
    *, vocab: tuple[int, int], tied: str = "all", pre: bool = False, seed: int = 0, embedding_norm=False
):
    """The tensors of a model in Marian's names; `tied` is all, src, out (target embeddings and output) or none."""
    draw = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, *shape: int) -> None:
        weights[name] = draw.normal(0, 0.3, shape).astype(np.float32)

    def norm(name: str, suffix: str) -> None:
        weights[f"{name}_ln_scale{suffix}"] = draw.normal(1, 0.1, (1, D)).astype(np.float32)
        weights[f"{name}_ln_bias{suffix}"] = draw.normal(0, 0.1, (1, D)).astype(np.float32)

    if tied in ("all", "src"):
        matrix("Wemb", vocab[0], D)
    else:
        matrix("encoder_Wemb", vocab[0], D)
        matrix("decoder_Wemb", vocab[1], D)
    if tied in ("src", "none"):
        matrix("decoder_ff_logit_out_W", D, vocab[1])
    matrix("decoder_ff_logit_out_b", 1, vocab[1])
    suffix = "_pre" if pre else ""
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "context"))):
        for layer in range(1, LAYERS + 1):
            for attention in attentions:
                for part in "qkvo":
                    matrix(f"{stack}_l{layer}_{attention}_W{part}", D, D)
                    matrix(f"{stack}_l{layer}_{attention}_b{part}", 1, D)
                norm(f"{stack}_l{layer}_{attention}_Wo", suffix)
            matrix(f"{stack}_l{layer}_ffn_W1", D, F)
            matrix(f"{stack}_l{layer}_ffn_b1", 1, F)
            matrix(f"{stack}_l{layer}_ffn_W2", F, D)
            matrix(f"{stack}_l{layer}_ffn_b2", 1, D)
            norm(f"{stack}_l{layer}_ffn_ffn", suffix)
        if pre:
            norm(f"{stack}_top", "")
        if embedding_norm:
            norm(f"{stack}_emb", "_pre")
    return weights


def marian_options(*, vocab: tuple[int, int], tied: str = "all", pre: bool = False, **others) -> dict:
    return {
        "type": "transformer",
        "dim-emb": D,
        "dim-vocabs": list(vocab),
        "enc-depth": LAYERS,
        "dec-depth": LAYERS,
        "transformer-heads": N,
        "transformer-dim-ffn": F,
        "transformer-ffn-depth": 2,
        "transformer-ffn-activation": "swish",
        "transformer-preprocess": "n" if pre else "",
        "transformer-postprocess": "da" if pre else "dan",
        "transformer-postprocess-top": "n" if pre else "",
        "transformer-postprocess-emb": "d",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-guided-alignment-layer": "last",
        "transformer-no-projection": False,
        "tied-embeddings": tied == "out",
        "tied-embeddings-src": tied == "src",
        "tied-embeddings-all": tied == "all",
        **{name.replace("_", "-"): value for name, value in others.items()},
    }


def write_marian(directory: pathlib.Path, weights, options, pieces, *, nuls: int = 3) -> None:
    """A directory as Marian leaves it. JSON is YAML too; `pieces` are of both sides, or those of each."""
    write_segmenters(directory)
    content = json.dumps(options).encode() + b"\0" * nuls
    np.savez(directory / "model.npz", **weights, **{"special:model.yml": np.frombuffer(content, np.int8)})
    sides = (
        {"vocab.yml": pieces[0]}
        if pieces[0] == pieces[1]
        else {"m.src.vocab.yml": pieces[0], "m.trg.vocab.yml": pieces[1]}
    )
    for name, side in sides.items():
        lines = (f"{json.dumps(piece, ensure_ascii=False)}: {number}\n" for number, piece in enumerate(side))
        (directory / name).write_text("".join(lines), encoding="utf-8")


def own_model(**fields) -> Model:
    """A model of this library with random parameters, norms and biases too."""
    joint = fields.get("tying", Tying.ALL) == Tying.ALL
    tokenizer = _own_tokenizer(joint)
    defaults = dict(encoder_layers=LAYERS, decoder_layers=LAYERS, width=D, heads=N, feed_forward=F, vocab_multiple=64)
    config = TransformerConfig(
        **{**defaults, **fields}, source_vocab=tokenizer.source_vocab, target_vocab=tokenizer.target_vocab
    )
    draw = np.random.default_rng(1)
    leaves = {
        path: (draw.normal(0, 0.25, shape) + path.endswith("/scale")).astype(np.float32)
        for path, shape in shapes(config).items()
    }
    limit = min(config.max_positions, 256)
    data = DataConfig(max_length=limit, tokenizer=TokenizerConfig(joint=joint))
    search = SearchConfig(beam_size=1, extra_length=5)
    return Model(Config(model=config, data=data, search=search), nested(leaves), tokenizer)


@functools.cache
def _own_tokenizer(joint: bool):
    return train_tokenizer(PAIRS, TokenizerConfig(vocab=120, joint=joint))
