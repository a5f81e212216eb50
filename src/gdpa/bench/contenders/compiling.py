"""torch.compile for contenders: for exactly the shapes of a case, and a backward that may run again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdpa.bench.contenders.contender import Pieces, Prepared, tried


def prepare_compiled(
    fn: Callable[..., Tensor],
    arguments: Callable[[], tuple[Any, ...]],
    leaves: tuple[Tensor, ...],
    pieces: Pieces,
    whose: str,
) -> Prepared | str:
    """``fn(*arguments())`` compiled forward and backward, or in words why it cannot be."""
    from gdpa.compat import functorch_config

    # Dynamo gives up on a function after a few recompilations and then runs it eagerly without a word.
    torch.compiler.reset()
    compiled = torch.compile(fn, dynamic=False, fullgraph=True)
    # A backward that is given the forward's buffers to overwrite can run once; here it is timed many times.
    with functorch_config.patch(donated_buffer=False):
        return tried(Prepared(lambda: compiled(*arguments()), leaves, pieces), whose)
