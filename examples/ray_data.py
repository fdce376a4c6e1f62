"""Translates a file of lines with Ray Data: each worker process loads the model once.

    pip install -e '.[ray]'
    python3 examples/ray_data.py --model runs/multi30k --input test.en --output test.de --workers 2

There is a line of output for each line of input, in the same order. On a cluster, put the run directory where every
node finds it under the same path, and give a worker a GPU with --gpus 1. Spark and Beam workers use `LazyTranslator`
alike: it is pickled as a path, and loads the model where it is first called.
"""

import argparse
import sys

import ray
import ray.data

from transformer_jax.data.corpus import read_lines
from transformer_jax.decoding.lazy import LazyTranslator
from transformer_jax.decoding.output import write_lines
from transformer_jax.decoding.partial import whole_file
from transformer_jax.errors import UserError


class Translate:
    """What a worker is: made once, then called with one batch after the other."""

    def __init__(self, model: str):
        self.translator = LazyTranslator(model)

    def __call__(self, batch: dict) -> dict:
        return {"number": batch["number"], "translation": self.translator(list(batch["text"]))}


def translate(lines: list[str], *, model: str, workers: int, batch: int, gpus: float = 0) -> list[str]:
    rows = [{"number": number, "text": line} for number, line in enumerate(lines)]
    translated = ray.data.from_items(rows).map_batches(
        Translate,
        fn_constructor_args=(model,),
        compute=ray.data.ActorPoolStrategy(size=workers),
        batch_size=batch,
        num_gpus=gpus,
    )
    # Batches come back as they get ready.
    return [row["translation"] for row in sorted(translated.take_all(), key=lambda row: row["number"])]


def main() -> int:
    parser = argparse.ArgumentParser("ray_data.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="the run directory")
    parser.add_argument("--input", required=True, metavar="FILE", help="text, a sentence on each line")
    parser.add_argument("--output", required=True, metavar="FILE")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with the model")
    parser.add_argument("--batch", type=int, default=256, help="lines that a worker gets at once")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    options = parser.parse_args()
    try:
        lines = list(read_lines(options.input))
        translations = translate(
            lines, model=options.model, workers=options.workers, batch=options.batch, gpus=options.gpus
        )
        with whole_file(options.output) as stream:
            write_lines(stream, translations)
    except UserError as error:
        print(f"ray_data.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
