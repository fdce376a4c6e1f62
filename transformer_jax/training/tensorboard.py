"""Figures for TensorBoard, in the run directory itself."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from transformer_jax import disk


class Board:
    """An event file. What is added is on the disk at once, or the error of the disk comes from here.

    tensorboardX's own `SummaryWriter` writes in another thread: an error ends that, and whoever adds something then
    waits for it for ever.
    """

    def __init__(self, workdir: str | os.PathLike, *, first_step: int):
        """TensorBoard forgets what older files have of `first_step` and later ones.

        Raises:
          UserError: if the file can't be written.
        """
        # Imported here because a run without TensorBoard need not pay for it.
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]  # made when imported
        from tensorboardX.record_writer import RecordWriter
        from tensorboardX.summary import scalar

        self.make_event, self.make_scalar = Event, scalar
        now = time.time()
        # The process is in the name because the clock may be set back.
        name = f"events.out.tfevents.{now:010.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = os.path.join(workdir, name)
        with disk.writing(self.path):
            self.file = RecordWriter(self.path)
        start = Event(step=first_step, session_log=SessionLog(status=SessionLog.START), wall_time=now)
        self._write(Event(file_version="brain.Event:2", wall_time=now), start)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Raises:
        UserError: if they can't be written.
        """
        summaries = [self.make_scalar(name, value) for name, value in figures.items()]
        self._write(*(self.make_event(step=step, summary=one, wall_time=time.time()) for one in summaries))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was added is written, or its error was said
            self.file.close()

    def _write(self, *events: Any) -> None:
        with disk.writing(self.path):
            for event in events:
                self.file.write(event.SerializeToString())
            self.file.flush()
