"""gdpa.merge: the results of parts of the keys as that of all of them, for ring attention and the like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("softmax", "sum")


def merge(outs: Sequence[Tensor], sums: Sequence[Tensor], kind: str = "softmax") -> tuple[Tensor, Tensor]:
    """(out, sums) of all keys from those of parts of them, as ``return_weights_sum=True`` gives them.

        d = sum_p d_p        out = sum_p d_p out_p / d

    ``outs`` have one dimension more than ``sums``, the last. ``kind``: "softmax" if the sums are logarithms (the
    function is softmax, or exp of something), "sum" if they are not (normalize "sum" or "abs" of others). A sink
    belongs to one part only: give it to one, and 0 to the others. Differentiable, so that gradients of the parts are
    those of the whole; rows that see nothing give 0.

    >>> parts = [gdpa.attention(q, k, v, "softmax", return_weights_sum=True) for k, v in key_parts]
    >>> out, lse = gdpa.merge(*zip(*parts))
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if len(outs) == 0 or len(outs) != len(sums):
        raise ValueError(f"outs and sums must be equally many, and at least one: {len(outs)} and {len(sums)}")
    for i, (out, total) in enumerate(zip(outs, sums, strict=True)):
        if out.shape[:-1] != total.shape or out.shape != outs[0].shape:
            raise ValueError(
                f"outs[{i}] and sums[{i}] must have shapes {tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}, "
                f"they have {tuple(out.shape)} and {tuple(total.shape)}"
            )
    dtype, totals = outs[0].dtype, torch.stack(list(sums))  # (parts, ...)
    products = torch.stack([out.to(totals.dtype) for out in outs])
    if kind == "softmax":
        m = totals.detach().amax(0)
        m = torch.where(m == -torch.inf, 0.0, m)
        d = (totals - m).exp()
    else:
        m, d = torch.zeros_like(totals[0]), totals
    total = d.sum(0)
    none = total == 0
    some = torch.where(none, 1.0, total)
    out = torch.where(none[..., None], 0.0, (d[..., None] * products).sum(0) / some[..., None]).to(dtype)
    if kind == "softmax":
        return out, torch.where(none, -torch.inf, m + some.log())
    return out, total
