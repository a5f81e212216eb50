"""The processes of a run, what they share, and the few words they exchange: one process is the case of one rank.

The tensors that ranks exchange for control are on the host (gloo), also where the model is on GPUs (nccl).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gdpa.train.config import Config
from gdpa.train.errors import ConfigError, LostRankError
from gdpa.train.parallel import torchrec

SHARED_BATCH = ("ddp", "fsdp")  # each rank reads its share; with the others, all ranks read the same


@dataclass(frozen=True)
class Ranks:
    """This process among ``world``. ``shard`` of ``shards`` is what it reads of the data."""

    rank: int
    world: int
    parallel: str | None
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def leads(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        return self.world if self.parallel in SHARED_BATCH else 1

    @property
    def shard(self) -> int:
        return self.rank if self.parallel in SHARED_BATCH else 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all ranks."""
        return self._sum(values) if self.world > 1 else [float(v) for v in values]

    def sum_shards(self, values: Sequence[float]) -> list[float]:
        """The sums over the shards of the data."""
        return self._sum(values) if self.shards > 1 else [float(v) for v in values]

    def _sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def gather_shards(self, value: Any) -> list[Any] | None:
        """The values of all shards on rank 0, None elsewhere."""
        return self._gather(value) if self.shards > 1 else ([value] if self.leads else None)

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks on rank 0, None elsewhere."""
        return self._gather(value) if self.world > 1 else [value]

    def _gather(self, value: Any) -> list[Any] | None:
        found: list[Any] | None = [None] * self.world if self.leads else None
        dist.gather_object(value, found)
        return found

    def from_lead(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on rank 0, and nowhere else is called; what it raises there, all ranks raise."""
        if self.world == 1:
            return make()
        held: list[Any] = [None, None]
        if self.leads:
            try:
                held[0] = make()
            except Exception as error:
                held[1] = error
        dist.broadcast_object_list(held)
        if held[1] is not None:
            raise held[1]
        return held[0]


@contextmanager
def join(config: Config) -> Iterator[Ranks]:
    """Joins the ranks that torchrun started, or those of a process group that there is already; else it is alone."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 0
    world = dist.get_world_size() if dist.is_initialized() else launched
    if config.parallel is None and world > 1:
        raise ConfigError(f"{world} ranks were started: set parallel to what they share (ddp, fsdp, tensor, context)")
    if config.parallel is not None and not world:
        raise ConfigError(
            f"parallel={config.parallel!r} needs ranks: torchrun --nproc-per-node 2 -m gdpa.cli train --parallel "
            f"{config.parallel} ..."
        )
    device = _device(config.device)
    if config.parallel is None:
        with torchrec.alone() if config.tables == "torchrec" else nullcontext():
            yield Ranks(0, 1, None, device)
        return
    ours = not dist.is_initialized()
    if ours:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=config.timeout))
    failed = True
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        yield Ranks(dist.get_rank(), dist.get_world_size(), config.parallel, device, mesh)
        failed = False
    finally:
        if ours and not (failed and device.type == "cuda"):  # nccl would wait for ranks that are gone
            dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no GPU here")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def lost_ranks(ranks: Ranks, doing: object) -> Iterator[None]:
    """What a broken connection raises, in words: gloo and nccl name sockets and store keys."""
    try:
        yield
    except dist.DistError as error:
        raise _lost(ranks, doing, error) from error
    except RuntimeError as error:
        if ranks.world > 1 and _is_connection(str(error)):
            raise _lost(ranks, doing, error) from error
        raise


def _lost(ranks: Ranks, doing: object, error: Exception) -> LostRankError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return LostRankError(
        f"rank {ranks.rank} of {ranks.world} lost another rank {doing}: it was killed, failed, or did not answer in "
        f"time ({first}). Nothing after the last checkpoint was saved"
    )


def _is_connection(text: str) -> bool:
    """gloo reports broken connections as plain RuntimeErrors."""
    words = ("connection closed by peer", "connection reset", "connection refused", "timed out", "broken pipe", "gloo")
    return any(word in text.lower() for word in words)
