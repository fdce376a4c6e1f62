"""What the tokenizer and the batches of a run were made of, kept beside it in corpora.json.

A run's place in its data is a number of batches: with other pairs it means nothing. So once there is a checkpoint the
pairs have to stay what they were, whatever the files are called and wherever they lie; before that they may change,
and the tokenizer with them.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax import disk
from transformer_jax.data.store import Store
from transformer_jax.errors import UserError
from transformer_jax.run_directory import CORPORA, checkpoint_steps


class Origin(NamedTuple):
    """One training corpus."""

    corpus: str  # as the configuration names it
    fingerprint: str  # of its files, see `transformer_jax.data.corpus`
    pairs: int = 0  # that were used
    checksum: str = ""  # of their token ids


def origins(corpora: Sequence[str], fingerprints: Sequence[str], store: Store) -> list[Origin]:
    return [Origin(*one) for one in zip(corpora, fingerprints, store.sizes, store.checksums, strict=True)]


def recorded(workdir: str | os.PathLike) -> list[Origin] | None:
    """What corpora.json says; None if it is not there, or can't be read."""
    try:
        return [Origin(**one) for one in json.loads(pathlib.Path(workdir, CORPORA).read_bytes())]
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def may_be_of_others(workdir: str | os.PathLike, fingerprints: Sequence[str]) -> bool:
    """Whether the files, and so what was made of them, may be others than when the run directory was last used."""
    before = recorded(workdir)
    return before is None or [one.fingerprint for one in before] != list(fingerprints)


def check_same_pairs(workdir: str | os.PathLike, found: Sequence[Origin]) -> None:
    """
    Raises:
      UserError: if there is a checkpoint and a corpus has other pairs than it was trained on; it names the first.
    """
    before = recorded(workdir)
    if before is None or not checkpoint_steps(workdir):
        return
    for old, new in zip(before, found, strict=False):
        if (old.pairs, old.checksum) != (new.pairs, new.checksum):
            raise UserError(
                f"{new.corpus}: there are other pairs in it than those which {workdir} was trained on "
                f"({old.pairs:,} then, {new.pairs:,} now), so that run can't go on in it. Put the corpus back as it "
                "was, or train on this one in another --workdir."
            )


def record(workdir: str | os.PathLike, found: Sequence[Origin]) -> None:
    """Writes corpora.json.

    Raises:
      UserError: if it can't be written.
    """
    content = json.dumps([one._asdict() for one in found], indent=2) + "\n"
    disk.replace(pathlib.Path(workdir, CORPORA), content.encode())
