"""Row sums over keys that are divided among ranks: each rank's outputs and sums become those of all keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from gdpa import api
from gdpa.arguments.normalizing import functions_and_norms, sink_of
from gdpa.distributed.collectives import largest, summed
from gdpa.functions.activation import from_key
from gdpa.masks.mask import kinds_of
from gdpa.problem import PLAIN, sums_dtype
from gdpa.rowsums import weight_of_sink


class Division:
    """How a call's outputs are divided, if they are.

        d = sum_r d_r + sink        o = sum_r d_r o_r / d

    over ranks r, of which d_r are given as logarithms where the function is exp of something. Heads that are not
    divided add up. ``q`` has its heads in dimension 1, as (B, H, L, D) or (rows, H, D).
    """

    def __init__(
        self, q: Tensor, activation: Any, normalize: Any, sink: Any, params: Sequence[Any], tables: Sequence[Tensor]
    ) -> None:
        heads = q.shape[1]
        specs, norms = functions_and_norms(activation, normalize, heads)
        self.sink = sink_of(sink, norms, activation, q)
        self.divides = any(norm != PLAIN for norm in norms)
        self.options: dict[str, Any] = {}
        if not self.divides:
            return
        self.options = {"normalize": normalize, "return_weights_sum": True}
        keys, functions = api.functions(specs, len(params), kinds_of(tables, "tables"), q)
        logarithms = [norm != PLAIN and _is_exponential(key) for key, norm in zip(keys, norms, strict=True)]
        del functions  # alive until here, so that their keys name something
        shape = (heads, 1) if q.dim() == 4 else (heads,)  # of what is broadcast against the sums
        self._logs, self._plain = (
            torch.tensor(found * (heads // len(found)), device=q.device).view(shape)
            for found in (logarithms, [norm == PLAIN for norm in norms])
        )
        wide = sums_dtype(q.dtype)
        self._sink = torch.zeros((), dtype=wide, device=q.device) if self.sink is None else self.sink.view(shape)

    def padded(self, result: Any, rows: int) -> Any:
        """The result (..., L, Dv) of a dense call, with ``rows`` queries more that have seen nothing."""
        if not self.divides:
            return F.pad(result, (0, 0, 0, rows))
        out, sums = result
        nothing = torch.where(self._logs, -torch.inf, 0.0).to(sums.dtype)
        return F.pad(out, (0, 0, 0, rows)), torch.cat([sums, nothing.expand(*sums.shape[:-1], rows)], dim=-1)

    def combined(self, result: Any, group: ProcessGroup) -> Tensor:
        """That of all keys, from what the operator returned for this rank's; the same on all ranks."""
        if not self.divides:
            return summed(result, group)
        out, sums = result
        m = largest(torch.where(self._logs, sums.detach(), 0.0), group)
        m = torch.maximum(m, torch.where(self._logs, self._sink.detach().clamp(min=0).log(), -torch.inf))
        m = torch.where(m == -torch.inf, 0.0, m)
        # Nothing that is not chosen may overflow: its gradient would be 0 * inf.
        d = torch.where(self._logs, torch.where(self._logs, sums - m, 0.0).exp(), sums)
        d = torch.where(self._plain, 1.0, d)
        both = summed(torch.cat([d[..., None] * out.to(d.dtype), d[..., None]], dim=-1), group)
        total, d = both[..., :-1], both[..., -1] + self._sink * torch.where(self._logs, weight_of_sink(m), 1.0)
        none = torch.where(self._logs, d <= 0, d == 0) & ~self._plain
        d = torch.where(none | self._plain, 1.0, d)
        return torch.where(none[..., None], 0.0, total / d[..., None]).to(out.dtype)


def _is_exponential(key: str) -> bool:
    """Whether the sums of the function are logarithms."""
    return from_key(key).exponent is not None


_is_exponential._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as the keys are (see api.py)
