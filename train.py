"""Trains a Transformer. Without arguments: on the built-in phrases, in a few minutes.

    python3 train.py
    python3 train.py --config=configs/multi30k.py --config.optimizer.warmup=800 --workdir=runs/multi30k

The same command resumes a run that was stopped. Exit status: 0 when the run is finished, 2 for an error that you can
mend (its message says how), 130 after Ctrl-C and 143 after SIGTERM, when the run is saved.

On several hosts the command is started once on each, with the address of the first and a --workdir that all see:

    python3 train.py --coordinator=10.0.0.1:8476 --processes=2 --process=0 …     (on the first)
    python3 train.py --coordinator=10.0.0.1:8476 --processes=2 --process=1 …     (on the second)

Within SLURM, Open MPI, an indexed job of Kubernetes or Cloud TPU these three flags are found out. When one process ends
all do, the others with exit status 75: the same command resumes, also with another number of processes.
"""

import pathlib
import re
import signal
import sys
import traceback
import types
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import config_flags

from transformer_jax import hosts, tuple_flags
from transformer_jax.compilation import keep_compiled_programs
from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.memory import keep_freed_memory
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
        keep_freed_memory()
        with hosts.together(values.coordinator, values.processes, values.process):
            keep_compiled_programs()
            train(values.config, values.workdir or default_workdir(values))
    except Interrupted as stop:
        _say(str(stop))
        hosts.disconnect()
        return stop.status
    except (UserError, hosts.Lost) as error:
        return _failed(str(error), hosts.LOST if isinstance(error, hosts.Lost) else 2)
    except OSError as error:  # a full disk, a missing permission: it names its file
        return _failed(f"{error}. What is in the run directory stays; the same command resumes.", 2)
    except KeyboardInterrupt as stop:  # outside the training loop, which saves before it exits
        status = 128 + (stop.args[0] if stop.args else signal.SIGINT)
        return _failed("interrupted. Nothing was being trained; the same command goes on from here.", status)
    except Exception:
        if not hosts.name():
            raise
        traceback.print_exc()
        return _failed("ended by the error above.", 1)
    hosts.disconnect()
    return 0


def _failed(message: str, status: int) -> int:
    _say(message)
    hosts.abandon(status)
    return status


def _say(message: str) -> None:
    print(f"train.py: {hosts.name()}{message}", file=sys.stderr)


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
    coordinator = "Of several processes: where they meet, an address of process 0 and a free port there, host:port."
    flags.DEFINE_string("coordinator", None, coordinator, flag_values=values)
    flags.DEFINE_integer("processes", None, "How many processes train together. 1: this one alone.", flag_values=values)
    flags.DEFINE_integer("process", None, "Which of them this one is, from 0.", flag_values=values)
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


def heed_sigterm() -> None:
    """Makes of a first SIGTERM what Ctrl-C is, and leaves a second one to the system."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, interrupt)


if __name__ == "__main__":
    heed_sigterm()
    sys.exit(main(sys.argv))
