"""Checkpoint files: written whole or not at all, the last few and the best kept.

A file is written beside its place, flushed to the disk and then renamed, so that a process killed at any moment leaves
either the old files or the new one, never half of it.

Where ranks write the tensors themselves, a file holds the rest, and names the folder beside it that holds the tensors
(split_kv.py). It is written when that folder is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gdpa.train.errors import ConfigError
from gdpa.train.storage import parts

FORMAT = 1
PARTS = "parts"  # where a checkpoint names its folder, and how that ends
BEST = "best.pt"
PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)\.pt")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls ``write`` with a file that becomes ``path`` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The rename itself reaches the disk; systems that cannot open a folder have no need."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checkpoints:
    """The files of one run: checkpoints/step-00000100.pt, ..., and checkpoints/best.pt."""

    def __init__(self, out: Path, keep: int) -> None:
        self.folder, self.keep = out / "checkpoints", keep

    @property
    def best(self) -> Path:
        return self.folder / BEST

    def paths(self) -> list[Path]:
        """By step, the newest last."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_step)

    def last_step(self) -> int:
        """Of the newest checkpoint, by its name; 0 if there is none."""
        return max(map(_step, self.paths()), default=0)

    def save(self, state: dict[str, Any], step: int, is_best: bool) -> Path:
        """The best first: killed in between, the run continues from before it and writes it again."""
        state = {"format": FORMAT, **state}
        path = self.folder / f"step-{step:08d}.pt"
        if is_best:
            write_whole(self.best, lambda file: torch.save(state, file))
        write_whole(path, lambda file: torch.save(state, file))
        for old in self._by_worth(step)[: -self.keep]:
            old.unlink()
        self._clear_parts()
        return path

    def _by_worth(self, step: int) -> list[Path]:
        """All files, that of ``step`` last. Those of later steps come first: a run that has begun again before them,
        since they could not be read, must not lose its own checkpoints to them."""
        paths = self.paths()
        return [path for path in paths if _step(path) > step] + [path for path in paths if _step(path) <= step]

    def new_parts(self, step: int) -> Path:
        """An empty folder for the tensors after ``step``, which no checkpoint names."""
        self._clear_parts()
        names = (f"step-{step:08d}{again}.{PARTS}" for again in chain([""], map("-{}".format, count(2))))
        path = next(self.folder / name for name in names if not (self.folder / name).exists())
        path.mkdir(parents=True)
        return path

    def _clear_parts(self) -> None:
        """Folders that no checkpoint names any more, or not yet: those of a killed process."""
        if held := list(self.folder.glob(f"*.{PARTS}")):
            named = {_named_parts(path) for path in (self.best, *self.paths())}
            for path in held:
                if path.name not in named:
                    shutil.rmtree(path)

    def clear_partial(self) -> None:
        """What a killed process had not finished."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"*{PARTIAL}"):
                path.unlink()
            self._clear_parts()

    def newest(
        self, warn: Callable[[str], None] = lambda text: None, mmap: bool = False
    ) -> tuple[Path, dict[str, Any]] | None:
        """The newest that can be read; a damaged one is named and the one before it taken."""
        for before, path in reversed([*enumerate(self.paths())]):
            try:
                found = read(path, mmap)
                if PARTS in found:
                    parts.check(parts_of(found, self.folder))
                return path, found
            except Exception as error:  # torch.load raises whatever the bytes lead it to
                then = "; trying the one before it" if before else ""
                warn(f"{path.name} cannot be read ({type(error).__name__}: {error}){then}")
        return None


def file_of(path: str | Path) -> Path:
    """A checkpoint itself, or the best one of a run folder."""
    path = Path(path)
    return path / "checkpoints" / BEST if path.is_dir() else path


def load(path: str | Path) -> dict[str, Any]:
    """A checkpoint on the CPU, of plain values and tensors only, whole."""
    found = read(path)
    return {**found, **parts.whole(parts_of(found, Path(path).parent))} if PARTS in found else found


def load_own(path: Path) -> dict[str, Any]:
    """As ``load``; a file that is something else, or not all of a checkpoint, is refused by its name."""
    try:
        return load(path)
    except FileNotFoundError as error:
        if not path.is_file():
            raise
        raise ConfigError(f"{str(path)!r} is not a checkpoint on its own: {error}") from error  # of what the file names
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise ConfigError(f"{str(path)!r} is not a checkpoint of gdpa train ({type(error).__name__})") from error


def read(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """What is in the file itself; with ``mmap`` tensors are read when they are used."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a checkpoint of format {FORMAT}")
    return state


def parts_of(found: dict[str, Any], folder: Path) -> Path:
    """Where the tensors of a checkpoint of ``folder`` are."""
    name = str(found[PARTS])
    if Path(name).name != name:
        raise ValueError(f"a checkpoint of {str(folder)!r} names {name!r}, which is not in that folder")
    return folder / name


def _named_parts(path: Path) -> str | None:
    try:
        return read(path, mmap=True).get(PARTS)
    except Exception:  # there is none, or it is damaged
        return None


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])
