"""What can end a run before its time, each with the words that the command prints."""

from __future__ import annotations

from pathlib import Path


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range, or settings that contradict each other."""


class RunFolderError(ValueError):
    """The run folder is in use, or its contents do not fit this run."""


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a prediction is inf or NaN. ``saved`` are the files to replay it from."""

    def __init__(self, message: str, step: int = 0, saved: Path | None = None) -> None:
        super().__init__(message)
        self.step, self.saved = step, saved


class LostRankError(RuntimeError):
    """Another rank is lost, so this one cannot continue."""


class Stopped(KeyboardInterrupt):
    """A signal stopped the run; the step was finished and, if there is a run folder, everything was saved."""

    def __init__(self, message: str, signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal
