"""Runs checks on several processes that are started once: each check is a function of the world size, and all ranks
run all of them in the same order."""

from __future__ import annotations

import importlib
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from processes import forked
from support import FULL

Check = Callable[[int], None]
MODULES = ("check_rules", "check_heads", "check_keys", "check_refusals", "check_models")
# What two ranks cannot show: meshes of two dimensions, and more ranks than there are keys or heads. Of four ranks by
# default.
ON_FOUR = [
    *(f"check_rules.check_{name}" for name in ("heads_that_do_not_divide", "any_placement", "two_dimensions")),
    *(f"check_heads.check_{name}" for name in ("layers", "with_fully_shard")),
    *(f"check_keys.check_{name}" for name in ("dense", "packed", "row_sums", "lengths", "with_heads", "key_part")),
    "check_keys.check_layers_with_positions",
]
LOST = timedelta(seconds=120)  # after which a rank that waits for one that has failed gives up


def checks(world: int) -> dict[str, Check]:
    """The functions of all modules that are checks, by name."""
    modules = {module: vars(importlib.import_module(f"distributed.{module}")) for module in MODULES}
    found = {f"{module}.{name}": f for module, names in modules.items() for name, f in names.items()
             if name.startswith("check_") and callable(f)}  # fmt: skip
    return found if FULL or world == 2 else {name: found[name] for name in ON_FOUR}


def run(world: int, folder: Path) -> dict[str, str]:
    """The failures of all checks on ``world`` ranks: name -> the tracebacks of the ranks that failed."""
    context = forked()
    ranks = [context.Process(target=_rank, args=(rank, world, folder), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    failures: dict[str, str] = {}
    for rank, process in enumerate(ranks):
        report = folder / f"{rank}.json"
        found = json.loads(report.read_text()) if report.exists() else {}
        for name, text in found.items():
            failures[name] = failures.get(name, "") + text
        if process.exitcode != 0 and not found:
            failures["start"] = f"rank {rank} ended with exit code {process.exitcode}"
    return failures


def _rank(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for deprecated in (DeprecationWarning, FutureWarning):  # as pytest's filters, which end where a process begins
        warnings.filterwarnings("error", category=deprecated, module="gdpa")
    failures: dict[str, str] = {}
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=LOST)
    for name, check in checks(world).items():
        torch.manual_seed(0)
        began = time.monotonic()
        try:
            check(world)
        except Exception:
            failures[name] = f"on rank {rank} of {world}:\n{traceback.format_exc(limit=-4)}"
            (folder / f"{rank}.json").write_text(json.dumps(failures))
        if rank == 0:
            print(f"{time.monotonic() - began:6.2f} s  {name}", flush=True)  # shown by pytest -s
        if not _all_arrive(store, name, world):
            os._exit(1)  # a rank is lost in a collective: nothing after this could be trusted
    dist.destroy_process_group()


def _all_arrive(store: dist.Store, name: str, world: int) -> bool:
    """Whether every rank has come to the end of a check, with or without an error."""
    store.add(name, 1)
    deadline = time.monotonic() + 1.5 * LOST.total_seconds()
    while int(store.add(name, 0)) < world:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
