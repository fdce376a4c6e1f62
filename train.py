"""Trains a Transformer. Without arguments: on the built-in phrases, in a few minutes.

    python3 train.py
    python3 train.py --config=configs/multi30k.py --config.optimizer.warmup=800 --workdir=runs/multi30k

The same command resumes a run that was stopped. Exit status: 0 when the run is finished, 2 for an error that you can
mend (its message says how), 130 after Ctrl-C and 143 after SIGTERM, when the run is saved.
"""

import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags

from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import RunConfig
from transformer_jax.errors import UserError
from transformer_jax.training.interruption import Interrupted
from transformer_jax.training.loop import train

DEFAULT = pathlib.Path(__file__).resolve().parent / "configs" / "phrases.py"

CONFIG = config_flags.DEFINE_config_file("config", str(DEFAULT), "An experiment: a file with get_config().")
WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept. By default runs/<name of the config file>.")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        parse(arguments)
        logging.set_verbosity(logging.FATAL)  # Orbax's: what goes wrong there is said by this library
        keep_compiled_programs()
        train(CONFIG.value, WORKDIR.value or default_workdir())
    except (UserError, Interrupted) as stop:
        print(f"train.py: {stop}", file=sys.stderr)
        return stop.status if isinstance(stop, Interrupted) else 2
    except KeyboardInterrupt:
        print("train.py: interrupted before the first step; nothing to save", file=sys.stderr)
        return 130
    return 0


def default_workdir() -> str:
    path = config_flags.get_config_filename(flags.FLAGS["config"])
    return f"runs/{pathlib.Path(path).stem}"


def parse(arguments: Sequence[str]) -> None:
    """Parses the flags.

    Raises:
      UserError: for an unknown flag or field, a wrong type, or a config file that isn't there.
    """
    try:
        rest = flags.FLAGS(arguments)[1:]
        run = CONFIG.value.run  # of a file that could not be read nothing can be had
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, OSError) as error:
        raise UserError(reworded(error)) from error
    if not isinstance(run, RunConfig):
        raise UserError("--config: get_config() has to return a transformer_jax.config.Config.")
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}. Flags are written --name=value.")


def reworded(error: Exception) -> str:
    """An error of absl or ml_collections in one line, with what to do."""
    if isinstance(error, OSError):
        reason = str(error).strip().splitlines()[-1].strip()
        return f"--config: {reason}. Give a file with get_config(), such as those in configs/."
    message = error.args[0] if error.args else type(error).__name__
    message = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", " ".join(str(message).split()))
    return f"{message}. Fields and their types are in transformer_jax/config.py; `train.py --help` shows the flags."


if __name__ == "__main__":
    sys.exit(main(sys.argv))
