"""Translates lines of text with a trained model.

    echo "in 35 weeks" | python3 decode.py
    python3 decode.py --model runs/multi30k --input test.en --output test.out --reference test.de

There is a line of output for each line of input, in the same order.
"""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

from absl import logging as absl_logging
from tqdm import tqdm

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import LengthPenalty, SearchConfig
from transformer_jax.data.corpus import read_lines
from transformer_jax.decoding.output import STANDARD, Format, formatted, whole_file, write_lines
from transformer_jax.decoding.quality import quality
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.run_directory import load_config


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("decode.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default="runs/phrases", metavar="DIR", help="the run directory (default: runs/phrases)")
    add("--checkpoint", metavar="WHICH", help="last, best, STEP, average:N or average-best:N (default: the run's own)")
    add("--input", default=STANDARD, metavar="FILE", help="text, a sentence on each line (default: standard input)")
    add("--output", default=STANDARD, metavar="FILE", help="written when it is whole (default: standard output)")
    add("--reference", metavar="FILE", help="good translations of the input: prints BLEU and chrF to standard error")
    add("--format", type=Format, choices=list(Format), default=Format.TEXT, help=Format.__doc__)
    add("--nbest", dest="top_beams", type=int, metavar="N", help="how many translations of each line")
    add("--beam_size", type=int, metavar="K")
    add("--penalty", type=LengthPenalty, choices=list(LengthPenalty), help=LengthPenalty.__doc__)
    add("--alpha", type=float, help="α of the length penalty")
    add("--batch_tokens", dest="tokens", type=int, metavar="N", help="source tokens × beams of a batch, with padding")
    return parser.parse_args(arguments)


def decode(options: argparse.Namespace) -> None:
    keep_compiled_programs()
    config = load_config(options.model)
    search = search_config(config.search, options)
    lines, references = read(options.input), read(options.reference) if options.reference else None
    if references is not None and len(references) != len(lines):
        raise UserError(
            f"line counts differ: {options.input} has {len(lines):,} lines, --reference {options.reference} has "
            f"{len(references):,}. Give a reference for each line."
        )
    translator = Translator.load(options.model, options.checkpoint)
    with whole_file(options.output) as stream:
        with tqdm(total=len(lines), unit=" lines", disable=not sys.stderr.isatty()) as bar:
            n_bests = translator.translate(lines, search, name=options.input, progress=bar.update)
        write_lines(stream, formatted(lines, n_bests, format=options.format, n=search.top_beams))
    if references:
        print(quality([n_best[0].text if n_best else "" for n_best in n_bests], references), file=sys.stderr)


def search_config(config: SearchConfig, options: argparse.Namespace) -> SearchConfig:
    """The run's search, with what the flags say otherwise."""
    flags = {name: getattr(options, name) for name in ("beam_size", "top_beams", "penalty", "alpha", "tokens")}
    return dataclasses.replace(config, **{name: value for name, value in flags.items() if value is not None})


def read(path: str) -> list[str]:
    return list(read_lines(sys.stdin.buffer if path == STANDARD else path))


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(format="decode.py: %(message)s")
    logging.getLogger("transformer_jax").setLevel(logging.INFO)
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's: what goes wrong there is said by this library
    try:
        decode(parse(arguments))
    except UserError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads the output has enough of it; Python must not try to flush the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"decode.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
