"""A model apart from any directory: configuration, parameters and tokenizer; out of run directories and into them."""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.config import Config, with_vocabularies
from transformer_jax.config_check import check
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import UserError
from transformer_jax.nn.stacks import unstack_layers
from transformer_jax.parameters import check_shapes, write_parameters
from transformer_jax.run_directory import (
    PARAMETERS,
    load_config,
    load_parameters,
    save_config,
    tokenizer_path,
)

Path = str | os.PathLike

CONFIG_FILE = '''"""The configuration of the model here, to train it further:

    python3 train.py --config=DIR/config.py --workdir=DIR --config.data.train=a.SRC,a.TRG --config.data.dev=b.SRC,b.TRG
"""

import pathlib

from transformer_jax.config import Config
from transformer_jax.run_directory import load_config


def get_config() -> Config:
    return load_config(pathlib.Path(__file__).parent)
'''


OUT_OF_SOFTMAX = -100.0
"""The output bias of an id that is in no softmax of the other system: e^-100 is lost in any float32 sum. It is no
larger, since label smoothing gives every id a share, and a training that goes on would see nothing else."""


class Model(NamedTuple):
    """What a run directory holds of a trained model. The layers of `params` are not stacked (`scan` is False)."""

    config: Config
    params: Mapping[str, Any]  # {"params": …} as `Transformer.apply` takes them, NumPy float32
    tokenizer: Tokenizer


class Mapped(NamedTuple):
    """Which of another system's tensors became which of ours."""

    theirs: str
    ours: str
    shape: tuple[int, ...]  # of ours


class Imported(NamedTuple):
    model: Model
    mapped: list[Mapped]
    notes: list[str]  # what is worth knowing: one sentence each


def load_model(workdir: Path, checkpoint: str | None = None) -> Model:
    """The model of a run directory; `checkpoint` as in `run_directory.choose_steps`.

    Raises:
      UserError: if it isn't there or its parts don't belong together.
    """
    config, tokenizer = load_config(workdir), Tokenizer.load(tokenizer_path(workdir))
    params = load_parameters(workdir, checkpoint or "last")
    if config.model.scan:
        params = {"params": jax.tree.map(np.asarray, unstack_layers(params["params"]))}
    model = dataclasses.replace(
        with_vocabularies(config.model, source=tokenizer.source_vocab, target=tokenizer.target_vocab), scan=False
    )
    config = dataclasses.replace(config, model=model)
    check_shapes(params, model, name=str(workdir))
    return Model(config, params, tokenizer)


def write_run(workdir: Path, model: Model, *, dtype: str = "float32", trainable: bool = False) -> None:
    """Makes a run directory of a model: config.json, tokenizer and parameters.safetensors, there whole or not at all.

    Args:
      dtype: of the stored parameters.
      trainable: whether a config.py for train.py goes with it.

    Raises:
      UserError: if `workdir` exists, or the parts of the model don't belong together.
    """
    check(model.config)
    check_shapes(model.params, model.config.model, name=str(workdir))
    with new_directory(workdir) as unfinished:
        save_config(unfinished, model.config)
        model.tokenizer.save(tokenizer_path(unfinished))
        write_parameters(unfinished / PARAMETERS, model.params, dtype=dtype)
        if trainable:
            (unfinished / "config.py").write_text(CONFIG_FILE, encoding="utf-8")


class new_directory:
    """`with new_directory(path) as unfinished:` a directory to write into, which is `path` when all went well.

    Raises:
      UserError: if `path` exists.
    """

    def __init__(self, path: Path):
        self.path = pathlib.Path(path)
        self.unfinished = self.path.with_name(self.path.name + ".unfinished")

    def __enter__(self) -> pathlib.Path:
        if self.path.exists():
            raise UserError(f"{self.path} exists and is not written over. Give another path, or remove it.")
        shutil.rmtree(self.unfinished, ignore_errors=True)
        try:
            self.unfinished.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{self.path}: can't be written ({error.strerror}). Give another path.") from error
        return self.unfinished

    def __exit__(self, kind, error, trace) -> None:
        if error is None:
            self.unfinished.rename(self.path)
        else:
            shutil.rmtree(self.unfinished, ignore_errors=True)


Importer = Callable[[pathlib.Path], Imported]
