"""Functions and masks of positions, with a formula for each that shares no code with the library.

A function is run as plain torch on full grids of positions; a mask has a Python predicate per pair beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.nn.biases import log_buckets
from gdpa.testing.cases import Case, Inputs, sequence
from support import CASES, TINY, TINY_PACKED, TINY_SHARED_PACKED, TINY_WINDOW, f64

LONGEST = 64  # no sequence of the cases is longer


# ---- functions -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Function:
    """``make(case)`` gives its params and tables."""

    fn: Callable[..., Tensor]
    make: Callable[[Case], tuple[Sequence[Tensor], Sequence[Tensor]]] = lambda case: ((), ())
    flex: bool = False


def randn(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows(case: Case) -> int:
    return max(sum(case.len_q), sum(case.len_k))


def times(case: Case) -> Tensor:
    """A time stamp per row."""
    return (torch.arange(rows(case)) * 37) % 101 + 1_700_000_000_000


def alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / 4)) * (kv_idx - q_idx)


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def soft_cap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where(torch.abs(kv_idx - q_idx) % 2 == 1, score * 0.5, score)
    return torch.where(torch.abs(kv_idx - q_idx) % 2 == 0, score * 2.0, score)


def causal_mod(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, torch.zeros_like(score))


def per_batch_shift(score, b, h, q_idx, kv_idx):
    return F.silu(score - 0.1 * b + 0.2 * h)


def alibi_table(s, slopes, *, h, q_idx, kv_idx):
    return F.silu(s - slopes[h] * (q_idx - kv_idx).abs())


def relative_table(s, bias, *, h, q_idx, kv_idx):
    return F.silu(s + bias[h, q_idx - kv_idx + LONGEST])


def negative_indices(s, bias, *, q_idx, kv_idx):
    return torch.sigmoid(s + bias[q_idx - kv_idx])  # wraps as torch has it


def biased_silu(s, slope, table, *, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return F.silu(s + table[h, distance.clamp(0, 31)]) * torch.exp(-slope * distance.abs())


def time_buckets(s, buckets, time, *, q_row, kv_row):
    gap = (time[q_row] - time[kv_row]).abs().clamp(0, 127)
    return F.silu(s + buckets[gap // 8])


def hstu(s, rel, buckets, time, *, q_idx, kv_idx, q_row, kv_row):
    gap = (time[q_row] - time[kv_row]).clamp(0, 127)
    return F.silu(s + rel[(q_idx - kv_idx).clamp(-16, 16) + 16] + buckets[gap])


def logarithmic_buckets(s, buckets, time, *, q_row, kv_row):
    return F.silu(s + buckets[log_buckets(time[q_row] - time[kv_row]).clamp(0, 24)])


def t5(s, bias, bucket, *, h, q_idx, kv_idx):
    return torch.exp(0.3 * s + bias[h, bucket[(kv_idx - q_idx).clamp(-40, 40) + 40]])


def t5_formula(s, bias, *, h, q_idx, kv_idx):
    n = (q_idx - kv_idx).clamp(min=0)
    large = 4 + (torch.log(n.clamp(min=1).float() / 4 + 1e-3) / math.log(16.0) * 4).long()
    return F.softplus(s + bias[h, torch.where(n < 4, n, large.clamp(4, 7))])


def row_gate(s, gate, *, q_row):
    return F.silu(s) * gate[q_row]


def key_gate(s, gate, *, kv_row):
    return F.gelu(s * torch.sigmoid(gate[kv_row]))


def head_gate(s, gate, *, h):
    return gate[h] * F.relu(s) ** 2


def sequence_gate(s, gate, *, b, h):
    return F.silu(s + gate[b, h, 1])


def twice(s, table, *, q_idx, kv_idx):
    return F.silu(s + table[q_idx] - table[kv_idx] * 0.5)


def two_tables(s, u, w, *, q_idx, kv_idx, h):
    return F.gelu(s * (1 + 0.1 * u[h, q_idx]) + w[kv_idx])


def decay(s, rate, *, q_idx, kv_idx):
    return F.relu(s) * torch.sigmoid(rate) ** (q_idx - kv_idx).abs()


def last_keys(s, *, kv_idx, kv_len):
    return torch.where(kv_len - kv_idx <= 3, 2.0 * s, F.silu(s))


def relative_length(s, *, q_idx, kv_idx, q_len, kv_len):
    return torch.tanh(s) * ((q_idx + kv_idx).float() / (q_len + kv_len))


def parity_of_scores(s, *, q_idx, kv_idx):
    return torch.where((s > 0) & ((q_idx + kv_idx) % 3 == 0), s, 0.1 * s)


def ignores_the_score(s, table, *, q_idx, kv_idx):
    return table[(q_idx - kv_idx).abs() % 16]


def negative_division(s, *, q_idx, kv_idx):
    distance = kv_idx - q_idx
    return F.silu(s + 0.1 * (distance // 3) - 0.2 * (distance % 5))


def bits(s, table, *, q_idx, kv_idx):
    return F.silu(s + table[((q_idx ^ kv_idx) & 15) >> 1])


def signs_and_minima(s, table, *, q_idx, kv_idx):
    entry = table[torch.minimum(q_idx, kv_idx).clamp(0, 7), torch.sign(q_idx - kv_idx) + 1, 0]
    return F.silu(s + entry + 0.1 * torch.where(q_idx > kv_idx, q_idx, -kv_idx))


def cosines(s, *, h, q_idx, kv_idx):
    ratio = (q_idx / (kv_idx + 1)).floor()
    return s * torch.cos(0.1 * (q_idx - kv_idx)) + torch.sigmoid(h.float() - 1) + 0.01 * ratio


def shifts(s, table, *, q_idx, kv_idx):
    entry = table[torch.div(kv_idx - q_idx, 3, rounding_mode="trunc") % 5, ~q_idx & 3]
    return s + entry * (kv_idx << 1)


def byte_ids(s, table, ids, *, q_row, kv_row):
    return torch.where(ids[q_row] == ids[kv_row], s * table[ids[q_row].long()], 0.2 * s)


def truths(s, table, *, b, q_idx):
    return torch.where(table[q_idx] & (b > 0), s, 2 * s)


def mean_of_heads(s, w, table, *, h, q_idx):
    return w * F.silu(s) + table[h, q_idx % 7].detach() * torch.tanh(s)


BUCKETS = torch.tensor([min(7, int(math.log2(1 + abs(i - 40)))) for i in range(81)])

FUNCTIONS = {
    "alibi": Function(alibi, flex=True),
    "relative": Function(relative, flex=True),
    "soft_cap": Function(soft_cap, flex=True),
    "checkerboard": Function(checkerboard, flex=True),
    "causal_mod": Function(causal_mod, flex=True),
    "per_batch_shift": Function(per_batch_shift, flex=True),
    "alibi_table": Function(alibi_table, lambda c: ((), (0.2 * randn(c.heads),))),
    "relative_table": Function(relative_table, lambda c: ((), (randn(c.heads, 2 * LONGEST),))),
    "negative_indices": Function(negative_indices, lambda c: ((), (randn(LONGEST),))),
    "biased_silu": Function(biased_silu, lambda c: ((torch.tensor(0.05),), (randn(c.heads, 32),))),
    "time_buckets": Function(time_buckets, lambda c: ((), (randn(16), times(c)))),
    "logarithmic buckets": Function(logarithmic_buckets, lambda c: ((), (randn(25), 37 * times(c)))),
    "hstu": Function(hstu, lambda c: ((), (randn(33), randn(128, seed=1), times(c)))),
    "t5": Function(t5, lambda c: ((), (0.3 * randn(c.heads, 8), BUCKETS.int()))),
    "t5_formula": Function(t5_formula, lambda c: ((), (randn(c.heads, 8),))),
    "row_gate": Function(row_gate, lambda c: ((), (randn(rows(c)),))),
    "key_gate": Function(key_gate, lambda c: ((), (randn(rows(c)),))),
    "head_gate": Function(head_gate, lambda c: ((), (randn(c.heads),))),
    "sequence_gate": Function(sequence_gate, lambda c: ((), (randn(len(c.len_q), c.heads, 2),))),
    "twice": Function(twice, lambda c: ((), (randn(LONGEST),))),
    "two_tables": Function(two_tables, lambda c: ((), (randn(c.heads, LONGEST), randn(LONGEST, seed=3)))),
    "decay": Function(decay, lambda c: ((torch.linspace(1.5, 3.0, c.heads),), ())),
    "last_keys": Function(last_keys),
    "relative_length": Function(relative_length),
    "parity_of_scores": Function(parity_of_scores),
    "ignores_the_score": Function(ignores_the_score, lambda c: ((), (randn(16),))),
    "negative_division": Function(negative_division),
    "bits": Function(bits, lambda c: ((), (randn(8),))),
    "signs_and_minima": Function(signs_and_minima, lambda c: ((), (randn(8, 3, 2),))),
    "cosines": Function(cosines),
    "shifts": Function(shifts, lambda c: ((), (randn(5, 4),))),
    "byte_ids": Function(byte_ids, lambda c: ((), (randn(6), (torch.arange(rows(c)) * 7 % 6).to(torch.int8)))),
    "truths": Function(truths, lambda c: ((), (torch.arange(LONGEST) % 3 == 0,))),
    "mean_of_heads": Function(mean_of_heads, lambda c: ((torch.linspace(0.5, 1, c.heads),), (randn(c.heads, 7),))),
}


# ---- masks -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pair:
    """One pair of a query and a key, for predicates."""

    case: Case
    b: int
    h: int
    i: int
    j: int

    @property
    def len_q(self) -> int:
        return self.case.len_q[self.b]

    @property
    def len_k(self) -> int:
        return self.case.len_k[self.b]

    @property
    def shift(self) -> int:
        return self.len_k - self.len_q

    @property
    def row_q(self) -> int:
        return sum(self.case.len_q[: self.b]) + self.i

    @property
    def row_k(self) -> int:
        return sum(self.case.len_k[: self.b]) + self.j


@dataclass(frozen=True)
class Masked:
    make: Callable[[Case], Any]
    sees: Callable[[Pair], bool]


def counts(case: Case, seed: int = 0) -> Tensor:
    """A number per sequence, from 0 to 9."""
    return torch.tensor([(3 * b + 4 + seed) % 10 for b in range(len(case.len_q))])


def count(p: Pair, seed: int = 0) -> int:
    return (3 * p.b + 4 + seed) % 10


def ids(case: Case) -> Tensor:
    """Documents of seven rows."""
    return (torch.arange(rows(case)) // 7).int()


def candidates(p: Pair, group: int = 1) -> bool:
    first = p.len_k - count(p)
    if p.j < first:
        return True
    own = p.i + p.shift
    return own >= first and (own - first) // group == (p.j - first) // group


def banded(p: Pair, left: int, right: int) -> bool:
    return -left <= p.j - p.i - p.shift <= right


def natten(b, h, q, kv):
    """Neighbours within 2 on a grid of 8 columns."""
    return ((q // 8 - kv // 8).abs() <= 2) & ((q % 8 - kv % 8).abs() <= 2)


def tree(q_idx, kv_idx, parents):
    """A node sees itself, its parent and its grandparent."""
    parent = parents[q_idx]
    return (kv_idx == q_idx) | (kv_idx == parent) | (kv_idx == parents[parent])


def hstu_mask(c: Case) -> Any:
    m = masks
    tail = m.full_tail(counts(c, 1)) & m.causal()
    return (m.causal() & m.window(6, 0) | tail | m.context(counts(c, 2))) & m.targets(counts(c))


def hstu_sees(p: Pair) -> bool:
    causal = p.j - p.i <= p.shift
    near = causal and banded(p, 6, 0)
    tail = p.i >= p.len_q - count(p, 1) and causal
    return (near or tail or p.i < count(p, 2)) and candidates(p)


PARENTS = torch.tensor([max(0, (i - 1) // 2) for i in range(LONGEST)])

MASKS = {
    "causal": Masked(lambda c: masks.causal(), lambda p: p.j - p.i <= p.shift),
    "window": Masked(lambda c: masks.window(5, 3), lambda p: banded(p, 5, 3)),
    "window_first": Masked(lambda c: masks.window(4, 2, "first"), lambda p: -4 <= p.j - p.i <= 2),
    "window_negative": Masked(lambda c: masks.window(9, -2), lambda p: banded(p, 9, -2)),
    "window_open": Masked(lambda c: masks.window(None, -1), lambda p: p.j - p.i - p.shift <= -1),
    "prefix": Masked(lambda c: masks.prefix(counts(c)), lambda p: p.j < count(p)),
    "prefix_lm": Masked(
        lambda c: masks.prefix(counts(c)) | masks.causal(), lambda p: p.j < count(p) or p.j - p.i <= p.shift
    ),
    "document": Masked(lambda c: masks.document(ids(c)), lambda p: p.row_q // 7 == p.row_k // 7),
    "document_causal": Masked(
        lambda c: masks.document(ids(c)) & masks.causal(),
        lambda p: p.row_q // 7 == p.row_k // 7 and p.j - p.i <= p.shift,
    ),
    "document_2d": Masked(
        lambda c: masks.document(torch.arange(LONGEST).expand(len(c.len_q), -1) // 5), lambda p: p.i // 5 == p.j // 5
    ),
    "document_both": Masked(
        lambda c: masks.document(ids(c), torch.arange(LONGEST).expand(len(c.len_q), -1) // 5),
        lambda p: p.row_q // 7 == p.j // 5,
    ),
    "targets": Masked(lambda c: masks.targets(counts(c)), candidates),
    "targets_group": Masked(
        lambda c: masks.targets(counts(c), 3) & masks.causal(),
        lambda p: candidates(p, 3) and p.j - p.i <= p.shift,
    ),
    "context": Masked(
        lambda c: masks.context(counts(c)) | masks.causal(), lambda p: p.i < count(p) or p.j - p.i <= p.shift
    ),
    "full_tail": Masked(lambda c: masks.full_tail(counts(c)), lambda p: p.i >= p.len_q - count(p)),
    "dilated": Masked(lambda c: masks.dilated(3), lambda p: (p.j - p.i - p.shift) % 3 == 0),
    "not_causal": Masked(lambda c: ~masks.causal(), lambda p: p.j - p.i > p.shift),
    "hstu": Masked(hstu_mask, hstu_sees),
    "natten": Masked(
        lambda c: masks.from_flex(natten),
        lambda p: abs(p.i // 8 - p.j // 8) <= 2 and abs(p.i % 8 - p.j % 8) <= 2,
    ),
    "tree": Masked(
        lambda c: gdpa.Mask(tree, (PARENTS,)),
        lambda p: p.j in (p.i, PARENTS[p.i], PARENTS[PARENTS[p.i]]),
    ),
    "heads": Masked(lambda c: lambda h, kv_idx: kv_idx % 2 == h % 2, lambda p: p.j % 2 == p.h % 2),
    "everything": Masked(lambda c: lambda q_idx: q_idx >= 0, lambda p: True),
    "nothing": Masked(lambda c: lambda q_idx: q_idx < 0, lambda p: False),
    "rows": Masked(lambda c: lambda q_row, kv_row: (q_row + kv_row) % 4 != 0, lambda p: (p.row_q + p.row_k) % 4 != 0),
}

PLACED_CASES = [CASES[n] for n in (
    "dense", "gqa-causal-unequal-d", "shared-queries", "packed", "packed-mqa-window", "packed-dense-keys",
    "shared-queries-packed-keys",
)]  # fmt: skip
TINY_PLACED = [TINY, TINY_PACKED, TINY_WINDOW, TINY_SHARED_PACKED]


# ---- the formula -----------------------------------------------------------------------------------------------------
def naive(
    case: Case, x: Inputs, f: Function | None, params: Sequence[Tensor] = (), tables: Sequence[Tensor] = (),
    masked: Masked | None = None,
) -> Tensor:  # fmt: skip
    """o, sequence by sequence, in the dtype of ``x``; without ``f`` silu."""
    outs = []
    for b in range(len(case.len_q)):
        q, k, v = (
            sequence(case, t, cu, b, shared)
            for t, cu, shared in ((x.q, x.cu_q, case.shared), (x.k, x.cu_k, False), (x.v, x.cu_k, False))
        )
        k, v = (t.repeat_interleave(case.heads // t.shape[0], 0) for t in (k, v))
        s = q @ k.mT / math.sqrt(case.d)
        # Only of visible pairs: elsewhere it may have no value, and then autograd has none for anything.
        keep, p = visible(case, b, masked), torch.zeros_like(s)
        p[keep] = F.silu(s[keep]) if f is None else _apply(case, f, s, keep, b, params, tables)
        outs.append(p @ v)
    return torch.cat(outs, 1).transpose(0, 1) if case.varlen else torch.stack(outs)


def _apply(
    case: Case, f: Function, s: Tensor, keep: Tensor, b: int, params: Sequence[Tensor], tables: Sequence[Tensor]
) -> Tensor:
    """Of the scores at ``keep``, in a row."""
    _, len_q, len_k = s.shape
    h, i, j = (t[keep] for t in torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij"))
    at = {
        "b": torch.full_like(h, b), "h": h, "q_idx": i, "kv_idx": j, "q_len": torch.full_like(h, len_q),
        "kv_len": torch.full_like(h, len_k), "q_row": sum(case.len_q[:b]) + i, "kv_row": sum(case.len_k[:b]) + j,
    }  # fmt: skip
    columns = [p[h] if p.dim() else p for p in params]
    if f.flex:
        return f.fn(s[keep], at["b"], h, i, j)
    names = f.fn.__code__.co_varnames[f.fn.__code__.co_argcount :][: f.fn.__code__.co_kwonlyargcount]
    return f.fn(s[keep], *columns, *tables, **{name: at[name] for name in names}).to(s.dtype)


def visible(case: Case, b: int, masked: Masked | None) -> Tensor:
    """(H, Lq, Lk) of bool, pair by pair."""
    left, right = case.band
    shift = case.len_k[b] - case.len_q[b]
    keep = torch.zeros(case.heads, case.len_q[b], case.len_k[b], dtype=torch.bool)
    for h in range(case.heads if masked is not None else 1):
        for i in range(case.len_q[b]):
            for j in range(case.len_k[b]):
                inside = (left is None or -left <= j - i - shift) and (right is None or j - i - shift <= right)
                keep[h, i, j] = inside and (masked is None or masked.sees(Pair(case, b, h, i, j)))
    return keep if masked is not None else keep[:1].expand_as(keep)


def leaves(tensors: Sequence[Tensor], dtype: torch.dtype = f64, device: str = "cpu") -> list[Tensor]:
    """Fresh leaves of the floating point ones."""
    moved = [t.to(device) for t in tensors]
    return [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in moved]
