"""TensorBoard, where it was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpa.train.errors import ConfigError

_TRAIN = ("loss", "lr", "gradient_norm", "samples_per_s")
_EVAL = ("auc", "gauc", "logloss", "ne")


class Scalars:
    """Scalars of training and validation. A continued run replaces what came after the step it continues from."""

    def __init__(self, folder: Path, step: int) -> None:
        self._writer = writer()(folder, purge_step=step + 1 if step else None)

    def add(self, record: dict[str, Any]) -> None:
        prefix, names = ("train", _TRAIN) if record["event"] == "train" else (record["split"], _EVAL)
        found = [name for name in record if name.rpartition(".")[2] in names]  # also of further labels: like.auc
        for name in found:
            if record.get(name) is not None:
                self._writer.add_scalar(f"{prefix}/{name}", record[name], record["step"])

    def close(self) -> None:
        self._writer.close()


def writer() -> Any:
    """TensorBoard's, or a refusal in words."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard=true needs TensorBoard: pip install '.[tensorboard]' in a clone of gdpa"
        ) from error
    return SummaryWriter
