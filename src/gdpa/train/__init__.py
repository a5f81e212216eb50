"""Training of click models: `gdpa train`, and train() for programs.

config.py has the settings, reading.py their file format, flags.py and command.py the command. validating.py says what
training would refuse, start.py opens a run, splits.py its data, loop.py runs it: reader.py deals batches to ranks,
step.py computes gradients, sharing.py spreads a model over ranks, rowwise.py and torchrec.py update embedding tables,
evaluate.py and metrics.py say how good it is, checkpoint.py, state.py and folder.py keep it, recorder.py, journal.py
and report.py tell of it, nonfinite.py keeps what went wrong.
"""

from typing import TYPE_CHECKING

import gdpa.train.requirements  # noqa: F401 - first: it says what to install where something is missing
from gdpa.lazy import attributes

if TYPE_CHECKING:
    from gdpa.train.config import Config, CsvData, FilesData, ModelConfig, SyntheticData
    from gdpa.train.errors import ConfigError, LostRankError, NonFiniteError, RunFolderError, Stopped
    from gdpa.train.metrics import Metrics
    from gdpa.train.nonfinite import replay
    from gdpa.train.reading import make_config, read_toml, to_toml
    from gdpa.train.result import Evaluation, History, Progress, Result, load_model
    from gdpa.train.splits import Splits
    from gdpa.train.start import train

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
    "Metrics": "gdpa.train.metrics",
    "ModelConfig": "gdpa.train.config",
    "NonFiniteError": "gdpa.train.errors",
    "Progress": "gdpa.train.result",
    "Result": "gdpa.train.result",
    "RunFolderError": "gdpa.train.errors",
    "Splits": "gdpa.train.splits",
    "Stopped": "gdpa.train.errors",
    "SyntheticData": "gdpa.train.config",
    "load_model": "gdpa.train.result",
    "make_config": "gdpa.train.reading",
    "read_toml": "gdpa.train.reading",
    "replay": "gdpa.train.nonfinite",
    "to_toml": "gdpa.train.reading",
    "train": "gdpa.train.start",
}
__getattr__ = attributes(globals(), _NAMES)


def __dir__() -> list[str]:
    """Also what is not imported yet, for those who look for names."""
    return sorted({*globals(), *__all__})
