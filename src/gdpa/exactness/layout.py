"""Every layout of the API as rows (rows, heads, D), and its sequences in padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpa.testing.cases import Case

Shape = tuple[int, ...]
MOST_SCORES = 2**25  # in one padded batch: 256 MiB in float64


def operand_shapes(case: Case) -> tuple[Shape, Shape, Shape]:
    """q, k and v as the API takes them."""
    n, heads_k, dv = len(case.len_k), case.heads_k or case.heads, case.dv or case.d

    def shape(lengths: tuple[int, ...], packed: bool, heads: int, d: int, spare: int, shared: bool = False) -> Shape:
        if packed:
            return sum(lengths) + spare, heads, d
        if not case.varlen:
            return 1 if shared else n, heads, lengths[0], d
        return (lengths[0], heads, d) if shared else (n, lengths[0], heads, d)

    return (
        shape(case.rooms_q, case.packed_q, case.heads, case.d, case.spare[0], case.shared),
        shape(case.rooms_k, case.packed_k, heads_k, case.d, case.spare[1]),
        shape(case.rooms_k, case.packed_k, heads_k, dv, case.spare[1]),
    )


def output_shape(case: Case) -> Shape:
    dv = case.dv or case.d
    if case.varlen:
        return sum(case.rooms_q) + case.spare[0], case.heads, dv
    return len(case.len_q), case.heads, case.len_q[0], dv


def as_rows(case: Case, t: Tensor) -> Tensor:
    """(rows, heads, D) of a tensor of the API."""
    if t.dim() == 3:
        return t
    return (t if case.varlen else t.transpose(1, 2)).flatten(0, 1)


@dataclass(frozen=True)
class Span:
    """Where sequence ``b`` stands in q, in the output, and in k and v."""

    b: int
    q: int
    out: int
    k: int
    len_q: int
    len_k: int

    def rows(self, name: str) -> range:
        """The rows that the sequence has in the output or gradient called ``name``."""
        start = {"out": self.out, "sums": self.out, "dq": self.q}.get(name, self.k)
        return range(start, start + (self.len_k if name in ("dk", "dv") else self.len_q))


def spans(case: Case) -> list[Span]:
    found, q, k = [], 0, 0
    for b, (len_q, len_k) in enumerate(zip(case.len_q, case.len_k, strict=True)):
        found.append(Span(b, 0 if case.shared else q, q, k, len_q, len_k))
        q, k = q + case.rooms_q[b], k + case.rooms_k[b]
    return found


def used_rows(case: Case, name: str, device: torch.device) -> Tensor:
    """The rows of an output or gradient that belong to sequences, int64."""
    rows = [row for span in spans(case) for row in span.rows(name)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def batches(case: Case) -> Iterator[list[Span]]:
    """Sequences of similar size together: padding them costs at most a factor of 4."""
    by_size: dict[tuple[int, int], list[Span]] = {}
    for span in spans(case):
        if span.len_q and span.len_k:
            by_size.setdefault((span.len_q.bit_length(), span.len_k.bit_length()), []).append(span)
    for (bits_q, bits_k), found in by_size.items():
        step = max(1, MOST_SCORES // (case.heads << (bits_q + bits_k)))
        for i in range(0, len(found), step):
            yield found[i : i + step]


@dataclass(frozen=True)
class Positions:
    """Where the pairs of a padded batch stand: int64, to be broadcast to (n, H, Lq, Lk). Padding repeats the last row,
    so that every position is that of some real pair."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q_len: Tensor
    kv_len: Tensor
    q_row: Tensor
    kv_row: Tensor


@dataclass(frozen=True)
class Batch:
    """Row numbers (n, L) of padded sequences, which of them are real, the positions of the pairs, and which of them
    count: (n, 1, Lq, Lk), or (n, H, Lq, Lk) under a mask."""

    q: Tensor
    out: Tensor
    k: Tensor
    real_q: Tensor
    real_k: Tensor
    at: Positions
    keep: Tensor

    def rows(self, name: str) -> tuple[Tensor, Tensor]:
        """The rows of the result called ``name``, and which of them are real."""
        at = {"out": (self.out, self.real_q), "sums": (self.out, self.real_q), "dq": (self.q, self.real_q)}
        return at.get(name, (self.k, self.real_k))

    def masked(self, visible: Tensor) -> Batch:
        """With no pairs but those that are ``visible`` too."""
        return replace(self, keep=self.keep & visible)


def make_batch(case: Case, found: list[Span], device: torch.device) -> Batch:
    b, start_q, start_out, start_k, len_q, len_k = (
        torch.tensor([getattr(span, name) for span in found], device=device)[:, None]
        for name in ("b", "q", "out", "k", "len_q", "len_k")
    )
    i = torch.arange(max(span.len_q for span in found), device=device)[None]
    j = torch.arange(max(span.len_k for span in found), device=device)[None]
    real_q, real_k = i < len_q, j < len_k
    keep = real_q[:, :, None] & real_k[:, None, :]
    distance = j[:, None, :] - i[:, :, None] - (len_k - len_q)[:, :, None]
    left, right = case.band
    if left is not None:
        keep = keep & (distance >= -left)
    if right is not None:
        keep = keep & (distance <= right)
    last_q, last_k = (len_q - 1).clamp_min(0), (len_k - 1).clamp_min(0)  # padding repeats a row, which nobody reads
    i, j = torch.minimum(i, last_q), torch.minimum(j, last_k)
    out, k = start_out + i, start_k + j
    one, row, column = (..., None, None), (slice(None), None, slice(None), None), (slice(None), None, None)
    h = torch.arange(case.heads, device=device)[:, None, None]
    at = Positions(b[one], h, i[row], j[column], len_q[one], len_k[one], out[row], k[column])
    return Batch(start_q + i, out, k, real_q, real_k, at, keep[:, None])
