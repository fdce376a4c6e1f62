"""Draws how a trained model translates a sentence: attention, positions, search, and how it was trained.

    python3 -m transformer_jax.inspect --model runs/phrases --text "in 35 weeks" --out pictures

DIR/index.html shows all pictures; each is there as SVG and PNG. Layers and heads are counted from 0.
"""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence

from absl import logging as absl_logging

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.run_directory import load_config

NAME = "transformer_jax.inspect"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default="runs/phrases", metavar="DIR", help="the run directory (default: runs/phrases)")
    add("--checkpoint", metavar="WHICH", help="last, best, STEP, average:N or average-best:N (default: the run's own)")
    add("--text", required=True, help="a sentence of the source language")
    add("--target", metavar="TEXT", help="its translation (default: the model's own)")
    add("--out", required=True, metavar="DIR", help="where the pictures go; files of these names are replaced")
    add("--token", metavar="WORD", help="the source token whose attention is shown (default: the last)")
    add("--head", type=int, default=0, metavar="N", help="the head whose scores are shown step by step (default: 0)")
    add("--beam_size", type=int, metavar="K", help="hypotheses of the search that is drawn (default: the run's own)")
    add("--top_beams", type=int, metavar="N", help="how many of its translations are marked (default: the run's own)")
    add("--compare", nargs="*", default=(), metavar="DIR", help="further runs in the training curves")
    add("--lessons", action="store_true", help="also train the two small models of the tour, and draw them (a minute)")
    return parser.parse_args(arguments)


def draw(options: argparse.Namespace) -> str:
    """Draws the pictures; the path of their page."""
    try:
        from transformer_jax.inspect.page import write_page
        from transformer_jax.inspect.pictures import lessons, pictures, see, training_pictures
    except ModuleNotFoundError as error:
        raise UserError(
            f"pictures need {error.name}, which is not installed. Run: python3 -m pip install -e '.[inspect]'"
        ) from error
    keep_compiled_programs()
    search = load_config(options.model).search
    flags = {name: getattr(options, name) for name in ("beam_size", "top_beams")}
    search = dataclasses.replace(search, **{name: value for name, value in flags.items() if value is not None})
    seen = see(Translator.load(options.model, options.checkpoint), options.text, target=options.target, search=search)

    def all_pictures():
        yield from pictures(seen, search, token=options.token, head=options.head)
        yield from training_pictures([options.model, *options.compare])
        if options.lessons:
            yield from lessons()

    lead = f"{options.model}: {options.text} → {seen.text}"
    return str(write_page(all_pictures(), options.out, heading="A Transformer at work", lead=lead))


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(format=f"{NAME}: %(message)s")
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's: what goes wrong there is said by this library
    try:
        print(draw(parse(arguments)))
    except (UserError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
