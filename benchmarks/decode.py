"""Speed of translation beside CTranslate2 and Hugging Face, on the same weights, the same text and two threads.

    python3 -m pip install -e '.[peers]'
    python3 benchmarks/decode.py --model RUN --input FILE
    python3 benchmarks/decode.py --model RUN --input FILE --mix  # do long sentences make short ones dearer?

RUN is a pre-norm run with sinusoids, one table of embeddings and one SentencePiece model. It is made wider and deeper
without a change of what it computes: channels and heads are repeated, layers that add nothing are put on top of each
stack, and ids that are never chosen fill the vocabulary. So the big models make translations of natural lengths, and
the same ones in every engine.

The engines take turns, and medians are compared. Cutting into pieces and joining them is part of the time; loading the
model and compiling are not. Those are in the second table, for which each engine translates one line in a process of
its own: the time from the start of the process to the translation, and the highest memory.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
THREADS, BATCH, EXTRA_LENGTH = 2, 32, 50
IMPOSSIBLE = -1e4  # the output bias of the ids that fill the vocabulary
POSITIONS = 512

Translate = Callable[[Sequence[str], int], list[str]]  # lines, beams → texts


class Size(NamedTuple):
    width: int  # D
    layers: int  # of each stack
    vocab: int


SIZES = {"small": Size(256, 3, 8_000), "base": Size(512, 6, 32_000)}


def widened(model, size: Size):
    """A model of this size that computes what `model` does.

    Channels stand side by side, so every product with them is a sum of `times` equal parts, and kernels are divided by
    that; the table, whose embeddings are multiplied by √D, and the last norm by √times.
    """
    from transformer_jax.config import Positions
    from transformer_jax.interop.huggingface_export import position_table
    from transformer_jax.parameters import flat, nested

    config, leaves, wide = model.config.model, flat(model.params), {}
    times = size.width // config.width
    for path, leaf in leaves.items():
        tiled = np.tile(leaf, times if leaf.ndim == 1 else (times, times))
        if path.endswith("kernel"):
            tiled = tiled / times
        elif path.startswith("decoder/final_norm"):
            tiled = tiled / times**0.5
        elif path == "source_embedding/table":
            rows = leaf[: config.source_vocab]
            tiled = np.pad(np.tile(rows, (1, times)) / times**0.5, ((0, size.vocab - len(rows)), (0, 0)))
        wide[path] = tiled.astype(np.float32)
    for stack, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for path in [path for path in wide if path.startswith(f"{stack}/layers_0/")]:
            for index in range(count, size.layers):
                wide[path.replace("layers_0", f"layers_{index}")] = wide[path] * (0 if "/output/" in path else 1)
    positions = np.tile(position_table(config, POSITIONS), (1, times)).astype(np.float32)
    wide |= {"source_positions": positions, "target_positions": positions}
    wide["output_bias"] = np.where(np.arange(size.vocab) < config.source_vocab, 0, IMPOSSIBLE).astype(np.float32)
    config = dataclasses.replace(
        config,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        width=size.width,
        heads=config.heads * times,
        feed_forward=config.feed_forward * times,
        source_vocab=size.vocab,
        target_vocab=size.vocab,
        vocab_multiple=1,
        output_bias=True,
        positions=Positions.LEARNED,
        max_positions=POSITIONS,
    )
    return model._replace(
        config=dataclasses.replace(model.config, model=config),
        params=nested(wide),
        tokenizer=_filled(model.tokenizer, size.vocab),
    )


def _filled(tokenizer, vocab: int):
    """The tokenizer with pieces that no text has up to a vocabulary of this size."""
    from transformer_jax.data.segmenters import MODEL, NumberedPieces, Vocabulary
    from transformer_jax.data.tokenizer import Tokenizer

    pieces = list(tokenizer.source.pieces)
    pieces += [f"<filler {number}>" for number in range(len(pieces), vocab)]
    vocabulary = Vocabulary(tuple(pieces), tuple(range(vocab)))
    segmenter = NumberedPieces(tokenizer.source.files[MODEL], vocabulary, name="source")
    return Tokenizer(segmenter, segmenter)


def prepare(run: str, size: Size, directory: pathlib.Path) -> None:
    """Writes the widened model of `run` for this library and for CTranslate2."""
    from transformer_jax.interop import ctranslate2
    from transformer_jax.interop.model import load_model, write_run

    model = widened(load_model(run), size)
    write_run(directory / "ours", model)
    ctranslate2.write(model, directory / "ctranslate2")


def ours(directory: pathlib.Path) -> Translate:
    from transformer_jax.compilation import keep_compiled_programs
    from transformer_jax.config import LengthPenalty, SearchConfig
    from transformer_jax.decoding.translator import Translator

    keep_compiled_programs()
    translator = Translator.load(str(directory / "ours"))

    def translate(lines: Sequence[str], beams: int) -> list[str]:
        # Room for BATCH rows of sentences of up to 24 tokens, fewer of longer ones.
        tokens = BATCH * 24 * beams
        search = SearchConfig(beam_size=beams, penalty=LengthPenalty.POWER, alpha=1.0, tokens=tokens)
        return translator.best(lines, search)

    return translate


def ctranslate2(directory: pathlib.Path, compute_type: str) -> Translate:
    import ctranslate2
    import sentencepiece

    translator = ctranslate2.Translator(
        str(directory / "ctranslate2"), compute_type=compute_type, intra_threads=THREADS, inter_threads=1
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(directory / "ctranslate2" / "source.spm"))

    def translate(lines: Sequence[str], beams: int) -> list[str]:
        results = translator.translate_batch(
            pieces.encode(list(lines), out_type=str), beam_size=beams, max_batch_size=BATCH, max_decoding_length=100
        )
        return [pieces.decode(result.hypotheses[0]) for result in results]

    return translate


def hugging_face(directory: pathlib.Path) -> Translate:
    """Pegasus, the one among its models that is a pre-norm Transformer with sinusoids and no norm of the embeddings."""
    import torch
    import transformers

    from transformer_jax.interop.model import load_model
    from transformer_jax.parameters import flat

    torch.set_num_threads(THREADS)
    model = load_model(directory / "ours")
    config, leaves = model.config.model, flat(model.params)
    peer = transformers.PegasusForConditionalGeneration(
        transformers.PegasusConfig(
            vocab_size=config.source_vocab,
            d_model=config.width,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.feed_forward,
            decoder_ffn_dim=config.feed_forward,
            activation_function=str(config.activation),
            scale_embedding=True,
            max_position_embeddings=POSITIONS,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
        )
    )
    weights = {name: tensor for name, tensor in peer.state_dict().items()}
    for path, leaf in leaves.items():
        name, tensor = _name_in_pegasus(path), torch.from_numpy(np.array(leaf.T if path.endswith("kernel") else leaf))
        weights[name].copy_(tensor.reshape(weights[name].shape))
    for name, tensor in weights.items():
        if name.endswith(("proj.bias",)) and not config.attention_bias:
            tensor.zero_()
    peer.eval()
    tokenizer = model.tokenizer

    def translate(lines: Sequence[str], beams: int) -> list[str]:
        ids = tokenizer.encode_source(lines)
        order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
        texts = [""] * len(ids)
        for first in range(0, len(order), BATCH):
            some = order[first : first + BATCH]
            longest = len(ids[some[0]])
            source = torch.tensor([ids[index] + [0] * (longest - len(ids[index])) for index in some])
            with torch.inference_mode():
                found = peer.generate(
                    input_ids=source,
                    attention_mask=(source != 0).long(),
                    num_beams=beams,
                    do_sample=False,
                    max_new_tokens=longest + EXTRA_LENGTH,
                    length_penalty=1.0,
                )
            for index, text in zip(some, tokenizer.decode_target(found[:, 1:].tolist()), strict=True):
                texts[index] = text
        return texts

    return translate


def _name_in_pegasus(path: str) -> str:
    names = {
        "source_embedding/table": "model.shared.weight",
        "source_positions": "model.encoder.embed_positions.weight",
        "target_positions": "model.decoder.embed_positions.weight",
        "output_bias": "final_logits_bias",
        "encoder/final_norm/scale": "model.encoder.layer_norm.weight",
        "encoder/final_norm/bias": "model.encoder.layer_norm.bias",
        "decoder/final_norm/scale": "model.decoder.layer_norm.weight",
        "decoder/final_norm/bias": "model.decoder.layer_norm.bias",
    }
    if path in names:
        return names[path]
    stack, layer, block, *part, kind = path.split("/")
    part = "/".join(part)
    blocks = {
        "self_attention": "self_attn.",
        "cross_attention": "encoder_attn.",
        "feed_forward": "",
        "self_attention_residual": "self_attn_layer_norm",
        "cross_attention_residual": "encoder_attn_layer_norm",
        "feed_forward_residual": "final_layer_norm",
    }
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj", "hidden": "fc1"}
    parts |= {"normalize": ""}
    inner = "fc2" if block == "feed_forward" and part == "output" else parts[part]
    end = {"kernel": "weight", "scale": "weight", "bias": "bias"}[kind]
    return f"model.{stack}.layers.{layer.removeprefix('layers_')}.{blocks[block]}{inner}.{end}"


ENGINES: dict[str, Callable[[pathlib.Path], Translate]] = {
    "ours": ours,
    "CTranslate2 float32": lambda directory: ctranslate2(directory, "float32"),
    "CTranslate2 int8": lambda directory: ctranslate2(directory, "int8"),
    "Hugging Face": hugging_face,
}


def speed(directory: pathlib.Path, lines: Sequence[str], *, engines: Sequence[str], beams: int, rounds: int) -> None:
    """Prints target tokens a second of each engine."""
    from transformer_jax.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory / "ours" / "tokenizer")
    translates = {name: ENGINES[name](directory) for name in engines}
    texts = {name: translate(lines, beams) for name, translate in translates.items()}  # and compiles
    seconds = {name: [] for name in engines}
    for round in range(rounds):
        for name in list(engines) if round % 2 == 0 else list(engines)[::-1]:
            start = time.perf_counter()
            translates[name](lines, beams)
            seconds[name].append(time.perf_counter() - start)
    rates = {}
    for name in engines:
        median = statistics.median(seconds[name])
        rates[name] = sum(map(len, tokenizer.encode_target(texts[name]))) / median
        same = sum(one == other for one, other in zip(texts[name], texts["ours"], strict=True)) / len(lines)
        ratio = rates["ours"] / rates[name]
        print(f"{name:22} {beams:4} {median:9.2f} {rates[name]:9.0f} {ratio:12.2f} {100 * same:9.1f} %", flush=True)


def mixed(directory: pathlib.Path, lines: Sequence[str], *, engines: Sequence[str], beams: int, rounds: int) -> None:
    """Prints the time of short and long sentences in one file, beside the sum of their times apart."""
    words = " ".join(lines).split()
    count = len(words) // 65
    short = [" ".join(words[first : first + 5]) for first in range(0, 5 * count, 5)]
    long = [" ".join(words[first : first + 60]) for first in range(5 * count, 65 * count, 60)]
    texts = {"apart": [short, long], "mixed": [[line for pair in zip(short, long, strict=True) for line in pair]]}
    for name in engines:
        translate, seconds = ENGINES[name](directory), {way: [] for way in texts}
        for _ in range(rounds + 1):
            for way, files in texts.items():
                start = time.perf_counter()
                for file in files:
                    translate(file, beams)
                seconds[way].append(time.perf_counter() - start)
        apart, mix = (statistics.median(times[1:]) for times in seconds.values())  # the first ones compile
        print(f"{name:22} {beams:4} {apart:9.2f} {mix:9.2f} {mix / apart:9.2f}", flush=True)


def cold(directory: pathlib.Path, line: str) -> None:
    """Prints how long each engine takes for one line in a new process, and its highest memory."""
    with tempfile.TemporaryDirectory() as programs:
        for name in ("ours", "ours", *list(ENGINES)[1:]):
            start = time.perf_counter()
            command = [sys.executable, __file__, "--one", name, "--directory", str(directory), "--line", line]
            environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": programs, "PYTHONPATH": str(ROOT)}
            result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            seconds, memory = time.perf_counter() - start, json.loads(result.stdout.splitlines()[-1])
            print(f"{name:22} {seconds:9.2f} {memory:9.0f}", flush=True)


def highest_memory() -> float:
    """Of this process, in MiB (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="the run directory")
    parser.add_argument("--input", help="text to translate")
    parser.add_argument("--lines", type=int, default=256, help="how many lines of it")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--beams", nargs="+", type=int, default=[4, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--mix", action="store_true", help="instead: sentences of 5 and of 60 words, mixed and apart")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--line", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        ENGINES[options.one](options.directory)([options.line], 4)
        print(highest_memory())
        return
    lines = pathlib.Path(options.input).read_text(encoding="utf-8").split("\n")[: options.lines]
    options.engines = list(dict.fromkeys(["ours", *options.engines]))
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as directory:
            prepare(options.model, SIZES[size], pathlib.Path(directory))
            if options.mix:
                print(f"{size:22} beam     apart     mixed mixed / apart")
                for beams in options.beams:
                    mixed(pathlib.Path(directory), lines, engines=options.engines, beams=beams, rounds=options.rounds)
                continue
            print(f"{size:22} beam   seconds  tokens/s  ours / this  as ours")
            for beams in options.beams:
                speed(pathlib.Path(directory), lines, engines=options.engines, beams=beams, rounds=options.rounds)
            print(f"{size + ', one line':22}   seconds       MiB")
            cold(pathlib.Path(directory), lines[0])


if __name__ == "__main__":
    main()
