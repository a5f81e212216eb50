"""What can end a run before its time, each with the words that the command prints."""

from __future__ import annotations

from pathlib import Path


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range, or settings that contradict each other."""


class RunFolderError(ValueError):
    """The run folder is in use, or what is in it does not fit this run."""


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a prediction is inf or NaN. ``saved`` are the files to replay it from."""

    def __init__(self, message: str, step: int = 0, saved: Path | None = None) -> None:
        super().__init__(message)
        self.step, self.saved = step, saved


class LostRankError(RuntimeError):
    """Another rank is gone, so that this one cannot go on."""


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; the step was finished and, where there is a run folder, everything saved."""

    def __init__(self, message: str, signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal
