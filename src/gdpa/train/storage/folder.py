"""The run folder: who may write to it, and what is already there.

config.toml            the settings
metrics.jsonl          losses and validations, one JSON object a line
checkpoints/           step-....pt and best.pt, and step-....parts/ where ranks write tensors themselves
vocabularies.json      which value of a CSV file has which id
tensorboard/           if asked for
nonfinite-step-.../    what stopped a run, to be replayed
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from gdpa.train.config import Config
from gdpa.train.config.reading import differences, read_config, read_toml, to_toml
from gdpa.train.data.reader import passes_begun
from gdpa.train.errors import ConfigError, RunFolderError
from gdpa.train.storage.checkpoint import PARTIAL, Checkpoints, write_whole

CONFIG = "config.toml"
JOURNAL = "metrics.jsonl"
VOCABULARIES = "vocabularies.json"
TENSORBOARD = "tensorboard"
_LOCK = ".lock"


class RunFolder:
    """Made ready by the rank that leads; the lock is the system's, so that it is gone when the process is."""

    def __init__(self, config: Config, resume: bool, overwrite: bool) -> None:
        assert config.out is not None
        self.path = Path(config.out)
        self.checkpoints = Checkpoints(self.path, config.keep)
        self._lock = FileLock(self.path / _LOCK)
        used = examine(config, resume, overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunFolderError(f"another process is training in {str(self.path)!r}") from None
        if used and overwrite:
            self._clear()
        self.checkpoints.clear_partial()
        write_whole(self.path / CONFIG, lambda file: file.write(to_toml(config).encode()))

    def _clear(self) -> None:
        """Only what a run writes."""
        for entry in list(self.path.iterdir()):
            if entry.name in ("checkpoints", TENSORBOARD) or entry.name.startswith("nonfinite-"):
                shutil.rmtree(entry)
            elif entry.name in (JOURNAL, VOCABULARIES):
                entry.unlink()

    def release(self) -> None:
        self._lock.release()


def examine(config: Config, resume: bool, overwrite: bool) -> bool:
    """Refuses a folder that this run may not write to, and says whether a run is there already. Writes nothing."""
    assert config.out is not None
    if resume and overwrite:
        raise ConfigError("resume and overwrite contradict each other")
    path = Path(config.out)
    entries = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if not any(name != _LOCK and not name.endswith(PARTIAL) for name in entries):
        return False
    if not resume and not overwrite:
        raise RunFolderError(
            f"{str(path)!r} is not empty: --resume continues the run in it, --overwrite starts over, and another --out "
            "keeps both"
        )
    if not (path / CONFIG).is_file():
        raise RunFolderError(f"{str(path)!r} is not empty and contains no run ({CONFIG} is missing)")
    if resume and (changed := differences(stored_config(path), config)):
        listed = "; ".join(changed)
        raise RunFolderError(f"the run in {str(path)!r} was started with different settings, old -> new: {listed}")
    if resume:
        _check_taken(path, config)
    return True


def _check_taken(path: Path, config: Config) -> None:
    """Refuses an end that is behind the run: of a step it would never come to, of a pass that is over or has begun."""
    held, limit = Checkpoints(path, config.keep), config.epoch_limit
    if config.steps is not None and (taken := held.last_step()) > config.steps:
        raise RunFolderError(f"the run in {str(path)!r} has taken {taken} steps, more than steps={config.steps}")
    newest = None if limit is None else held.newest(mmap=True)
    if newest is not None and limit is not None and (begun := passes_begun(newest[1]["reader"])) > limit:
        raise RunFolderError(
            f"the run in {str(path)!r} has begun {begun} passes over the data, more than epochs={limit}"
        )


def stored_config(out: str | Path) -> Config:
    return read_config(stored_settings(out))


def stored_settings(out: str | Path) -> dict[str, Any]:
    """The settings of the run in a folder, as tables."""
    return read_toml(Path(out) / CONFIG)
