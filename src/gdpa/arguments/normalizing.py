"""The arguments ``normalize`` and ``sink``, and the name "softmax", checked and brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.arguments import checks
from gdpa.problem import ABS, PLAIN, SUM, sums_dtype

SOFTMAX = "softmax"  # no function of one score: exp, divided by its sum


def functions_and_norms(activation: Any, normalize: Any, heads: int) -> tuple[list[Any], list[str]]:
    """What each head computes, and how it is normalised (SUM, ABS or PLAIN): one entry each, or one per query head."""
    specs = _per_head("activation", activation, heads)
    wanted = _per_head("normalize", normalize, heads)
    n = max(len(specs), len(wanted))
    specs, wanted = (found * n if len(found) == 1 else found for found in (specs, wanted))
    for spec, norm in zip(specs, wanted, strict=True):
        if norm is not None and not (isinstance(norm, str) and norm in (SUM, ABS)):
            raise ValueError(f'normalize must be None, "sum", "abs" or a list of those, one per head; got {norm!r}')
        if _is_softmax(spec) and norm != SUM and normalize is not None:
            raise ValueError(f'normalize={norm!r} contradicts activation="softmax", which is exp divided by its sum')
    norms = [SUM if _is_softmax(s) else norm or PLAIN for s, norm in zip(specs, wanted, strict=True)]
    return ["exp" if _is_softmax(s) else s for s in specs], norms


def _is_softmax(spec: Any) -> bool:
    return isinstance(spec, str) and spec == SOFTMAX


def _per_head(name: str, given: Any, heads: int) -> list[Any]:
    if not isinstance(given, list | tuple):
        return [given]
    if len(given) != heads:
        raise ValueError(f"{name} is a list of length {len(given)}, but needs one entry per query head ({heads})")
    return list(given)


def sink_of(sink: Any, norms: Sequence[str], activation: Any, q: Tensor) -> Tensor | None:
    """(Hq,) as wide as params; None for 0, and where nothing is normalised."""
    heads, wide = q.shape[1], sums_dtype(q.dtype)
    if not isinstance(sink, (Tensor, *checks.NUMBERS)):
        raise TypeError(f"sink must be a number or a tensor of shape () or ({heads},), got {type(sink).__name__}")
    given = isinstance(sink, Tensor) or sink != 0
    if given and all(norm == PLAIN for norm in norms):
        raise ValueError(f"sink={sink!r} is added to the row sums, but there are none: pass normalize as well")
    if not isinstance(sink, Tensor):
        number = checks.number("sink", sink, q.dtype)
        if number < 0 and any(_is_softmax(s) for s in _per_head("activation", activation, heads)):
            raise ValueError(f"sink must not be negative for softmax, got {sink}")
        return q.detach().new_full((heads,), number, dtype=wide) if given else None
    if sink.dtype not in checks.DTYPES:
        raise TypeError(f"sink must be float16, bfloat16, float32 or float64, got {sink.dtype}")
    if sink.layout != torch.strided or sink.is_nested:
        raise TypeError(f"sink must be a dense tensor, but its layout is {sink.layout}")
    if sink.shape != () and sink.shape != (heads,):
        raise ValueError(f"sink must have shape () or ({heads},), one value per query head; got {tuple(sink.shape)}")
    if sink.device != q.device:
        raise ValueError(f"sink must be on q's device ({q.device}), but it is on {sink.device}")
    return sink.to(wide).expand(heads).contiguous()
