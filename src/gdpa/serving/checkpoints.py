"""What a run has left: the model of a checkpoint, and what it needs to read a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gdpa.data import Schema, Stream, TableLog, Vocabularies
from gdpa.train.config import Config, FilesData
from gdpa.train.config.reading import read_config
from gdpa.train.data.splits import open_splits, schema_of
from gdpa.train.errors import ConfigError
from gdpa.train.result import restore_model
from gdpa.train.storage import checkpoint
from gdpa.train.storage.folder import VOCABULARIES


@dataclass(frozen=True)
class Saved:
    """A checkpoint that can be used. ``vocabularies`` are those of the run, where it was trained on files."""

    path: Path
    model: nn.Module
    config: Config
    vocabularies: Vocabularies | None

    def schema(self) -> Schema:
        """Of the files that the model was trained on."""
        if not isinstance(self.config.data, FilesData):
            raise ConfigError(
                f"{str(self.path)!r} was trained on the synthetic log, whose samples are not in any file: there is no "
                "schema to read one with"
            )
        return schema_of(self.config.data)

    def known(self) -> Vocabularies:
        """The vocabularies, which a model of files always needs."""
        if self.vocabularies is None:
            raise ConfigError(
                f"{str(self.path)!r} needs the vocabularies of its run: {VOCABULARIES} of its folder is not beside it; "
                "name the file with --vocabularies"
            )
        return self.vocabularies

    def stream(self, file: Path) -> Stream:
        """Labelled samples of a file."""
        return TableLog(file, self.schema(), self.known())

    def split(self, name: str) -> Stream:
        """The run's own validation or test samples."""
        splits = open_splits(self.config, vocabularies=self.vocabularies)
        found = splits.valid if name == "valid" else splits.test
        if found is None:
            raise ConfigError(f"the run of {str(self.path)!r} has no {name} samples; name a file")
        return found


def open_checkpoint(
    path: Path, vocabularies: Path | None = None, *, device: str = "auto", trust: bool = False
) -> Saved:
    """A checkpoint, or the best one of a run folder, on a device and in evaluation mode."""
    path = checkpoint.file_of(path)
    if not path.is_file():
        raise ConfigError(f"there is no checkpoint {str(path)!r}")
    state = checkpoint.load_own(path)
    found = vocabularies or path.parent.parent / VOCABULARIES
    known = Vocabularies.load(found) if vocabularies is not None or found.is_file() else None
    if known is not None:
        _check_sizes(known, state["features"]["vocabularies"], found, path)
    model = restore_model(state, path, None, trust).to(_device(device))
    return Saved(path, model, read_config(state["config"]), known)


def _check_sizes(known: Vocabularies, tables: Mapping[str, int], file: Path, path: Path) -> None:
    """Ids of another run would be rows of other values, or of none."""
    for name, size in known.sizes().items():
        if name in tables and tables[name] != size:
            raise ConfigError(
                f"{str(file)!r} does not belong to the run of {str(path)!r}: {name!r} has {size} ids there, and "
                f"{tables[name]} in the model"
            )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
