"""Other systems' models in and out.

    python3 -m transformer_jax.interop import SOURCE --workdir DIR [--kind KIND]
    python3 -m transformer_jax.interop export --model DIR --format FORMAT --output PATH [--dtype float32|bfloat16]

What is imported becomes a run directory: decode.py translates with it, train.py trains it further. Both commands say
what they mapped to what; nothing is written over. Exit status: 0, or 2 for an error that you can mend.
"""

import argparse
import enum
import pathlib
import sys
from collections.abc import Sequence

from transformer_jax.errors import UserError
from transformer_jax.interop.model import Importer, Mapped, load_model, write_run


class Kind(enum.StrEnum):
    """marian: Marian's .npz, or a directory with one; huggingface: a directory of a MarianMTModel;
    bart: a directory of a BartForConditionalGeneration; fairseq: a .pt, or a directory with one."""

    MARIAN = "marian"
    HUGGINGFACE = "huggingface"
    BART = "bart"
    FAIRSEQ = "fairseq"


class Format(enum.StrEnum):
    """ctranslate2 and huggingface: directories which those read; bundle: a run directory of parameters alone;
    stablehlo: the compiled step functions for other run-times."""

    CTRANSLATE2 = "ctranslate2"
    HUGGINGFACE = "huggingface"
    BUNDLE = "bundle"
    STABLEHLO = "stablehlo"


def found_kind(source: pathlib.Path) -> Kind:
    """What lies at a path.

    Raises:
      UserError: if that is none of the kinds, or more than one.
    """
    if not source.exists():
        raise UserError(f"{source}: no such file or directory. Give the path of a model.")
    files = [source] if source.is_file() else sorted(source.iterdir())
    kinds = {kind for file in files if (kind := _kind_of_file(file)) is not None}
    if len(kinds) == 1:
        return kinds.pop()
    known = ", ".join(Kind)
    if kinds:
        raise UserError(f"{source}: models of several kinds are here ({', '.join(sorted(kinds))}). Say which: --kind.")
    raise UserError(
        f"{source}: no model of a known kind is here. Give a directory with a config.json and weights of Hugging Face, "
        f"Marian's .npz or fairseq's .pt, or say --kind ({known})."
    )


def _kind_of_file(file: pathlib.Path) -> Kind | None:
    if file.suffix == ".npz":
        return Kind.MARIAN
    if file.suffix == ".pt":
        return Kind.FAIRSEQ
    if file.name == "config.json":
        from transformer_jax.interop.huggingface import read_json

        types = {"marian": Kind.HUGGINGFACE, "bart": Kind.BART, "mbart": Kind.BART}
        kind = read_json(file).get("model_type")
        if kind not in types:
            raise UserError(f"{file}: model_type is {kind!r}; expected one of {', '.join(types)}.")
        return types[kind]
    return None


def importer(kind: Kind) -> Importer:
    """The function that reads a kind. Imported only here: each may need packages of its own."""
    match kind:
        case Kind.MARIAN:
            from transformer_jax.interop.marian import read
        case Kind.HUGGINGFACE:
            from transformer_jax.interop.huggingface import read
        case Kind.BART:
            from transformer_jax.interop.bart import read
        case Kind.FAIRSEQ:
            from transformer_jax.interop.fairseq import read
    return read


def import_model(options: argparse.Namespace) -> None:
    source = pathlib.Path(options.source)
    read = importer(options.kind or found_kind(source))
    imported = read(source)
    report(imported.mapped, imported.notes)
    write_run(options.workdir, imported.model, trainable=True)
    print(
        f"{options.workdir}: {len(imported.mapped)} tensors imported. "
        f"Translate with decode.py --model {options.workdir}; "
        f"train it further with train.py --config={options.workdir}/config.py --workdir={options.workdir}."
    )


def export_model(options: argparse.Namespace) -> None:
    model = load_model(options.model, options.checkpoint)
    mapped: list[Mapped] = []
    match options.format:
        case Format.BUNDLE:
            write_run(options.output, model, dtype=options.dtype)
        case Format.HUGGINGFACE:
            from transformer_jax.interop import huggingface_export

            mapped = huggingface_export.write(model, options.output, dtype=options.dtype)
        case Format.CTRANSLATE2:
            from transformer_jax.interop import ctranslate2

            mapped = ctranslate2.write(model, options.output, dtype=options.dtype)
        case Format.STABLEHLO:
            from transformer_jax.interop import stablehlo

            stablehlo.write(model, options.output, dtype=options.dtype)
    report(mapped, [])
    print(f"{options.output}: exported.")


def report(mapped: Sequence[Mapped], notes: Sequence[str]) -> None:
    width = max((len(one.theirs) for one in mapped), default=0)
    for one in mapped:
        print(f"{one.theirs:<{width}}  {one.ours}  {' × '.join(map(str, one.shape))}")
    for note in notes:
        print(f"note: {note}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "transformer_jax.interop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="import|export")
    one = commands.add_parser("import", help="another system's model → a run directory")
    one.add_argument("source", metavar="SOURCE", help="a file or a directory")
    one.add_argument("--workdir", required=True, metavar="DIR", help="the run directory to make")
    one.add_argument(
        "--kind", type=Kind, choices=list(Kind), help=f"what SOURCE is, if that is unclear. {Kind.__doc__}"
    )
    one.set_defaults(run=import_model)
    one = commands.add_parser("export", help="the model of a run directory → another system's files")
    one.add_argument("--model", required=True, metavar="DIR", help="the run directory")
    one.add_argument("--format", required=True, type=Format, choices=list(Format), help=Format.__doc__)
    one.add_argument("--output", required=True, metavar="PATH", help="what to make")
    one.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights")
    one.add_argument("--checkpoint", metavar="WHICH", help="last, best, STEP, average:N or average-best:N")
    one.set_defaults(run=export_model)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"transformer_jax.interop: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"transformer_jax.interop: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
