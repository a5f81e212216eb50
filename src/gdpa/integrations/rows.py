"""Which rows of padded or packed tensors (B, H, L, D) are those of sequences, and attention over just these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.api import attention_varlen


@dataclass(frozen=True)
class RealRows:
    """The rows that count, of B * L, and where sequences begin among them; ``places`` None means all rows."""

    places: Tensor | None
    cu_seqlens: Tensor
    longest: int

    @staticmethod
    def of_padding(keep: Tensor) -> RealRows:
        """(B, L) bool: True where a token is real."""
        lengths = keep.sum(1)
        cu = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return RealRows(keep.flatten().nonzero().squeeze(1), cu, keep.shape[1])

    @staticmethod
    def of_packing(ids: Tensor) -> RealRows:
        """(B, L) integers: tokens next to each other with the same number are one sequence."""
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        cu = F.pad(starts.flatten().nonzero().squeeze(1), (0, 1), value=ids.numel()).to(torch.int32)
        return RealRows(None, cu, ids.shape[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, activation: Any, **options: Any) -> Tensor:
        """q, k, v (B, H, L, D) -> (B, L, Hq, Dv), zeros in rows that do not count."""
        cu, longest = self.cu_seqlens, self.longest
        q_rows, k_rows, v_rows = (self._rows(t) for t in (q, k, v))
        out: Tensor = attention_varlen(
            q_rows, k_rows, v_rows, cu, cu, activation, max_seqlen_q=longest, max_seqlen_k=longest, **options
        )
        if self.places is not None:
            out = out.new_zeros(q.shape[0] * q.shape[2], *out.shape[1:]).index_copy(0, self.places, out)
        return out.unflatten(0, (q.shape[0], q.shape[2]))

    def _rows(self, t: Tensor) -> Tensor:
        rows = t.transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


def kept_with(mask: Tensor, make: Any) -> RealRows:
    """``make(mask)``, found once for all layers: counting rows waits for the device."""
    found = getattr(mask, "_gdpa_rows", None)
    if found is None:
        found = make(mask)
        mask._gdpa_rows = found  # type: ignore[attr-defined]
    return found
