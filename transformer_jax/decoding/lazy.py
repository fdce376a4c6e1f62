"""A translator for workers: cheap to make, to copy and to pickle, and loaded where it is first used."""

import os
import threading
from collections.abc import Sequence
from typing import Any

from transformer_jax.config import SearchConfig
from transformer_jax.decoding.translator import Request, Translation, Translator
from transformer_jax.run_directory import load_config


class LazyTranslator:
    """The translator of a run directory, which several threads may use at once.

    What is pickled is the path: every process that gets one loads the model for itself, once.

        translator = LazyTranslator("runs/multi30k")
        translator(["Two men are talking."])  # loads, and translates
    """

    def __init__(
        self, workdir: str | os.PathLike, search: SearchConfig | None = None, *, checkpoint: str | None = None
    ):
        """
        Args:
          workdir: the run directory, there where the model is used.
          search: how translations are searched; None: as the run's config says.
          checkpoint: one of those in `run_directory.choose_steps`; None: the run's own choice.
        """
        self.workdir, self.search, self.checkpoint = os.fspath(workdir), search, checkpoint
        self._loaded: tuple[Translator, SearchConfig] | None = None
        self._lock = threading.Lock()

    def __call__(self, lines: Sequence[str]) -> list[str]:
        """The best translation of each line; see `Translator.best`.

        Raises:
          UserError: if the model can't be loaded.
        """
        translator, search = self.load()
        return translator.best(lines, search)

    def translate(self, lines: Sequence[str | Request]) -> list[list[Translation]]:
        """The n-best list of each line; see `Translator.translate`.

        Raises:
          UserError: if the model can't be loaded, or a request can't be fulfilled.
        """
        translator, search = self.load()
        return translator.translate(lines, search)

    def load(self) -> tuple[Translator, SearchConfig]:
        """The translator and its search, loaded by the first thread that asks."""
        with self._lock:
            if self._loaded is None:
                search = self.search or load_config(self.workdir).search
                self._loaded = Translator.load(self.workdir, self.checkpoint), search
            return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        return {"workdir": self.workdir, "search": self.search, "checkpoint": self.checkpoint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)
