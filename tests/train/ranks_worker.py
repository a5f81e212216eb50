"""What each rank of test_ranks.py runs: all ways to share a model, one after another, in one start of the ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import build, settings, without_dropout

from gdpa.train import ConfigError, NonFiniteError, Progress, Result, RunFolderError, Stopped, train
from gdpa.train.parallel import sharing
from support import FULL

WAYS = ("ddp", "fsdp", "tensor", "context")
# Of InterFormer: on four ranks those in which a layer is divided, by more than two.
WAYS_OF_TWO, WAYS_OF_FOUR = (WAYS, WAYS) if FULL else (WAYS[:2], WAYS[2:])
# More than one pass over the data, in batches of 8: the last one of a pass is a single sample, of which all ranks but
# one have none.
STEPS, SIZE = (20, 57) if FULL else (6, 25)
RUN = settings(steps=STEPS, clip=0.5, data={"size": SIZE, "valid_size": 29, "test_size": 19})
OPTIONS = {"dim": 8, "num_heads": 4, "num_layers": 1, "hidden_units": 4, "longest": 6, "hidden": [8]}


def outcome(result: Result) -> dict[str, Any]:
    return {"losses": result.history.losses, "metrics": result.metrics, "steps": result.history.steps}


def run(model: str, **changes: Any) -> dict[str, Any]:
    if model == "tiny":
        return outcome(train({**RUN, **changes}, build=without_dropout))
    return outcome(train({**RUN, **changes, "model": {"name": model, "options": OPTIONS}}))


def on_this_rank(world: int) -> dict[str, Any]:
    ways = WAYS_OF_TWO if world == 2 else WAYS_OF_FOUR
    return {f"interformer-{way}": run("interformer", parallel=way) for way in ways}


def more_on_this_rank(folder: Path, rank: int) -> dict[str, Any]:
    sharing.SMALLEST_BLOCK = 1  # as if the blocks of the small model were large
    found = {f"tiny-{way}": run("tiny", parallel=way) for way in WAYS}
    found["rowwise"] = run("interformer", parallel="ddp", table_updates="rowwise_adam")
    found["accumulate-ddp"] = run("tiny", parallel="ddp", accumulate=2)
    found["accumulate-fsdp"] = run("tiny", parallel="fsdp", accumulate=2)
    for sharded, name in enumerate(("resumed", "resumed-parts")):
        for i, way in enumerate(WAYS, 1):  # some steps in each way, one after another
            part = {"parallel": way, "out": str(folder / name), "steps": i * STEPS // len(WAYS)}
            part = {**RUN, **part, "sharded_checkpoints": bool(sharded)}
            found[name] = outcome(train(part, build=without_dropout, resume=i > 1))
    found["dropout"] = outcome(
        train({**RUN, "steps": 2, "parallel": "ddp", "out": str(folder / "dropout")}, build=build)
    )
    found["refusals"] = refusals(folder)
    found["stopped"] = stopped(folder, rank)
    return found


def stopped(folder: Path, rank: int) -> str:
    """A signal to one rank stops all of them after the same step."""

    def interrupt(progress: Progress) -> None:
        if rank == 1 and progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train({**RUN, "parallel": "fsdp", "out": str(folder / "stopped")}, build=without_dropout, on_step=interrupt)
    except Stopped as stop:
        return str(stop)
    return ""


def refusals(folder: Path) -> list[str]:
    """Every rank is told, and none waits for the others."""
    found = []
    cases: tuple[tuple[type[Exception], dict[str, Any]], ...] = (
        (RunFolderError, {"out": str(folder / "resumed"), "parallel": "ddp"}),
        (ConfigError, {"batch_size": 7, "parallel": "ddp"}),
        (ConfigError, {"parallel": None}),
        (NonFiniteError, {"parallel": "fsdp", "out": str(folder / "bad"), "lr": 1e30, "clip": 1e30}),
    )
    for kind, changes in cases:
        try:
            train({**RUN, **changes}, build=without_dropout)
        except kind as error:
            found.append(str(error))
    return found


def main(folder: Path, rank: int, world: int) -> None:
    """Rank ``rank``, in a process of its own: writes found-*.json, and what it says to log-*."""
    with (folder / f"log-{rank}").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    warnings.filterwarnings("error", r"`torch\.distributed\..* is deprecated", FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = on_this_rank(world)
    if world == 2:
        found |= more_on_this_rank(folder, rank)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves whom another one still needs
    sys.stdout.flush()
    os._exit(0)  # a destructor of gloo's threads once aborted a rank that had done everything
