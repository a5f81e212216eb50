"""Everything that training would refuse of its settings, without training: what --print-config checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdpa import models
from gdpa.data import Vocabularies
from gdpa.models import Features
from gdpa.train.config import Config, FilesData, ModelConfig
from gdpa.train.data.splits import Splits, check_held_out, open_splits, schema_of
from gdpa.train.run.building import build_model
from gdpa.train.storage.folder import examine


def validate(config: Config, resume: bool = False, overwrite: bool = False, told: bool = False) -> None:
    """Opens the data and builds the model. Values are not counted, so that a large file takes no longer than a small
    one; ranks and GPUs may be others where the run will be. So may its folder, unless it is ``told``: a config that is
    printed to be compared, or that of a run that is there, would be refused for nothing."""
    if not resume:
        check_held_out(config)
    if told or resume or overwrite:
        examine(config, resume, overwrite)
    build_each([config.model], open_uncounted(config))


def open_uncounted(config: Config) -> Splits:
    """The data, without the ids of their values."""
    known = None
    if isinstance(config.data, FilesData):
        known = Vocabularies({name: {} for name in schema_of(config.data).vocabularies})
    return open_splits(config, vocabularies=known)


def build_each(configs: Sequence[ModelConfig], splits: Splits) -> None:
    """Refuses what one of the models does not take."""
    features = Features.of(splits.train)
    for config in configs:
        with torch.device("meta" if config.name in models.MODELS else "cpu"):  # tables may be large
            build_model(config, features)
