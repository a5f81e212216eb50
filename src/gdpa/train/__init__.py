"""Training of click models: `gdpa train` on the command line, and train() in programs.

config/ has the settings, their file format and flags, command.py the command. run/ opens a run and carries it out,
data/ has its splits and deals batches to ranks, parallel/ spreads a model over ranks, storage/ keeps what a run needs
to be resumed, reporting/ shows its progress; result.py has what a run returns.
"""

from typing import TYPE_CHECKING

import gdpa.train.requirements  # noqa: F401 - first: it says what to install where something is missing
from gdpa.lazy import attributes

if TYPE_CHECKING:
    from gdpa.train.config import Config, CsvData, FilesData, ModelConfig, SyntheticData
    from gdpa.train.config.reading import make_config, read_toml, to_toml
    from gdpa.train.data.splits import Splits
    from gdpa.train.errors import ConfigError, LostRankError, NonFiniteError, RunFolderError, Stopped
    from gdpa.train.result import Evaluation, History, Progress, Result, load_model
    from gdpa.train.run.metrics import Metrics
    from gdpa.train.run.nonfinite import replay
    from gdpa.train.run.start import train

__all__ = [
    "Config",
    "ConfigError",
    "CsvData",
    "Evaluation",
    "FilesData",
    "History",
    "LostRankError",
    "Metrics",
    "ModelConfig",
    "NonFiniteError",
    "Progress",
    "Result",
    "RunFolderError",
    "Splits",
    "Stopped",
    "SyntheticData",
    "load_model",
    "make_config",
    "read_toml",
    "replay",
    "to_toml",
    "train",
]
_NAMES = {
    "Config": "gdpa.train.config",
    "ConfigError": "gdpa.train.errors",
    "CsvData": "gdpa.train.config",
    "Evaluation": "gdpa.train.result",
    "FilesData": "gdpa.train.config",
    "History": "gdpa.train.result",
    "LostRankError": "gdpa.train.errors",
    "Metrics": "gdpa.train.run.metrics",
    "ModelConfig": "gdpa.train.config",
    "NonFiniteError": "gdpa.train.errors",
    "Progress": "gdpa.train.result",
    "Result": "gdpa.train.result",
    "RunFolderError": "gdpa.train.errors",
    "Splits": "gdpa.train.data.splits",
    "Stopped": "gdpa.train.errors",
    "SyntheticData": "gdpa.train.config",
    "load_model": "gdpa.train.result",
    "make_config": "gdpa.train.config.reading",
    "read_toml": "gdpa.train.config.reading",
    "replay": "gdpa.train.run.nonfinite",
    "to_toml": "gdpa.train.config.reading",
    "train": "gdpa.train.run.start",
}
__getattr__ = attributes(globals(), _NAMES)


def __dir__() -> list[str]:
    """Also what is not imported yet, for those who look for names."""
    return sorted({*globals(), *__all__})
