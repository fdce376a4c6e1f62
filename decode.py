"""Translates lines of text with a trained model.

    echo "in 35 weeks" | python3 decode.py
    python3 decode.py --model runs/multi30k --input test.en --output test.out --reference test.de

There is a line of output for each line of input, in the same order. docs/decoding.md describes every option.
"""

import argparse
import functools
import itertools
import logging
import os
import signal
import sys
from collections.abc import Sequence

from absl import logging as absl_logging
from tqdm import tqdm

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import SearchConfig, flatten
from transformer_jax.config_check import check_search
from transformer_jax.data.corpus import read_lines
from transformer_jax.decoding.alignment import Unit, arrays_to_npz, check_layer_and_head
from transformer_jax.decoding.flags import add_search_flags, search_config
from transformer_jax.decoding.output import Format, best_texts
from transformer_jax.decoding.partial import Output, partial_files, refuse_existing
from transformer_jax.decoding.quality import quality
from transformer_jax.decoding.requests import STANDARD, Input, InputFormat
from transformer_jax.decoding.shards import content, parse_shard, put_together
from transformer_jax.decoding.translator import Translator
from transformer_jax.decoding.work import Attention, Work, digest, write_all
from transformer_jax.errors import UserError
from transformer_jax.run_directory import load_config

SHARD = """translates the share I of N of a file, I from 0: one of N processes which share its directory. The last
one that is done makes the output. auto: I and N of srun, mpirun, or JAX_PROCESS_ID and JAX_NUM_PROCESSES"""

log = logging.getLogger("transformer_jax.decode")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "decode.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="runs/phrases", metavar="DIR", help="the run directory; several, A,B: an ensemble")
    add(
        "--checkpoint", metavar="WHICH", help="last, best, STEP, average:N or average-best:N; several, A,B: an ensemble"
    )
    add("--input", default=STANDARD, metavar="FILE", help="text, a sentence on each line (default: standard input)")
    add(
        "--input_format",
        type=InputFormat,
        choices=list(InputFormat),
        default=InputFormat.TEXT,
        help=InputFormat.__doc__,
    )
    add("--output", default=STANDARD, metavar="FILE", help="written when it is whole (default: standard output)")
    add("--overwrite", action="store_true", help="replace an output that is there, when the new one is whole")
    add("--format", type=Format, choices=list(Format), default=Format.TEXT, help=Format.__doc__)
    add("--reference", metavar="FILE", help="good translations of the input: prints BLEU and chrF to standard error")
    add("--prefix", metavar="FILE", help="text with which the translations of each line begin")
    add("--score", metavar="FILE", help="translations of the input: scores them, and translates nothing")
    add("--stream", action="store_true", help="answer each line of standard input as soon as it can be answered")
    add("--shard", type=parse_shard, metavar="I/N", help=SHARD)
    add("--chunk", type=int, default=1000, metavar="LINES", help="in memory, and lost if interrupted (default: 1000)")

    attention = parser.add_argument_group("attention", "Which source words each word of the best translation looks at.")
    add = attention.add_argument
    add("--alignment", metavar="FILE", help="writes links source-target of each line, such as 0-0 1-2")
    add("--alignment_unit", type=Unit, choices=list(Unit), default=Unit.WORDS, help=Unit.__doc__)
    add("--attention", metavar="FILE.npz", help="writes the weights of each line: arrays 1, 2, … of target × source")
    add("--attention_layer", type=int, metavar="N", help="of the decoder, from 0 (default: the mean of all)")
    add("--attention_head", type=int, metavar="N", help="from 0 (default: the mean of all)")
    add_search_flags(parser)
    options = parser.parse_args(arguments)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Refuses options that don't go together."""
    if options.chunk < 1:
        raise UserError(f"--chunk is {options.chunk}; expected 1 line or more.")
    if options.stream and (options.input, options.output) != (STANDARD, STANDARD):
        raise UserError("--stream answers standard input on standard output. Leave out --input and --output.")
    for flag in ("reference", "prefix"):
        if options.score and getattr(options, flag):
            raise UserError(f"--score and --{flag} don't go together: --score translates nothing. Leave out one.")
    if options.prefix and options.input_format == InputFormat.JSON:
        raise UserError('--prefix goes with --input_format text. In JSON write {"source": …, "prefix": …}.')


def decode(options: argparse.Namespace) -> None:
    keep_compiled_programs()
    models, checkpoints = options.model.split(","), options.checkpoint.split(",") if options.checkpoint else None
    search = search_config(load_config(models[0]).search, options)
    check_search(search)
    outputs = output_files(options)
    if not options.overwrite:
        refuse_existing(outputs)
    source = Input(options.input, options.input_format, options.prefix, options.score, options.stream)
    lines = source.count()
    references = list(read_lines(options.reference)) if options.reference else None
    check_references(options, references, lines)
    shard = options.shard
    share = range(0) if shard is None else shard.share(countable(options, lines), chunk=options.chunk)
    translator = Translator.load(models, checkpoints)
    attention = attention_options(options)
    check_layer_and_head(translator.model.config, layer=attention.layer, head=attention.head)
    of = functools.cache(lambda: belongs_to(options, search, translator))
    with (
        shard.files(outputs, of=of()) if shard else partial_files(outputs, of=of) as files,
        progress_bar(len(share) if shard else lines) as bar,
    ):
        work = Work(
            translator,
            search,
            options.format,
            attention,
            name=options.input,
            score=bool(options.score),
            best=None if references is None or shard else [],
            progress=bar.update,
        )
        entries, more = source.open()
        entries = itertools.islice(entries, share.start, share.stop) if shard else entries
        write_all(work, entries, files, chunk=options.chunk, first_line=share.start + 1, more=more)
    best = work.best
    if shard and (missing := put_together(outputs, shard, of=of(), lines=lines or 0, chunk=options.chunk)):
        others = ", ".join(str(one) for one in missing)
        log.info(f"shard {shard} is done. The last one makes {options.output}; missing: {others}.")
    elif shard and references:
        best = best_texts(read_lines(options.output), format=options.format, n=search.top_beams, count=len(references))
    if references and best is not None:
        check_references(options, references, len(best))
        print(quality(best, references), file=sys.stderr)


def countable(options: argparse.Namespace, lines: int | None) -> int:
    """The lines of the input, which are known if it is to be shared."""
    if lines is None or not all(output.is_file for output in output_files(options)):
        raise UserError(
            "--shard shares files, not standard input, standard output or pipes. Give --input and --output."
        )
    return lines


def progress_bar(lines: int | None) -> tqdm:
    seconds = 0.1 if sys.stderr.isatty() else 60  # between two reports
    return tqdm(total=lines, unit=" lines", mininterval=seconds, delay=0 if seconds < 1 else seconds)


def output_files(options: argparse.Namespace) -> list[Output]:
    outputs = [Output(options.output)]
    outputs += [Output(options.alignment)] if options.alignment else []
    outputs += [Output(options.attention, arrays_to_npz)] if options.attention else []
    return outputs


def attention_options(options: argparse.Namespace) -> Attention:
    return Attention(
        links=bool(options.alignment),
        weights=bool(options.attention),
        unit=options.alignment_unit,
        layer=options.attention_layer,
        head=options.attention_head,
    )


def belongs_to(options: argparse.Namespace, search: SearchConfig, translator: Translator) -> dict[str, object]:
    """What the output depends on, beside the lines of the input: with all of it the same, it can be continued."""
    names = ("input_format", "format", "chunk", "alignment", "alignment_unit", "attention")
    names += ("attention_layer", "attention_head")
    flags = {f"--{name}": getattr(options, name) for name in names}
    files = [path for path in (options.input, options.prefix, options.score) if path]
    return (
        {"model": digest(translator), "--score": bool(options.score)}
        | ({"the lines of --input": content(files)} if options.shard else {})
        | flags
        | {f"--{name}": value for name, value in flatten(search).items()}
    )


def check_references(options: argparse.Namespace, references: Sequence[str] | None, lines: int | None) -> None:
    if references is not None and lines is not None and len(references) != lines:
        raise UserError(
            f"line counts differ: {options.input} has {lines:,} lines, --reference {options.reference} has "
            f"{len(references):,}. Give a reference for each line."
        )


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
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it says what is done
    sys.exit(main())
