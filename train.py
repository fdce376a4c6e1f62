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

from transformer_jax import tuple_flags
from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.training.interruption import Interrupted
from transformer_jax.training.loop import train

DEFAULT = pathlib.Path(__file__).resolve().parent / "configs" / "phrases.py"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        values = parse(arguments)
        if values.help:
            print(f"{__doc__}{values.get_help()}\n\nThe fields of a config are in transformer_jax/config.py.")
            return 0
        logging.set_verbosity(logging.FATAL)  # Orbax's: what goes wrong there is said by this library
        keep_compiled_programs()
        train(values.config, values.workdir or default_workdir(values))
    except (UserError, Interrupted) as stop:
        print(f"train.py: {stop}", file=sys.stderr)
        return stop.status if isinstance(stop, Interrupted) else 2
    except OSError as error:  # a full disk, a missing permission: it names its file
        print(f"train.py: {error}. What is in the run directory stays; the same command resumes.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # outside the training loop, which saves before it exits
        print("train.py: interrupted. Nothing was being trained; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> flags.FlagValues:
    """The flags `config` (a `Config`), `workdir` and `help`. `arguments` begin with the program's name.

    Raises:
      UserError: for an unknown flag or field, a wrong type, or a config file that isn't there.
    """
    values, arguments = flags.FlagValues(), list(arguments)
    try:
        define_flags(values, arguments)
        rest = values(arguments)[1:]
        getattr(values.config, "run", None)  # raises if the file could not be read
    except (flags.Error, KeyError, AttributeError, TypeError, ValueError, OSError) as error:
        raise UserError(reworded(error)) from error
    if not isinstance(values.config, Config):
        raise UserError("--config: get_config() has to return a transformer_jax.config.Config.")
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}. Flags are written --name=value.")
    return values


def define_flags(values: flags.FlagValues, arguments: list[str]) -> None:
    tuple_flags.register()
    config = "An experiment: a file with get_config(). Its fields can be set with --config.name=value."
    config_flags.DEFINE_config_file("config", str(DEFAULT), config, flag_values=values, sys_argv=arguments)
    workdir = "Where the run is kept. By default runs/<name of the config file>."
    flags.DEFINE_string("workdir", None, workdir, flag_values=values)
    flags.DEFINE_boolean("help", False, "Shows this.", flag_values=values)


def default_workdir(values: flags.FlagValues) -> str:
    return f"runs/{pathlib.Path(config_flags.get_config_filename(values['config'])).stem}"


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
