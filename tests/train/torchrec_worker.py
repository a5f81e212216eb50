"""What each rank of test_torchrec.py runs, in one start of the ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import settings

from gdpa.train import train

STEPS = 20
WAYS = ("ddp", "fsdp")
OPTIONS = {"dim": 8, "num_heads": 2, "hidden_units": 4, "longest": 6, "hidden": [8]}
# 57 samples in batches of 8: the last one of a pass is a single sample, of which all ranks but one have none.
RUN: dict[str, Any] = settings(
    steps=STEPS, device="cpu", table_updates="rowwise_adagrad", tables="torchrec", table_lr=0.05, warmup=3,
    eval_every=10, model={"name": "interformer", "options": OPTIONS},
    data={"size": 57, "valid_size": 29, "test_size": 0},
)  # fmt: skip


def outcome(**changes: Any) -> dict[str, Any]:
    resume = changes.pop("resume", False)
    result = train({**RUN, **changes}, resume=resume)
    return {"losses": result.history.losses, "valid": result.metrics["valid"]}


def main(folder: Path, rank: int, world: int) -> None:
    """Rank ``rank``, in a process of its own: writes found-*.json, and what it says to log-*."""
    with (folder / f"log-{rank}").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = {way: outcome(parallel=way) for way in WAYS}
    for way in WAYS if (folder / "ddp").exists() else ():
        begun = {"out": str(folder / way), "sharded_checkpoints": way == "fsdp"}
        found[f"{way}-resumed"] = outcome(parallel=way, **begun, steps=13, resume=True)
    if world == 4:  # of a table with 5 rows the last rank holds none
        outcome(parallel="fsdp", out=str(folder / "four"), sharded_checkpoints=True, steps=7)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()  # nobody leaves whom another one still needs
    sys.stdout.flush()
    os._exit(0)  # a destructor of gloo's threads once aborted a rank that had done everything
