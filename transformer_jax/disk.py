"""Files on a disk that may be full or forbidden, beside a process that may be killed, on a machine that may lose power.

A name that ends in `.unfinished` is that of something a writer had not finished; nobody reads it.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from transformer_jax.errors import UserError

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Within it an error of the disk is a UserError that names the path: the system leaves the name out of most."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: can't be written ({error.strerror or error}). Make room or mend the permissions there, and give "
            "the same command again: what is whole stays. Or give another path."
        ) from error


def replace(path: str | os.PathLike, content: bytes) -> None:
    """Writes a file so that at any moment, and after a power cut, it is the old one or the new one.

    Raises:
      UserError: if it can't be written; the old one stays.
    """
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_through(unfinished, content)
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)  # of a full disk it has taken what was left
            raise


def write_through(path: pathlib.Path, content: bytes) -> None:
    """Writes a file and waits for the disk: renamed after that, it can't be a name without content."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
