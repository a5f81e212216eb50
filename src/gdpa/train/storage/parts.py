"""The tensors of a checkpoint in parts, each written by a rank that holds it, with torch.distributed.checkpoint.

Parts have the names and the places of whole tensors ("model/head.weight", "optimizer/head.weight/exp_avg"), so that any
number of ranks, sharing the model in any way, reads what any other has written.

Reading runs no code: of the index, which is a pickle, nothing is taken but torch's own records of tensors, and the
tensors themselves are read as torch.load does with weights_only.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gdpa.train.parallel import torchrec

INDEX = ".metadata"
PATHS = ("PosixPath", "WindowsPath")
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorStorageMetadata", "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": PATHS,
    "pathlib._local": PATHS,  # as Python 3.13 names it
}  # fmt: skip


def save(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes what it holds; what several have, one of them."""
    with _failures(f"writing {folder.name}"):
        dcp.save({**_of_model(module), **_of_optimizer(module, optimizer)}, storage_writer=dcp.FileSystemWriter(folder))


def load(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """What this rank holds of the weights and, unless it is None, of the optimizer's state. All weights must be
    there, and no others."""
    index = check(folder)
    held = _of_model(module)
    if strange := held.keys() ^ {name for name in index if name.startswith("model/")}:
        raise ValueError(
            f"{folder.name} contains another model: {', '.join(sorted(strange))} are only in one of the two"
        )
    state = {} if optimizer is None else _make_state(module, index)
    rows = {} if optimizer is None else {n: t for n, t in _of_tables(module).items() if n in index}
    found = {f"optimizer/{name}/{key}": t for name, of_one in state.items() for key, t in of_one.items()}
    _read(folder, {**held, **found, **rows})
    if optimizer is not None:
        optimizer.state.update({p: state[name] for name, p in module.named_parameters() if name in state})


def whole(folder: Path) -> dict[str, Any]:
    """All of it, in one process: "model" and "optimizer", as a checkpoint in one file has them."""
    index = check(folder)
    found = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in index.items()}
    _read(folder, found, alone=True)
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name, tensor in found.items():
        part, parameter, key = _taken_apart(name)
        into, last = (state[part].setdefault(parameter, {}), key) if key else (state[part], parameter)
        into[last] = tensor
    return state


def _taken_apart(name: str) -> tuple[str, str, str]:
    """Part, parameter and, of an optimizer, what of its state: a parameter may have a slash in its own name, as the
    column has whose table it is."""
    part, _, rest = name.partition("/")
    parameter, _, key = rest.rpartition("/") if part == "optimizer" else (rest, "", "")
    return part, parameter, key


def check(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors by name, if the index holds nothing else and all that it names is there."""
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(f"there is no complete {str(folder)!r}, where the tensors of the checkpoint are")
    with (folder / INDEX).open("rb") as file:
        index: Metadata = _Records(file).load()
    stored: dict[Any, Any] = index.storage_data
    for info in stored.values():
        path = folder / info.relative_path
        if not path.is_file() or path.stat().st_size < info.offset + info.length:
            raise ValueError(f"{folder.name} lacks a part of {info.relative_path}")
    return index.state_dict_metadata  # type: ignore[return-value]  # records of bytes are refused


class _Records(pickle.Unpickler):
    """Takes nothing but records of tensors: neither code, nor objects that torch.distributed.checkpoint would unpickle
    in its turn."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not plain and name not in RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in an index of tensors")
        return super().find_class(module, name)


def _of_model(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {f"model/{name}": value for name, value in module.state_dict().items()}
    for prefix, tables in torchrec.named_tables(module):
        found |= {f"model/{prefix}.{name}": part for name, part in tables.parts().items()}
    return found


def _of_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"optimizer/{name}/{key}": value
        for name, p in module.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    return {**found, **_of_tables(module)}


def _of_tables(module: nn.Module) -> dict[str, Any]:
    """The state of the optimizer that is inside TorchRec's tables."""
    return {
        f"optimizer/{prefix}.{name}/{key}": part
        for prefix, tables in torchrec.named_tables(module)
        for name, held in tables.optimizer_parts().items()
        for key, part in held.items()
    }


def _make_state(module: nn.Module, index: dict[str, TensorStorageMetadata]) -> dict[str, dict[str, Tensor]]:
    """Tensors to read an optimizer's state into, by parameter: placed as it is where they have its shape."""
    parameters = dict(module.named_parameters())
    state: dict[str, dict[str, Tensor]] = {}
    for entry, kind in index.items():
        part, name, key = _taken_apart(entry)
        if part == "optimizer" and (p := parameters.get(name)) is not None:
            state.setdefault(name, {})[key] = _empty_for(p, kind)
    return state


def _empty_for(p: nn.Parameter, kind: TensorStorageMetadata) -> Tensor:
    """Adam's step is a number on the host."""
    dtype = kind.properties.dtype
    if kind.size == p.shape:
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    return torch.empty(kind.size, dtype=dtype, device=p.device if len(kind.size) else "cpu")


def _read(folder: Path, into: dict[str, Any], alone: bool = False) -> None:
    with _failures(f"reading {folder.name}"):
        dcp.load(into, storage_reader=dcp.FileSystemReader(folder), no_dist=alone or not dist.is_initialized())


# That there is only one process, and that TorchRec's tables are ShardedTensors, is no news.
NO_NEWS = {"torch.distributed is .*assuming the intent": UserWarning, "Please use DTensor instead": FutureWarning}


@contextmanager
def _failures(doing: str) -> Iterator[None]:
    """What fails on a rank is an ordinary error on all of them."""
    try:
        with warnings.catch_warnings():
            for message, kind in NO_NEWS.items():
                warnings.filterwarnings("ignore", message, kind)
            yield
    except dcp.CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"{doing}: rank {rank}: {type(reason).__name__}: {reason}") from reason
