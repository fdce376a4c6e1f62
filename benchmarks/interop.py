"""Imported models beside the systems that they come from, on 1,000 lines of Multi30k.

    python3 -m benchmarks.interop --data ../shared/data/marian_multi30k_de_en --lines 1000

For each system and beam: how many translations are the same; of the others, how many of ours have the higher score when
both are rescored here under one definition (by the model's parallel forward pass); the greatest difference from the
scores that the system itself gave; sacreBLEU of both.
"""

import argparse
import dataclasses
import math
import pathlib
import tempfile
from typing import NamedTuple

import sacrebleu

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import SearchConfig
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.interop import huggingface, marian
from transformer_jax.interop.model import write_run
from transformer_jax.run_directory import load_config

LIMITS = {"hf": 79, "ct2": 256}  # tokens of the outputs there: max_new_tokens=80 with a forced EOS; the default


class Output(NamedTuple):
    """What another system answered."""

    texts: list[str]
    tokens: list[tuple[int, ...]]  # EOS last
    scores: list[float]  # NaN where it gave none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/marian_multi30k_de_en", type=pathlib.Path)
    parser.add_argument("--lines", default=1000, type=int)
    parser.add_argument("--systems", nargs="+", default=["marian", "hf", "ct2"], help="ct2 has the weights of hf")
    parser.add_argument("--differences", action="store_true", help="show each line that differs")
    options = parser.parse_args()
    keep_compiled_programs()
    source, reference = (
        lines_of(options.data.parent / "multi30k" / f"test_2016_flickr.{language}", options.lines)
        for language in ("de", "en")
    )
    print("| system | beam | same | ours scores higher | greatest difference of scores | BLEU here | BLEU there |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, read in (("marian", marian.read), ("hf", huggingface.read)):
            write_run(f"{directory}/{name}", read(options.data / name).model)
        for name in options.systems:
            workdir = f"{directory}/{name}" if name == "marian" else f"{directory}/hf"
            translator, search = Translator.load(workdir), load_config(workdir).search
            if name != "marian":
                search = dataclasses.replace(search, extra_length=LIMITS[name])
            for beam in (4,) if name == "ct2" else (1, 4):
                compare(name, translator, dataclasses.replace(search, beam_size=beam), options, source, reference)


def compare(name: str, translator: Translator, search: SearchConfig, options, source, reference) -> None:
    beam = search.beam_size
    theirs = outputs(options.data / "outputs", name, beam, translator, options.lines)
    ours = [n_best[0] for n_best in translator.translate(source, search)]
    different = [number for number, (one, text) in enumerate(zip(ours, theirs.texts, strict=True)) if one.text != text]
    # Greedy scores are sums there: compared under their own definition where the translation is the same.
    plain = [one.log_prob if beam == 1 else one.score for one in ours]
    gaps = [
        abs(plain[number] - score)
        for number, score in enumerate(theirs.scores)
        if number not in different and math.isfinite(score)
    ]
    chosen = [source[number] for number in different]
    rescored = list(
        zip(
            translator.score(chosen, [ours[number].tokens for number in different], search),
            translator.score(chosen, [theirs.tokens[number] for number in different], search),
            strict=True,
        )
    )
    higher = sum(mine.score >= other.score - 1e-4 for mine, other in rescored)
    bleu = [sacrebleu.corpus_bleu(texts, [reference]).score for texts in ([one.text for one in ours], theirs.texts)]
    print(
        f"| {name} | {beam} | {len(source) - len(different)} of {len(source)} | {higher} of {len(different)} | "
        f"{f'{max(gaps):.1e}' if gaps else '—'} | {bleu[0]:.2f} | {bleu[1]:.2f} |",
        flush=True,
    )
    if options.differences:
        for number, (mine, other) in zip(different, rescored, strict=True):
            show(number, ours[number], theirs.texts[number], mine.score, other.score)


def show(number: int, ours: Translation, text: str, mine: float, other: float) -> None:
    end = "finished" if ours.finished else "cut at the limit"
    print(f"  line {number + 1}: here {mine:.4f} ({len(ours.tokens)} tokens, {end}), there {other:.4f}")
    print(f"    here  {ours.text[-160:]}\n    there {text[-160:]}")


def outputs(directory: pathlib.Path, name: str, beam: int, translator: Translator, count: int) -> Output:
    kind = "greedy" if beam == 1 else f"beam{beam}"
    texts = lines_of(directory / f"{name}_{kind}.en", count)
    path = directory / f"{name}_{kind}.nbest.pieces"
    if not path.exists():
        return Output(texts, [tuple(ids) for ids in translator.tokenizer.encode_target(texts)], [math.nan] * count)
    best: dict[int, tuple[tuple[int, ...], float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        number, pieces, _, score = line.split(" ||| ")
        ids = (*map(translator.tokenizer.target.piece_to_id, pieces.split()), 1)
        best.setdefault(int(number), (ids, float(score)))
    return Output(texts, *(list(column) for column in zip(*(best[number] for number in range(count)), strict=True)))


def lines_of(path: pathlib.Path, count: int) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:count]


if __name__ == "__main__":
    main()
