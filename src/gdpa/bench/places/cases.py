"""What is measured: silu of scores with a bias of their places, and silu behind masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa import masks
from gdpa.bench.places.batches import Batch
from gdpa.nn.biases import log_buckets

BUCKETS = 128
FARTHEST = 1024  # rows
PLAIN, CAUSAL = "silu", "causal"  # what the others are compared with: biases, and masks


@dataclass(frozen=True)
class Placed:
    """A call. ``tables`` are the function's; those of floats are learned unless ``fixed``. ``arguments``: of the call,
    besides. ``beside``: the case that has the same function without places, or the same band by arguments."""

    name: str
    what: str
    function: Callable[..., Tensor] | str = "silu"
    tables: Callable[[Batch], tuple[Tensor, ...]] = lambda batch: ()
    fixed: bool = False
    arguments: Callable[[Batch], dict[str, Any]] = lambda batch: {}
    beside: str = PLAIN


# ---- biases ----------------------------------------------------------------------------------------------------------
def alibi(s: Tensor, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + slopes[h] * (kv_idx - q_idx))


def alibi_both_ways(s: Tensor, slopes: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s - slopes[h] * (q_idx - kv_idx).abs())


def by_query(s: Tensor, t: Tensor, *, q_row: Tensor) -> Tensor:
    return F.silu(s + t[q_row])


def by_key(s: Tensor, t: Tensor, *, kv_row: Tensor) -> Tensor:
    return F.silu(s + t[kv_row])


def by_both(s: Tensor, t: Tensor, u: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    return F.silu(s + t[q_row] + u[kv_row])


def relative(s: Tensor, t: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + t[h, q_idx - kv_idx + FARTHEST])


def by_time(s: Tensor, t: Tensor, time: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    return F.silu(s + t[(time[q_row] - time[kv_row]).clamp(0, BUCKETS - 1)])


def by_log_time(s: Tensor, t: Tensor, time: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    return F.silu(s + t[log_buckets(time[q_row] - time[kv_row])])


def hstu(
    s: Tensor, t: Tensor, u: Tensor, time: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor, q_row: Tensor,
    kv_row: Tensor,
) -> Tensor:  # fmt: skip
    bias = t[h, q_idx - kv_idx + FARTHEST] + u[log_buckets(time[q_row] - time[kv_row])]
    return F.silu(s + bias)


def _numbers(batch: Batch, *shape: int) -> Tensor:
    return 0.5 * torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(batch.q.device)


def _slopes(batch: Batch) -> tuple[Tensor, ...]:
    """ALiBi's own: 2^-2, 2^-4, ... for four heads."""
    exponents = torch.arange(1, batch.heads + 1, device=batch.q.device) * (8 / batch.heads)
    return (torch.exp2(-exponents.float()),)


def _small_slopes(batch: Batch) -> tuple[Tensor, ...]:
    return (torch.full((batch.heads,), 0.003, device=batch.q.device),)


def _of_rows(batch: Batch) -> Tensor:
    return _numbers(batch, sum(batch.lengths))


def _of_distances(batch: Batch) -> Tensor:
    return _numbers(batch, batch.heads, 2 * FARTHEST)


def _seconds(batch: Batch) -> Tensor:
    return batch.times.long() * 1800


BIASES = [
    Placed(PLAIN, "nothing"),
    Placed("alibi-small", "slope (j - i), slopes of 0.003", alibi, _small_slopes, fixed=True),
    Placed("alibi", "slope (j - i), ALiBi's own slopes", alibi, _slopes, fixed=True),
    Placed("alibi-abs", "-slope \\|i - j\\|, slopes of 0.003", alibi_both_ways, _small_slopes, fixed=True),
    Placed("by-query", "a table by query row", by_query, lambda b: (_of_rows(b),)),
    Placed("by-key", "a table by key row", by_key, lambda b: (_of_rows(b),)),
    Placed("by-both", "a table by query row and one by key row", by_both, lambda b: (_of_rows(b), _of_rows(b))),
    Placed("relative", "a table by relative position and head", relative, lambda b: (_of_distances(b),)),
    Placed("time", "buckets of 32-bit times", by_time, lambda b: (_numbers(b, BUCKETS), b.times)),
    Placed("log-time", "logarithmic buckets of 64-bit times", by_log_time,
           lambda b: (_numbers(b, BUCKETS), _seconds(b))),
    Placed("hstu", "HSTU's two: relative position, logarithmic buckets of 64-bit times", hstu,
           lambda b: (_of_distances(b), _numbers(b, BUCKETS), _seconds(b))),
]  # fmt: skip


# ---- masks -----------------------------------------------------------------------------------------------------------
def _draw(batch: Batch, low: int, high: int) -> Tensor:
    g = torch.Generator().manual_seed(2)
    return torch.randint(low, high, (len(batch.lengths),), generator=g).int().to(batch.q.device)


def documents(batch: Batch) -> Tensor:
    """Of every row, in documents of an eighth of the longest sequence: (B, L), or (rows,) of packed sequences."""
    size = max(batch.longest // 8, 1)
    ids = [torch.arange(n) // size for n in batch.lengths]
    return (torch.stack(ids) if batch.cu is None else torch.cat(ids)).int().to(batch.q.device)


def prefixes(batch: Batch) -> Tensor:
    return _draw(batch, 0, batch.longest)


def numbers_of_targets(batch: Batch) -> Tensor:
    return _draw(batch, 0, min(64, batch.longest))


def window_of(batch: Batch) -> int:
    return max(batch.longest // 8, 1)


MASKS = [
    Placed(CAUSAL, "`causal=True`", arguments=lambda b: {"causal": True}, beside=CAUSAL),
    Placed("causal-mask", "causal, as a mask", arguments=lambda b: {"mask": masks.causal()}, beside=CAUSAL),
    Placed("window", "`window=(128, 0)`", arguments=lambda b: {"window": (window_of(b), 0)}, beside=CAUSAL),
    Placed("window-mask", "the same window, as a mask", beside=CAUSAL,
           arguments=lambda b: {"mask": masks.window(window_of(b), 0)}),
    Placed("targets", "up to 63 targets, causal", beside=CAUSAL,
           arguments=lambda b: {"mask": masks.targets(numbers_of_targets(b)), "causal": True}),
    Placed("prefix", "a prefix of U[0, 1024), or causal", beside=CAUSAL,
           arguments=lambda b: {"mask": masks.prefix(prefixes(b)) | masks.causal()}),
    Placed("documents", "documents of 128 rows", beside=CAUSAL,
           arguments=lambda b: {"mask": masks.document(documents(b))}),
    Placed("documents-causal", "documents of 128 rows, causal", beside=CAUSAL,
           arguments=lambda b: {"mask": masks.document(documents(b)), "causal": True}),
]  # fmt: skip
CASES = {case.name: case for case in (*BIASES, *MASKS)}


def is_mask(case: Placed) -> bool:
    return case.beside == CAUSAL
