"""SIGTERM and SIGINT as a wish to stop after the step, instead of in the middle of it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """``received`` is the signal that came, if one did. A second SIGINT interrupts at once.

    Outside the main thread signals cannot be caught, and are not.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._catch) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
