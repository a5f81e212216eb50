"""What a checkpoint holds of a run, so that any number of ranks can continue from it: gathered on rank 0 and whole
here, or in parts (split_kv.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gdpa.train.parallel import torchrec
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.storage import checkpoint, parts, random_state


def whole(value: Any, keep: bool = True) -> Any:
    """A tensor on the host, gathered from all ranks if they hold parts of it; other values as they are.

    Every rank must take part in the gathering; who does not ``keep`` the result gets None and needs no memory for it.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not keep:
        return None
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def part_of(value: Any, like: Tensor) -> Any:
    """This rank's part of a whole tensor, placed as ``like`` is. Scalars, such as Adam's step, stay where they are."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements)
    return value


def model_state(module: nn.Module, keep: bool = True) -> dict[str, Any]:
    found = {name: whole(value, keep) for name, value in module.state_dict().items()}
    for prefix, tables in torchrec.named_tables(module):
        found |= {f"{prefix}.{name}": whole(value, keep) for name, value in tables.whole().items()}
    return found


def load_model_state(module: nn.Module, state: dict[str, Any]) -> None:
    """The whole tensors of ``state`` into the parts that this rank holds. All names must be there."""
    for prefix, tables in torchrec.named_tables(module):
        rows, state = torchrec.split(state, prefix)
        tables.load(rows)
    own = module.state_dict()
    parts = {name: part_of(value, own[name]) if name in own else value for name, value in state.items()}
    module.load_state_dict(parts)


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> dict[str, Any]:
    """By the names of the parameters; those that never had a gradient have none."""
    names = ((name, optimizer.state.get(p)) for name, p in module.named_parameters())
    found = {name: {key: whole(value, keep) for key, value in held.items()} for name, held in names if held}
    for prefix, tables in torchrec.named_tables(module):
        rows = tables.whole_optimizer().items()
        found |= {f"{prefix}.{name}": {key: whole(v, keep) for key, v in held.items()} for name, held in rows}
    return found


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for prefix, tables in torchrec.named_tables(module):
        rows, state = torchrec.split(state, prefix)
        tables.load_optimizer(rows)
    for name, p in module.named_parameters():
        if name in state:
            optimizer.state[p] = {key: part_of(value, p) for key, value in state[name].items()}


def load(
    found: dict[str, Any], folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """The weights of a checkpoint that was read from a file of ``folder``, and the state of ``optimizer``."""
    if checkpoint.PARTS in found:
        parts.load(checkpoint.parts_of(found, folder), module, optimizer)
        return
    load_model_state(module, found["model"])
    if optimizer is not None:
        load_optimizer_state(module, optimizer, found["optimizer"])


def random_states(ranks: Ranks) -> list[dict[str, Any]] | None:
    return ranks.gather(random_state.capture(ranks.device))


def restore_random_state(states: list[dict[str, Any]], ranks: Ranks, seed: int, step: int) -> None:
    """As it was on this rank; with another number of ranks, seeded by the run, the step and the shard."""
    if len(states) == ranks.world:
        random_state.restore(states[ranks.rank], ranks.device)
    else:
        random_state.seed_all(seed + (step << 20) + ranks.shard)
