"""Translates standard input, a sentence on each line, with the programs that lie beside this file:

    echo "in 35 weeks" | python3 translate.py

There is a line of output for each line of input. It needs jax and flatbuffers, and sentencepiece or tokenizers, which
the tokenizer is made of. Where the model runs is JAX's choice (JAX_PLATFORMS).
"""

import json
import pathlib
import re
import sys
from typing import Any

import jax
import ml_dtypes  # comes with jax
import numpy as np
from jax import export

PARAMETERS, FACTS, TOKENIZER, PROGRAM = "parameters.npz", "artifact.json", "tokenizer", "search_{}.stablehlo"
EOS, UNK = 1, 2
TAG = re.compile(r">>[^<>\s]+<<")  # which language to translate into, for models that have several


class Side:
    """One side of the tokenizer."""

    processor: Any = None  # of sentencepiece
    bpe: Any = None  # of tokenizers
    pieces: Any = None  # by their ids, if those are not the processor's

    def __init__(self, directory, name):
        def file(ending):
            path = directory / f"{name}.{ending}"
            return path if path.exists() else directory / f"joint.{ending}"

        if file("vocabulary.json").exists():
            vocabulary = json.loads(file("vocabulary.json").read_text(encoding="utf-8"))
            self.pieces, self.numbers = vocabulary["pieces"], vocabulary["ids"]
            self.ids = {piece: number for number, piece in enumerate(self.pieces)}
        if file("model").exists():
            import sentencepiece

            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(file("model")))
        else:
            import tokenizers

            self.bpe = tokenizers.Tokenizer.from_file(str(file("bytes.json")))
            self.ours = {number: ours for ours, number in enumerate(self.numbers) if number is not None}

    def encode(self, line):
        """The ids of a line, EOS last."""
        if self.bpe is not None:
            ids = [self.ours.get(number, UNK) for number in self.bpe.encode(line).ids]
            return ids if ids[-1:] == [EOS] else [*ids, EOS]
        if self.pieces is None:
            return self.processor.encode(line, add_eos=True)
        tag = TAG.match(line)
        tag = tag[0] if tag and tag[0] in self.ids else ""
        ids = [self.ids.get(piece, UNK) for piece in self.processor.encode(line[len(tag) :], out_type=str)]
        return [*([self.ids[tag]] if tag else []), *(number if number > EOS else UNK for number in ids), EOS]

    def decode(self, ids):
        """The text of ids up to their EOS."""
        ids = [int(number) for number in ids]
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        if self.bpe is not None:
            numbers = [self.numbers[number] for number in ids]
            return self.bpe.decode([number for number in numbers if number is not None], skip_special_tokens=True)
        if self.pieces is None:
            return self.processor.decode(ids)
        text = self.processor.decode([self.pieces[number] for number in ids])
        return text.replace("\u2581", " ").strip() if "\u2581" in text else text


class Translator:
    """The model in a directory."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.facts = json.loads((self.directory / FACTS).read_text(encoding="utf-8"))
        self.source, self.target = (Side(self.directory / TOKENIZER, name) for name in ("source", "target"))
        with np.load(self.directory / PARAMETERS) as stored:
            leaves = {name: stored[name] for name in stored.files}
        if self.facts["dtype"] == "bfloat16":
            leaves = {name: leaf.view(ml_dtypes.bfloat16) for name, leaf in leaves.items()}
        self.params = jax.device_put(leaves)
        self.programs = {}

    def translate(self, lines):
        """The best translation of each line. Lines without text are empty; too long ones are translated in parts."""
        parts = [(number, ids) for number, line in enumerate(lines) for ids in self.parts(line)]
        order = sorted(range(len(parts)), key=lambda index: -len(parts[index][1]))
        texts = [""] * len(parts)
        while order:
            length = next(size for size in self.facts["lengths"] if size >= len(parts[order[0]][1]))
            most = max(1, self.facts["tokens"] // length)
            batch, order = order[:most], order[most:]
            for index, text in zip(batch, self.search([parts[index][1] for index in batch], length), strict=True):
                texts[index] = text
        joined = [[] for _ in lines]
        for (number, _), text in zip(parts, texts, strict=True):
            joined[number].append(text)
        return [" ".join(of_line) for of_line in joined]

    def search(self, sources, length):
        """The translations of sources of ids, none longer than `length`."""
        rows = 1 << (len(sources) - 1).bit_length()  # few numbers of rows, each of which is compiled
        ids = np.zeros((rows, length), np.int32)
        for row, source in enumerate(sources):
            ids[row, : len(source)] = source
        tokens, _, lengths = map(np.asarray, self.program(length)(self.params, ids))
        texts = (self.target.decode(tokens[row, 0, : lengths[row, 0]]) for row in range(len(sources)))
        return [text.replace("\r", " ").replace("\n", " ") for text in texts]

    def program(self, length):
        if length not in self.programs:
            stored = (self.directory / PROGRAM.format(length)).read_bytes()
            self.programs[length] = jax.jit(export.deserialize(bytearray(stored)).call)
        return self.programs[length]

    def parts(self, line):
        """The ids of a line; of its halves, and theirs, if it is too long."""
        ids = self.source.encode(line) if line.strip() else [EOS]
        if len(ids) <= self.facts["lengths"][-1] or len(line) < 2:
            return [] if ids == [EOS] else [ids]
        middle, quarter = len(line) // 2, len(line) // 4
        spaces = [place for place in range(middle - quarter, middle + quarter) if line[place].isspace()]
        cut = min(spaces, key=lambda place: abs(place - middle), default=middle) or middle
        return self.parts(line[:cut]) + self.parts(line[cut:])


def main():
    text = sys.stdin.buffer.read().decode()
    lines = (text[:-1] if text.endswith("\n") else text).split("\n") if text else []
    translator = Translator(pathlib.Path(__file__).parent)
    for translation in translator.translate([line.removesuffix("\r") for line in lines]):
        sys.stdout.buffer.write(translation.encode() + b"\n")


if __name__ == "__main__":
    main()
