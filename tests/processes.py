"""Processes for the tests of several ranks."""

from __future__ import annotations

from typing import Any

import torch.multiprocessing as mp

NEEDED = ["gdpa.distributed", "gdpa.nn", "gdpa.train", "sklearn.metrics", "torch._dynamo", "torch.distributed.fsdp"]


def forked() -> Any:
    """Where to make processes: all are forked from one that has imported what they need, and computed nothing.

    To import it takes each of them 3 to 7 seconds otherwise.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(NEEDED)
    return context
