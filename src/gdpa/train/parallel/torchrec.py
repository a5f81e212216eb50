"""Tables that TorchRec holds, as training sees them; torchrec is imported where they are made, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gdpa.models.embedding import Tables
from gdpa.train.errors import ConfigError

if TYPE_CHECKING:
    from gdpa.models.torchrec_tables import TorchRecTables

T = TypeVar("T")
NEEDED = {"torchrec": "torchrec", "fbgemm_gpu": "fbgemm-gpu-cpu"}


def divide_tables(model: nn.Module, lr: float, device: torch.device) -> None:
    """TorchRecTables in the place of all Tables inside ``model``."""
    check_installed()
    if device.type != "cpu":
        raise ConfigError(f"tables='torchrec' runs on the CPU here, but device is {device.type!r}: use device='cpu'")
    from gdpa.models.torchrec_tables import TorchRecTables

    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, Tables):
                setattr(module, name, TorchRecTables(part, lr))


def check_installed() -> None:
    if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
        raise ConfigError(f"tables='torchrec' needs {', '.join(missing)}, which is not installed (docs/train.md)")


def named_tables(model: nn.Module) -> list[tuple[str, TorchRecTables]]:
    """By the names of their modules. Told by what they can do, so that torchrec need not be there."""
    return [(name, part) for name, part in model.named_modules() if hasattr(part, "whole_optimizer")]


def tables_of(model: nn.Module) -> list[TorchRecTables]:
    return [tables for _, tables in named_tables(model)]


def split(state: dict[str, T], prefix: str) -> tuple[dict[str, T], dict[str, T]]:
    """What is under ``prefix``, without it, and all else."""
    inside = {name.removeprefix(f"{prefix}."): v for name, v in state.items() if name.startswith(f"{prefix}.")}
    return inside, {name: value for name, value in state.items() if not name.startswith(f"{prefix}.")}


class FusedRows(torch.optim.Optimizer):
    """The optimizer that backward itself runs: it only has a learning rate, which must be told before backward."""

    def __init__(self, tables: Sequence[TorchRecTables], lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(0))], {"lr": lr})
        self.tables = tables

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for tables in self.tables:
            tables.set_lr(self.param_groups[0]["lr"])


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, which TorchRec needs also where there is no other."""
    check_installed()
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
