"""gdpa.merge: joins results over parts of the keys into the result over all of them, as ring attention needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Kind = str | None
KINDS = ("softmax", "sum", None)


def merge(
    outs: Sequence[Tensor], sums: Sequence[Tensor], kind: Kind | Sequence[Kind] = "softmax"
) -> tuple[Tensor, Tensor]:
    """(out, sums) over all keys, from those over parts of the keys, as ``return_weights_sum=True`` returns them.

        d = sum_p d_p        out = sum_p d_p out_p / d

    ``outs`` and ``sums`` are lists or tuples of one tensor per part; each of ``outs`` has one dimension more than its
    sums, the last. ``kind``: "softmax" if the sums are logarithms (the function is softmax, or exp of something), "sum"
    if they are not (normalize "sum" or "abs" of others), None where nothing is divided (the outs of parts are added);
    or a list of those, one per head, for heads of different functions. A sink belongs to one part only: give it to one,
    and 0 to the others. Differentiable, so that gradients of the parts are those of the whole; rows that see nothing
    give 0. Merged sums of rows that belong to no sequence are meaningless: the 0 of a part is a valid log-sum-exp.

    >>> parts = [gdpa.attention(q, k, v, "softmax", return_weights_sum=True) for k, v in key_parts]
    >>> out, lse = gdpa.merge(*zip(*parts))
    """
    _check_parts(outs, sums)
    if not isinstance(kind, list | tuple):
        return _merged(outs, sums, _kind("kind", kind))
    if outs[0].dim() not in (3, 4):
        raise ValueError(f"outs[0] must be (B, H, L, D), or (T, H, D) of packed rows, got {tuple(outs[0].shape)}")
    heads = outs[0].shape[1]
    if len(kind) != heads:
        raise ValueError(f"kind is a list of length {len(kind)}, but needs one entry per head ({heads})")
    kinds = [_kind(f"kind[{h}]", one) for h, one in enumerate(kind)]
    return _merged_by_kind(outs, sums, kinds)


def _merged_by_kind(outs: Sequence[Tensor], sums: Sequence[Tensor], kinds: list[Kind]) -> tuple[Tensor, Tensor]:
    """Heads of one kind in one pass. They are unbound, for the gradient of x[:, h] is as large as that of x."""
    out_heads, sum_heads = ([x.unbind(1) for x in parts] for parts in (outs, sums))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for kind in dict.fromkeys(kinds):
        own = [h for h, one in enumerate(kinds) if one == kind]
        chosen = [[torch.stack([x[h] for h in own], 1) for x in heads] for heads in (out_heads, sum_heads)]
        out, total = _merged(chosen[0], chosen[1], kind)
        found |= zip(own, zip(out.unbind(1), total.unbind(1), strict=True), strict=True)
    out, total = (torch.stack([found[h][i] for h in range(len(kinds))], 1) for i in range(2))
    return out, total


def _kind(name: str, kind: Any) -> Kind:
    if kind == "abs":
        raise ValueError(f'{name} must be "sum" for parts of normalize="abs", too: their sums are added')
    if kind not in KINDS:
        raise ValueError(f'{name} must be "softmax", "sum" or None, got {kind!r}')
    return kind


def _check_parts(outs: Any, sums: Any) -> None:
    for name, parts in (("outs", outs), ("sums", sums)):
        if not isinstance(parts, list | tuple):
            raise TypeError(f"{name} must be a list or tuple of tensors, one for each part, got {type(parts).__name__}")
        for i, part in enumerate(parts):
            if not isinstance(part, Tensor):
                raise TypeError(f"{name}[{i}] must be a tensor, got {type(part).__name__}")
            if part.is_nested:
                raise TypeError(
                    f"{name}[{i}] is a nested tensor; use gdpa.attention_varlen for the parts, and merge its rows"
                )
    if len(outs) == 0 or len(outs) != len(sums):
        raise ValueError(
            f"outs and sums must have the same number of parts, at least 1, got {len(outs)} and {len(sums)}"
        )
    for name, parts in (("outs", outs), ("sums", sums)):
        for i, part in enumerate(parts):
            if not part.is_floating_point():
                raise TypeError(
                    f"{name}[{i}] must be of a float dtype, as the results of attention are, got {part.dtype}"
                )
            if part.dtype != parts[0].dtype:
                raise TypeError(f"{name} must have one dtype, got {parts[0].dtype} and {part.dtype} in {name}[{i}]")
            if part.device != outs[0].device:
                raise ValueError(
                    f"outs and sums must be on one device, but outs[0] is on {outs[0].device} and {name}[{i}] on "
                    f"{part.device}"
                )
    for i, (out, total) in enumerate(zip(outs, sums, strict=True)):
        if out.shape[:-1] != total.shape or out.shape != outs[0].shape:
            raise ValueError(
                f"outs[{i}] and sums[{i}] must have shapes {tuple(outs[0].shape)} and {tuple(outs[0].shape[:-1])}, "
                f"got {tuple(out.shape)} and {tuple(total.shape)}"
            )


def _merged(outs: Sequence[Tensor], sums: Sequence[Tensor], kind: Kind) -> tuple[Tensor, Tensor]:
    dtype, totals = outs[0].dtype, torch.stack(list(sums))  # (parts, ...)
    products = torch.stack([out.to(totals.dtype) for out in outs])
    if kind is None:
        return products.sum(0).to(dtype), totals[0]
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
