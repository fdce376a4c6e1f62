"""Ctrl-C and SIGTERM: finish the step, save, leave. A second one kills at once."""

import contextlib
import os
import signal
import threading
from types import FrameType


class Interrupted(Exception):
    """The run was interrupted and saved. `status` is the exit status, 128 + the signal, as shells have it."""

    def __init__(self, number: int, step: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}; saved at step {step:,}")
        self.status = 128 + number


class Interruption:
    """Within it the first SIGINT or SIGTERM only sets `signal`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signal: int | None = None
        self._before = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():  # others can't have handlers
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for other in self.SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # past Python's buffer, in which the signal may have come
            os.write(2, b"\nstopping after this step; once more to stop without saving\n")
