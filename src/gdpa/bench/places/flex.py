"""The same biases and masks for FlexAttention, whose function is softmax. Tables have no gradients there: it does not
compile them at these sizes. A mask's blocks are listed in every forward, as a new batch would need it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gdpa.bench.contenders.compiling import prepare_compiled
from gdpa.bench.contenders.contender import Pieces, Prepared
from gdpa.bench.places.batches import Batch
from gdpa.bench.places.cases import BUCKETS, FARTHEST, Placed, documents, numbers_of_targets, prefixes, window_of

Mod = Callable[..., Tensor]


def _alibi(slopes: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def _relative(t: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + t[h, i - j + FARTHEST]


def _time(t: Tensor, time: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + t[(time[b, i] - time[b, j]).clamp(0, BUCKETS - 1)]


def score_mod(case: Placed, batch: Batch) -> Mod | None:
    """None if FlexAttention is not asked for it."""
    tables = case.tables(batch)
    if case.name in ("alibi", "alibi-small"):
        return _alibi(*tables)
    if case.name == "relative":
        return _relative(*tables)
    if case.name == "time":
        return _time(tables[0], tables[1].view(len(batch.lengths), -1))
    return (lambda s, b, h, i, j: s) if case.name == "silu" else None


def mask_mod(case: Placed, batch: Batch) -> Mod | None:
    n, size = batch.longest, window_of(batch)
    if case.name == "causal":
        return lambda b, h, i, j: i >= j
    if case.name == "window":
        return lambda b, h, i, j: (i >= j) & (i - j <= size)
    if case.name == "targets":
        counts = numbers_of_targets(batch)
        return lambda b, h, i, j: ((i >= j) & (j < n - counts[b])) | (i == j)
    if case.name == "prefix":
        known = prefixes(batch)
        return lambda b, h, i, j: (j < known[b]) | (i >= j)
    ids = documents(batch)
    if case.name == "documents":
        return lambda b, h, i, j: ids[b, i] == ids[b, j]
    if case.name == "documents-causal":
        return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)
    return None


def prepare(case: Placed, batch: Batch, masked: bool) -> Prepared | str | None:
    """FlexAttention on a dense batch; None if it is not asked for this case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mod = (mask_mod if masked else score_mod)(case, batch)
    if mod is None:
        return None
    leaves = tuple(batch.leaves())
    list_blocks = torch.compile(create_block_mask)

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
        return flex_attention(q, k, v, score_mod=None if masked else mod, block_mask=blocks)

    def arguments() -> tuple[Any, ...]:
        if not masked:
            return *leaves, None
        n, rows = len(batch.lengths), batch.longest
        return *leaves, list_blocks(mod, n, None, rows, rows, device=batch.q.device)

    # torch.compile keeps what it makes by code object, and gives up on one after a few recompilations.
    own = FunctionType(attend.__code__.replace(), globals(), "attend", None, attend.__closure__)
    return prepare_compiled(own, arguments, leaves, _nowhere(), "FlexAttention")


def _nowhere() -> Any:
    """Its errors are those of another function, and not looked at."""
    none: Callable[..., Any] = lambda *args: None  # noqa: E731
    return Pieces(none, none)
