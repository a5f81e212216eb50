"""Training of click models: `gdpa train`, and train() for programs.

config.py has the settings, reading.py their file format, flags.py and command.py the command. start.py opens a run,
loop.py runs it: reader.py deals batches to ranks, step.py computes gradients, sharing.py spreads a model over ranks,
rowwise.py and torchrec.py update embedding tables, evaluate.py and metrics.py say how good it is, checkpoint.py,
state.py and folder.py keep it, recorder.py, journal.py and report.py tell of it, nonfinite.py keeps what went wrong.
"""

import gdpa.train.requirements  # noqa: F401 - first: it says what to install where something is missing
from gdpa.train.config import Config, CsvData, ModelConfig, SyntheticData
from gdpa.train.errors import ConfigError, LostRankError, NonFiniteError, RunFolderError, Stopped
from gdpa.train.metrics import Metrics
from gdpa.train.nonfinite import replay
from gdpa.train.reading import make_config, read_toml, to_toml
from gdpa.train.result import Evaluation, History, Progress, Result, load_model
from gdpa.train.start import train

__all__ = [
    "Config",
    "ConfigError",
    "CsvData",
    "Evaluation",
    "History",
    "LostRankError",
    "Metrics",
    "ModelConfig",
    "NonFiniteError",
    "Progress",
    "Result",
    "RunFolderError",
    "Stopped",
    "SyntheticData",
    "load_model",
    "make_config",
    "read_toml",
    "replay",
    "to_toml",
    "train",
]
