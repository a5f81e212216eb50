"""The settings of a run: what the file, the flags and the Python call all mean.

Each field says in its metadata what it is, and which values there are to choose from; reading.py and flags.py make the
file format and the flags from that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gdpa.train.errors import ConfigError

Files = str | list[str]  # one name or pattern, or several
# Of what weights are multiplied by: well inside of float32, for Adam's first step is ten times the learning rate.
SMALLEST, LARGEST = 1e-37, 1e37
NO_BOUNDS = {"choices": (), "least": None, "infinite": False}


def setting(
    default: Any, about: str, choices: Sequence[str] = (), least: float | None = None, infinite: bool = False
) -> Any:
    """A field with its meaning. ``least`` is the smallest value that makes sense; ``infinite``: so does inf."""
    metadata = {"help": about, "choices": tuple(choices), "least": least, "infinite": infinite}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SyntheticData:
    """gdpa.data.SyntheticLog; validation and test samples follow the training samples in the same world."""

    source: str = setting("synthetic", "Where samples come from.", ["synthetic", "files", "csv"])
    seed: int = setting(0, "Seed of the log; the run's seed does not change the data.")
    size: int = setting(20_000, "Samples to train on.", least=1)
    valid_size: int = setting(2_000, "Samples to validate on; 0: do not.", least=0)
    test_size: int = setting(2_000, "Samples to test on; 0: do not.", least=0)
    lengths: str = setting("lognormal085", "How long histories are (gdpa.data.LENGTHS).")
    longest: int = setting(64, "Events of the longest history.", least=1)
    items: int = setting(1000, "Different items.", least=1)
    categories: int = setting(20, "Different categories.", least=1)
    users: int = setting(2000, "Different users.", least=1)


@dataclass(frozen=True)
class FilesData:
    """gdpa.data.TableLog: CSV, TSV, Parquet or Arrow files, by names, patterns, or lists of them."""

    source: str = setting("files", "Where samples come from.", ["synthetic", "files", "csv"])
    train: Files = setting("", "File or pattern to train on: CSV, TSV (also .gz), Parquet, Arrow; repeatable.")  # noqa: RUF009
    valid: Files | None = setting(None, "Files to validate on.")  # noqa: RUF009
    test: Files | None = setting(None, "Files to test on.")  # noqa: RUF009
    preset: str | None = setting(None, "Which columns the files have, by the name of a data set (gdpa.data.PRESETS).")
    # Or a table that describes the columns as gdpa.data.Schema does.
    schema: dict[str, Any] = field(default_factory=dict, metadata=NO_BOUNDS)
    shuffle: int = setting(100_000, "Rows to shuffle at a time; 0: keep the file's order.", least=0)
    workers: int = setting(0, "Processes that decode training rows; they only change the speed.", least=0)
    split: str | None = setting(
        None, "Hold out part of --data-train: the newest rows, the rows of some users, or each user's last two.",
        ["time", "user", "last"],
    )  # fmt: skip
    valid_share: float = setting(0.1, "With a split by time or user: the share to validate on.", least=0)
    test_share: float = setting(0.1, "Likewise: the share to test on.", least=0)

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("data.train must name files to train on")
        if (self.preset is None) == (not self.schema):
            raise ConfigError("data.preset or data.schema, one of the two, must say what the columns are")
        for part in ("train", "valid", "test"):
            if not all(isinstance(name, str) for name in self.files(part)):
                raise ConfigError(f"data.{part} must be a file name or a list of them, not {getattr(self, part)!r}")
        if self.split is not None and (self.valid or self.test):
            raise ConfigError(f"data.split={self.split!r} divides data.train: leave out data.valid and data.test")
        if self.valid_share + self.test_share >= 1:
            shares = f"data.valid_share={self.valid_share} and data.test_share={self.test_share}"
            raise ConfigError(f"{shares} leave nothing to train on")

    def files(self, part: str) -> list[str]:
        """The names and patterns of train, valid or test; none if it is not given."""
        found = getattr(self, part)
        return [found] if isinstance(found, str) else list(found or ())


@dataclass(frozen=True)
class CsvData(FilesData):
    """As "files"; the name that runs before there were other files have in their settings."""

    source: str = setting("csv", "Where samples come from.", ["synthetic", "files", "csv"])


SOURCES: dict[str, type[SyntheticData] | type[FilesData]] = {
    "synthetic": SyntheticData,
    "files": FilesData,
    "csv": CsvData,
}


@dataclass(frozen=True)
class ModelConfig:
    """One of gdpa.models.MODELS, or a module:function that is called with the features and the options."""

    name: str = setting("interformer", "A name of gdpa.models.MODELS, or module:function or file.py:function.")
    options: dict[str, Any] = field(default_factory=dict, metadata=NO_BOUNDS)


@dataclass(frozen=True)
class Config:
    """The settings of a whole run. With ``out`` None nothing is written."""

    out: str | None = setting(
        None, "Run folder: checkpoints, metrics.jsonl, config.toml. The command's default is gdpa-run."
    )
    seed: int = setting(0, "Seed of the initial weights, dropout, shuffling and a split by user.")
    data: SyntheticData | FilesData = field(default_factory=SyntheticData)
    model: ModelConfig = field(default_factory=ModelConfig)

    batch_size: int = setting(256, "Samples per step, over all ranks.", least=1)
    steps: int | None = setting(None, "Steps to train; the data start over when they end.", least=1)
    epochs: int | None = setting(None, "Or passes over the data; 1 if neither is given.", least=1)
    accumulate: int = setting(1, "Parts to compute a step's batch in, to save memory.", least=1)

    optimizer: str = setting("adam", "Optimizer.", ["adam", "adamw"])
    lr: float = setting(1e-3, "Learning rate.", least=0)
    weight_decay: float = setting(0.0, "Weight decay: L2 in adam, decoupled in adamw.", least=0)
    warmup: int = setting(0, "Steps over which the learning rate grows from near 0.", least=0)
    schedule: str = setting(
        "constant", "Learning rate after the warmup; all but constant need --steps.", ["constant", "linear", "cosine"]
    )
    tables: str = setting(
        "plain", "Who holds embedding tables: the model, or TorchRec, divided among the ranks.", ["plain", "torchrec"]
    )
    table_updates: str = setting(
        "dense", "How embedding tables learn: like everything else, or only the rows that a batch has read.",
        ["dense", "rowwise_adagrad", "rowwise_adam"],
    )  # fmt: skip
    table_lr: float | None = setting(None, "Learning rate of row-wise updates; default: --lr.", least=0)
    clip: float | None = setting(
        None, "Largest norm of the gradient; larger ones are scaled down.", least=0, infinite=True
    )

    skip_bad: int = setting(0, "How many unreadable rows of files to leave out in a pass.", least=0)

    eval_every: int = setting(0, "Steps between validations; 0: at the end of each epoch.", least=0)
    eval_batch_size: int | None = setting(None, "Samples in a validation batch; default: as in training.", least=1)
    best: str = setting("auc", "The metric by which the best checkpoint is kept.", ["auc", "gauc", "logloss", "ne"])
    checkpoint_every: int = setting(0, "Steps between checkpoints; 0: at every validation.", least=0)
    sharded_checkpoints: bool = setting(
        False, "Every rank writes its part of a checkpoint (torch.distributed.checkpoint); else rank 0 writes all."
    )
    keep: int = setting(2, "How many of the last checkpoints to keep, beside the best.", least=1)
    log_every: int = setting(1, "Steps between entries of metrics.jsonl; the loss is the mean since the last.", least=1)
    tensorboard: bool = setting(False, "Also write TensorBoard scalars to the run folder.")

    device: str = setting("auto", "auto: a GPU if there is one.", ["auto", "cpu", "cuda"])
    dtype: str = setting("fp32", "bf16: autocast; weights stay in fp32.", ["fp32", "bf16"])
    compile: bool = setting(False, "Compile the model with torch.compile.")
    recompute: bool = setting(False, "Recompute layers in the backward instead of keeping their results: less memory.")
    parallel: str | None = setting(
        None, "What torchrun's ranks share: the batch (ddp, fsdp), the heads or the keys.",
        ["ddp", "fsdp", "tensor", "context"],
    )  # fmt: skip
    timeout: float = setting(600.0, "Seconds after which a rank that does not answer is given up on.", least=1)

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs}: give one of the two")
        if self.schedule != "constant":
            if self.steps is None:
                raise ConfigError(f"schedule={self.schedule!r} needs steps, to know where the learning rate ends")
            if self.warmup >= self.steps:
                raise ConfigError(f"warmup={self.warmup} must be less than steps={self.steps}")
        if self.lr == 0:
            raise ConfigError("lr must be positive, not 0")
        self._check_float32()
        if self.tables == "torchrec":
            self._check_torchrec()
        if self.table_updates != "dense":
            self._check_rowwise()
        elif self.table_lr is not None:
            raise ConfigError(f"table_lr={self.table_lr} is for row-wise updates, and table_updates is 'dense'")
        if self.clip == 0:
            raise ConfigError("clip must be positive, not 0; leave it out for no clipping")
        if self.batch_size % self.accumulate:
            raise ConfigError(f"batch_size={self.batch_size} must be a multiple of accumulate={self.accumulate}")
        if self.skip_bad and isinstance(self.data, SyntheticData):
            raise ConfigError(f"skip_bad={self.skip_bad}: synthetic data have no bad rows")
        if self.tensorboard and self.out is None:
            raise ConfigError("tensorboard=true needs out, the folder to write to")

    def _check_float32(self) -> None:
        """Weights are float32: a larger number would fail in the middle of the first step, a smaller one be 0."""
        for name in ("lr", "table_lr", "weight_decay", "clip"):
            value, most = getattr(self, name), math.inf if name == "clip" else LARGEST
            if value and not SMALLEST <= value <= most:
                raise ConfigError(f"{name} must lie between {SMALLEST} and {most}, which float32 holds, not {value!r}")

    def _check_torchrec(self) -> None:
        if self.table_updates != "rowwise_adagrad":
            raise ConfigError(
                f"tables='torchrec' updates rows in the backward: table_updates must be 'rowwise_adagrad', not "
                f"{self.table_updates!r}"
            )
        for name, usual in (("clip", None), ("accumulate", 1)):
            if (value := getattr(self, name)) != usual:
                raise ConfigError(f"tables='torchrec' updates rows in the backward, before {name}={value} could act")

    def _check_rowwise(self) -> None:
        if self.weight_decay:
            raise ConfigError(
                f"weight_decay={self.weight_decay} with table_updates={self.table_updates!r}: rows that are not read "
                "would not decay"
            )
        ways = ("ddp", "fsdp") if self.tables == "torchrec" else ("ddp",)
        if self.parallel not in (None, *ways):
            raise ConfigError(
                f"tables={self.tables!r} with table_updates={self.table_updates!r} is for one process or parallel="
                f"{' or '.join(map(repr, ways))}, not for {self.parallel!r}"
            )
        if self.table_lr == 0:
            raise ConfigError("table_lr must be positive, not 0")

    @property
    def epoch_limit(self) -> int | None:
        """None where steps decide."""
        return None if self.steps is not None else self.epochs or 1


# What a continued run may change: where and how it runs, not what is trained. Steps too, where nothing depends on them.
MAY_CHANGE = {
    "out",
    "keep",
    "sharded_checkpoints",
    "checkpoint_every",
    "tensorboard",
    "device",
    "recompute",
    "tables",
    "parallel",
    "timeout",
    "skip_bad",
    "data.workers",
}
MAY_GROW = {"steps", "epochs"}
MAY_MOVE = {"data.train", "data.valid", "data.test"}  # files, once config.toml has been told where they are now
