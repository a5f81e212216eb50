"""Functions of positions and tables that calls are drawn with, and tables that fit the lengths of a call.

A table has just the entries that some pair of such lengths may read; what no visible pair reads becomes NaN
(tensors.py). Their slopes go with the lengths: with steep ones all but a diagonal would lie in a function's tail.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from gdpa.testing.cases import Case

Tables = tuple[Tensor, ...]
TIME = 1_700_000_000_000  # of the first rows, in milliseconds: no 32-bit number
BUCKETS = 16


def longest(case: Case) -> int:
    return max((*case.len_q, *case.len_k, 1))


def rows_q(case: Case) -> int:
    """As q_row counts them: queries that sequences share have rows for each."""
    return max(1, sum(case.rooms_q))


def rows_k(case: Case) -> int:
    return max(1, sum(case.rooms_k))


class Draw:
    """Makes tables of one call, where its tensors are. ``integer`` is what counts and ids are."""

    def __init__(self, case: Case, rng: Generator, integer: torch.dtype) -> None:
        self.case, self.rng, self.integer = case, rng, integer

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.rng, device=self.rng.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        """From 0 to high - 1."""
        return torch.randint(high, shape, generator=self.rng, device=self.rng.device, dtype=self.integer)

    def times(self, rows: int) -> Tensor:
        return TIME + self.integers(3 * rows, rows).long().sort().values


# ---- functions -------------------------------------------------------------------------------------------------------
def alibi(s: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor, q_len: Tensor, kv_len: Tensor) -> Tensor:
    """By arithmetic alone."""
    return F.silu(s - torch.exp2(2.0 - h % 4) * (q_idx - kv_idx).abs() / (q_len + kv_len))


def slopes(s: Tensor, slope: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return F.silu(s + slope[h] * (kv_idx - q_idx))


def relative(s: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """By distance, which counts from the end of the table if it is negative."""
    return F.gelu(s + bias[h, q_idx - kv_idx])


def clamped(s: Tensor, bias: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.sigmoid(s + bias[(q_idx - kv_idx).clamp(-BUCKETS, BUCKETS) + BUCKETS])


def time_buckets(s: Tensor, bias: Tensor, time_q: Tensor, time_k: Tensor, *, q_row: Tensor, kv_row: Tensor) -> Tensor:
    gap = (time_q[q_row] - time_k[kv_row]).abs()
    return F.silu(s + bias[(gap // 4).clamp(0, BUCKETS - 1)])


def hstu(
    s: Tensor, bias: Tensor, by_time: Tensor, time_q: Tensor, time_k: Tensor, *, q_idx: Tensor, kv_idx: Tensor,
    q_row: Tensor, kv_row: Tensor,
) -> Tensor:  # fmt: skip
    gap = (time_q[q_row] - time_k[kv_row]).clamp(0, BUCKETS - 1)
    return F.silu(s + bias[q_idx - kv_idx] + by_time[gap])


def key_gate(s: Tensor, gate: Tensor, *, kv_row: Tensor) -> Tensor:
    return F.gelu(s * torch.sigmoid(gate[kv_row]))


def key_bias(s: Tensor, bias: Tensor, *, b: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(s + bias[b, kv_idx])


def row_gate(s: Tensor, gate: Tensor, *, q_row: Tensor) -> Tensor:
    return F.silu(s) * gate[q_row]


def sequence_gate(s: Tensor, gate: Tensor, *, b: Tensor, h: Tensor) -> Tensor:
    return F.softplus(s + gate[b, h])


def t5(s: Tensor, bias: Tensor, bucket: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.exp(s + bias[h, bucket[(q_idx - kv_idx).abs()]])


def last_keys(s: Tensor, *, kv_idx: Tensor, kv_len: Tensor) -> Tensor:
    return torch.where(kv_len - kv_idx <= 3, 2.0 * s, F.silu(s))


def decaying(s: Tensor, rate: Tensor, bias: Tensor, *, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A param and a table."""
    distance = (q_idx - kv_idx).abs()
    return F.silu(s + bias[h, distance.clamp(0, BUCKETS - 1)]) * torch.exp(-rate * distance / 256)


# ---- their tables ----------------------------------------------------------------------------------------------------
def _distances(draw: Draw, *before: int) -> Tensor:
    """An entry for every distance from -longest to longest - 1."""
    return draw.normal(*before, 2 * longest(draw.case))


def _of_t5(draw: Draw) -> Tables:
    distance = torch.arange(longest(draw.case), device=draw.rng.device)
    bucket = (2 * (1 + distance).float().log2()).int().clamp(max=BUCKETS - 1)
    return draw.normal(draw.case.heads, BUCKETS, scale=0.5), bucket


def _of_hstu(draw: Draw) -> Tables:
    times = draw.times(rows_q(draw.case)), draw.times(rows_k(draw.case))
    return _distances(draw), draw.normal(BUCKETS), *times


TABLES: dict[Callable[..., Tensor], Callable[[Draw], Tables] | None] = {
    alibi: None,
    slopes: lambda draw: (draw.normal(draw.case.heads, scale=3 / longest(draw.case)),),
    relative: lambda draw: (_distances(draw, draw.case.heads),),
    clamped: lambda draw: (draw.normal(2 * BUCKETS + 1),),
    time_buckets: lambda draw: (draw.normal(BUCKETS), draw.times(rows_q(draw.case)), draw.times(rows_k(draw.case))),
    hstu: _of_hstu,
    key_gate: lambda draw: (draw.normal(rows_k(draw.case)),),
    key_bias: lambda draw: (draw.normal(max(1, len(draw.case.len_k)), max((*draw.case.len_k, 1))),),
    row_gate: lambda draw: (draw.normal(rows_q(draw.case)),),
    sequence_gate: lambda draw: (draw.normal(max(1, len(draw.case.len_k)), draw.case.heads),),
    t5: _of_t5,
    last_keys: None,
    decaying: lambda draw: (draw.normal(draw.case.heads, BUCKETS),),
}
