"""One file translated by several processes, on one machine or many, which share a directory and nothing else.

Of `--output out`, process 1 of 0, 1 and 2 writes `out.1-of-3.partial` and its record, as every output is written
(`transformer_jax.decoding.partial`), and leaves them there. Whoever finds that all shares are whole puts them together;
if two do so at once, both write the same bytes and give them the same name.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from transformer_jax.decoding.partial import (
    Counted,
    Output,
    Partial,
    counted,
    forget,
    partial_paths,
    unfinished_files,
    whole_file,
)
from transformer_jax.errors import UserError

NUMBER_AND_COUNT = (  # what starts one command many times tells each process
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # mpirun of Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # mpiexec of MPICH
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),  # what train.py reads too
)
PIECE = 1 << 20  # bytes


class Shard(NamedTuple):
    """One of several processes which translate a file together."""

    number: int  # from 0
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def all(self) -> list["Shard"]:
        """This one and the others, in order."""
        return [Shard(number, self.total) for number in range(self.total)]

    def share(self, lines: int, *, chunk: int) -> range:
        """Its lines, from 0, of so many: neighbouring chunks, and the same ones that a single process makes."""
        chunks = -(-lines // chunk)
        first, end = (min(number * chunks // self.total * chunk, lines) for number in (self.number, self.number + 1))
        return range(first, end)

    def outputs(self, outputs: Iterable[Output]) -> list[Output]:
        """What it writes of each output."""
        return [Output(f"{output.target}.{self.number}-of-{self.total}") for output in outputs]

    def files(self, outputs: Iterable[Output], *, of: Mapping[str, Any]) -> contextlib.AbstractContextManager[Partial]:
        """The files of its share; see `partial_files`. `of` is what all shares belong to."""
        return unfinished_files(self.outputs(outputs), of=self._of(of))

    def _of(self, of: Mapping[str, Any]) -> dict[str, Any]:
        return {**of, "--shard": str(self)}


def parse_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """`0/3`, `1/3` or `2/3`; `auto`: what the environment says, see `NUMBER_AND_COUNT`.

    Raises:
      UserError: if it is none of these, or the environment says nothing.
    """
    named = next((names for names in NUMBER_AND_COUNT if all(name in environment for name in names)), None)
    if text == "auto" and not named:
        known = ", ".join(" and ".join(names) for names in NUMBER_AND_COUNT)
        raise UserError(f"--shard is auto, but the environment has none of {known}. Give I/N, such as 0/4.")
    given = "/".join(environment[name] for name in named) if text == "auto" and named else text
    match = re.fullmatch(r"(\d+)/(\d+)", given)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard is {given}; expected auto, or I/N with I from 0 to N - 1, such as 0/4.")
    return Shard(int(match[1]), int(match[2]))


def content(paths: Iterable[str]) -> str:
    """A digest of what is in some files, in hexadecimal."""
    found = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def put_together(
    outputs: Sequence[Output], shard: Shard, *, of: Mapping[str, Any], lines: int, chunk: int
) -> list[Shard]:
    """Makes the outputs of the shares of an input of so many lines, and removes the shares.

    It is called when the share of `shard` is whole. If others are not, they are the result, and nothing is done: the
    last of them is to do it.

    Raises:
      UserError: if a share belongs to something else than `of` says, or an output can't be written.
    """
    whole = {one: len(one.share(lines, chunk=chunk)) for one in shard.all()}
    filled = [one for one in shard.all() if whole[one]]
    if filled and shard not in filled:  # there are more processes than chunks
        forget([shard.outputs(outputs)])
        return filled

    def written(one: Shard) -> Counted:
        return counted(one.outputs(outputs), of=one._of(of))

    def removed() -> bool:
        """Whether another process has put them together meanwhile."""
        return written(shard).lines < whole[shard]

    try:
        found = {one: written(one) for one in filled}
        if missing := [one for one in filled if found[one].lines < whole[one]]:
            return [] if removed() else missing
        for index, output in reversed(list(enumerate(outputs))):  # the first, which says that all is done, comes last
            with whole_file(*output) as stream:
                for one in filled:
                    paths, _ = partial_paths(one.outputs(outputs))
                    _copy(paths[index], stream, size=found[one].sizes[index])
                stream.flush()
                os.fsync(stream.fileno())
    except (UserError, OSError):
        if removed():
            return []
        raise
    forget([one.outputs(outputs) for one in shard.all()])
    return []


def _copy(path: os.PathLike, stream: BinaryIO, *, size: int) -> None:
    with open(path, "rb") as share:
        while piece := share.read(min(PIECE, size)):
            stream.write(piece)
            size -= len(piece)
    if size:
        raise UserError(
            f"{path} is shorter than it was. Remove it and its .json, and give the command of its share again."
        )
