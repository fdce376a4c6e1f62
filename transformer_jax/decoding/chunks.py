"""Lines in chunks, as large as memory should hold, or as many as have arrived."""

import collections
import os
import select
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from transformer_jax.errors import UserError

T = TypeVar("T")


def chunks(items: Iterable[T], size: int, *, more: Callable[[], bool] = lambda: True) -> Iterator[list[T]]:
    """Lists of `size` items, the last one of those that are left; shorter ones where `more()` is false after an item.

    Raises:
      UserError: that of `items`, after what came before it.
    """
    chunk, failure, items = [], None, iter(items)
    while failure is None:
        try:
            chunk.append(next(items))
        except StopIteration:
            break
        except UserError as error:
            failure = error
        if chunk and (len(chunk) == size or failure or not more()):
            yield chunk
            chunk = []
    if chunk:
        yield chunk
    if failure:
        raise failure


class Arriving:
    """The lines of a pipe, terminal or file as they arrive: an iterator over bytes, ends of lines included."""

    PIECE = 1 << 16  # bytes

    def __init__(self, descriptor: int, name: str):
        self.descriptor = descriptor
        self.name = name
        self._lines: collections.deque[bytes] = collections.deque()
        self._begun = b""  # of a line
        self._ended = False

    def __iter__(self) -> "Arriving":
        return self

    def __next__(self) -> bytes:
        while not self._lines and not self._ended:
            self._read()
        if not self._lines:
            raise StopIteration
        return self._lines.popleft()

    def waiting(self) -> bool:
        """Whether another line is there already."""
        while not self._lines and not self._ended and select.select([self.descriptor], [], [], 0)[0]:
            self._read()
        return bool(self._lines)

    def _read(self) -> None:
        """Waits until there is something, and takes what is there."""
        piece = os.read(self.descriptor, self.PIECE)
        *lines, self._begun = (self._begun + piece).split(b"\n")
        self._lines += (line + b"\n" for line in lines)
        if not piece:
            self._ended = True
            self._lines += [self._begun] if self._begun else []
