"""Draws how a trained model translates a sentence: attention, positions, search, and how it was trained.

    python3 -m transformer_jax.inspect --model runs/phrases --text "in 35 weeks" --out pictures
    python3 -m transformer_jax.inspect --model runs/phrases --text "in 35 weeks" --explorer explorer.html
    python3 -m transformer_jax.inspect --model runs/phrases --serve

pictures/index.html shows all pictures; each is there as SVG and PNG. explorer.html is one file to look around in, for
as many sentences as are given; --serve makes the same for sentences that are typed into a browser. Layers and heads are
counted from 0.
"""

import argparse
import dataclasses
import functools
import importlib
import logging
import sys
from collections.abc import Sequence

from absl import logging as absl_logging

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import SearchConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.run_directory import load_config

NAME = "transformer_jax.inspect"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", default="runs/phrases", metavar="DIR", help="the run directory (default: runs/phrases)")
    add("--checkpoint", metavar="WHICH", help="last, best, STEP, average:N or average-best:N (default: the run's own)")
    add("--text", action="append", default=[], help="a sentence of the source language; several for --explorer")
    add(
        "--target",
        action="append",
        metavar="TEXT",
        help="its translation, one for each --text (default: the model's own)",
    )
    add("--out", metavar="DIR", help="where the pictures go; files of these names are replaced")
    add("--explorer", metavar="FILE", help="an HTML file to explore the sentences in")
    add("--serve", action="store_true", help="explore any sentence, in a browser on this machine")
    add("--port", type=int, default=8000, metavar="N", help="of --serve; 0: any free one (default: 8000)")
    add("--token", metavar="WORD", help="the source token whose attention is shown (default: the last)")
    add("--head", type=int, default=0, metavar="N", help="the head whose scores are shown step by step (default: 0)")
    add("--beam_size", type=int, metavar="K", help="hypotheses of the search that is drawn (default: the run's own)")
    add("--top_beams", type=int, metavar="N", help="how many of its translations are marked (default: the run's own)")
    add("--compare", nargs="*", default=(), metavar="DIR", help="further runs in the training curves")
    add("--lessons", action="store_true", help="also train the two small models of the tour, and draw them (a minute)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Makes what is asked for, and prints where it is.

    Raises:
      UserError: for flags that don't go together.
    """
    check(options)
    try:
        importlib.import_module("transformer_jax.inspect.style")
    except ModuleNotFoundError as error:
        raise UserError(
            f"pictures need {error.name}, which is not installed. Run: python3 -m pip install -e '.[inspect]'"
        ) from error
    keep_compiled_programs()
    search = load_config(options.model).search
    flags = {name: getattr(options, name) for name in ("beam_size", "top_beams")}
    search = dataclasses.replace(search, **{name: value for name, value in flags.items() if value is not None})
    translator = Translator.load(options.model, options.checkpoint)
    if options.out is not None:
        print(draw(options, translator, search))
    if options.explorer is not None:
        print(write_file(options, translator, search))
    if options.serve:
        serve(options, translator, search)


def check(options: argparse.Namespace) -> None:
    """Raises a UserError for flags that don't go together."""
    if options.out is None and options.explorer is None and not options.serve:
        raise UserError("nothing is asked for. Give --out DIR for pictures, --explorer FILE or --serve.")
    if not options.text and (options.out is not None or options.explorer is not None):
        raise UserError("there is no --text. Give a sentence of the model's source language.")
    if options.out is not None and len(options.text) > 1:
        raise UserError(f"--out draws one sentence, and {len(options.text)} are given. Give one --text, or --explorer.")
    if options.target is not None and len(options.target) != len(options.text):
        raise UserError(
            f"{len(options.target)} --target for {len(options.text)} --text. Give one for each, in their order."
        )


def targets(options: argparse.Namespace) -> Sequence[str | None]:
    return options.target or [None] * len(options.text)


def draw(options: argparse.Namespace, translator: Translator, search: SearchConfig) -> str:
    """Draws the pictures; the path of their page."""
    from transformer_jax.inspect.page import write_page
    from transformer_jax.inspect.pictures import lessons, pictures, see, training_pictures

    seen = see(translator, options.text[0], target=targets(options)[0], search=search)

    def all_pictures():
        yield from pictures(seen, search, token=options.token, head=options.head)
        yield from training_pictures([options.model, *options.compare])
        if options.lessons:
            yield from lessons()

    lead = f"{options.model}: {options.text[0]} → {seen.text}"
    return str(write_page(all_pictures(), options.out, heading="A Transformer at work", lead=lead))


def write_file(options: argparse.Namespace, translator: Translator, search: SearchConfig) -> str:
    """Writes the explorer of the sentences; its path."""
    from transformer_jax.inspect.explorer import explore, write_explorer

    pairs = zip(options.text, targets(options), strict=True)
    sentences = [explore(translator, text, target=target, search=search) for text, target in pairs]
    return str(write_explorer(sentences, options.explorer, title=explorer_title(options)))


def serve(options: argparse.Namespace, translator: Translator, search: SearchConfig) -> None:
    """Answers a browser until it is interrupted."""
    from transformer_jax.inspect.explorer import explore
    from transformer_jax.inspect.serve import make_server

    answer = functools.partial(explore, translator, search=search)
    with make_server(answer, title=explorer_title(options), port=options.port) as server:
        print(f"http://localhost:{server.server_address[1]}/  (ends with Ctrl-C)", flush=True)
        server.serve_forever()


def explorer_title(options: argparse.Namespace) -> str:
    return f"A Transformer at work: {options.model}"


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(format=f"{NAME}: %(message)s")
    absl_logging.set_verbosity(absl_logging.FATAL)  # Orbax's: what goes wrong there is said by this library
    try:
        run(parse(arguments))
    except (UserError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
