"""Outputs divided by a sum over the row: the definition, in eager torch, of one tensor of scores.

    o_i = out_scale * sum_j p_ij v_j / d_i        d_i = sink + sum_j n(p_ij)        n(p) = p or |p|

Where p = exp(g), both sums are made of exp(g_ij - m_i), with m_i the largest g of the row (or log sink, if that is
larger), and what is kept of d is its logarithm. A row whose d is 0 gives 0, and passes no gradient on; for exp, where a
negative sink has no meaning, so does one whose d is below 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gdpa.problem import ABS, EXP, PLAIN

Rounding = Callable[[Tensor], Tensor]


def divided(
    norms: Sequence[str], e: Tensor, kept: Tensor, v: Tensor, sink: Tensor | None, round_p: Rounding
) -> tuple[Tensor, Tensor]:
    """(sum_j p_j v_j / d, what is kept of d) for the function's values e (H, Lq, Lk), of which ``kept`` count, v
    (H, Lk, Dv) and sink (H,). ``norms`` are one, or one per head; ``round_p`` is what p becomes before the product."""
    if len(norms) == 1:
        return _one(norms[0], e, kept, v, sink, round_p)
    heads = []
    for h, norm in enumerate(norms):
        at = slice(h, h + 1)
        mine = kept if kept.dim() < 3 or len(kept) == 1 else kept[at]
        heads.append(_one(norm, e[at], mine, v[at], None if sink is None else sink[at], round_p))
    outs, sums = zip(*heads, strict=True)
    return torch.cat(outs), torch.cat(sums)


def _one(
    norm: str, e: Tensor, kept: Tensor, v: Tensor, sink: Tensor | None, round_p: Rounding
) -> tuple[Tensor, Tensor]:
    column = None if sink is None else sink[:, None, None].to(e.dtype)
    if norm == EXP:
        m = _largest(e, kept, column)
        p = torch.where(kept, torch.where(kept, e - m, 0.0).exp(), 0.0)
        column = None if column is None else column * weight_of_sink(m)
    else:
        p = torch.where(kept, e, 0.0)
    if norm == PLAIN:
        return round_p(p) @ v, e.new_ones(e.shape[:2])
    d = (p.abs() if norm == ABS else p).sum(-1, keepdim=True)
    d = d if column is None else d + column
    none = d <= 0 if norm == EXP else d == 0
    some = torch.where(none, 1.0, d)
    out = torch.where(none, 0.0, (round_p(p) @ v) / some)
    sums = torch.where(none, -torch.inf, m + some.log()) if norm == EXP else torch.where(none, 0.0, d)
    return out, sums.squeeze(-1)


def _largest(e: Tensor, kept: Tensor, sink: Tensor | None) -> Tensor:
    """(H, Lq, 1): of the exponents that count, the sink's among them; 0 if there are none."""
    seen = F.pad(torch.where(kept, e.detach(), -torch.inf), (0, 1), value=-torch.inf)
    m = seen.amax(-1, keepdim=True)
    if sink is not None:
        m = torch.maximum(m, sink.detach().clamp(min=0).log())
    return torch.where(m == -torch.inf, 0.0, m)


def weight_of_sink(m: Tensor) -> Tensor:
    """exp(-m) as a finite number: where it is not one the sink is 0, or its gradient beyond any number."""
    most = math.log(torch.finfo(m.dtype).max) - 1
    return (-m).clamp(max=most).exp()
