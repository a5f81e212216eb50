"""Attention on q, k and v, or k and v, in one tensor, as a fused projection returns them: FlashAttention's layouts.

Rows come before heads, in inputs and outputs. q, k and v are views of the one tensor, and their gradients are views of
another, which the backward writes directly: separate gradients would have to be copied together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa.api import ActivationLike, Call, MaskLike, NormalizeLike, make_call, sequences
from gdpa.arguments import checks
from gdpa.calling import direct
from gdpa.foreign import points_the_way
from gdpa.numerics import autocast
from gdpa.problem import Operands, parts

Window = tuple[int | None, int | None] | None


@points_the_way
def attention_qkvpacked(
    qkv: Tensor,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """gdpa.attention on q, k and v in one tensor, whose gradient is written as one.

    qkv (B, L, 3, H, D) -> (B, L, H, D). The other arguments are those of :func:`gdpa.attention`.

    >>> out = gdpa.attention_qkvpacked(linear(x).unflatten(-1, (3, heads, -1)), "silu", causal=True)
    """
    return attend(
        None, qkv, activation, params=params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, backend=backend, return_weights_sum=return_weights_sum,
    )  # fmt: skip


@points_the_way
def attention_varlen_qkvpacked(
    qkv: Tensor,
    cu_seqlens: Tensor,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    max_seqlen: int | None = None,
    seqused: Tensor | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """gdpa.attention_varlen on q, k and v in one tensor, whose gradient is written as one.

    qkv (T, 3, H, D), cu_seqlens (B+1,) -> (T, H, D). cu_seqlens, max_seqlen and seqused are those of both sides in
    :func:`gdpa.attention_varlen`, the other arguments are its own.

    >>> out = gdpa.attention_varlen_qkvpacked(linear(x).unflatten(-1, (3, heads, -1)), cu_seqlens, "silu", causal=True)
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor, got {type(cu_seqlens).__name__}")
    try:
        return attend_varlen(
            None, qkv, cu_seqlens, cu_seqlens, activation, params=params, tables=tables, mask=mask,
            normalize=normalize, sink=sink, return_weights_sum=return_weights_sum,
            max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, seqused_q=seqused, seqused_k=seqused, scale=scale,
            out_scale=out_scale, causal=causal, window=window, backend=backend,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        if not torch.compiler.is_compiling():
            error.args = tuple([_of_one_side(a) for a in error.args])
        raise


@points_the_way
def attention_kvpacked(
    q: Tensor,
    kv: Tensor,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """gdpa.attention on k and v in one tensor, whose gradient is written as one.

    q (B, Lq, Hq, D) or (1, Lq, Hq, D), kv (B, Lk, 2, Hk, D) -> (B, Lq, Hq, D). The other arguments are those of
    :func:`gdpa.attention`.

    >>> out = gdpa.attention_kvpacked(q, linear(x).unflatten(-1, (2, heads, -1)))
    """
    return attend(
        q, kv, activation, params=params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, backend=backend, return_weights_sum=return_weights_sum,
    )  # fmt: skip


@points_the_way
def attention_varlen_kvpacked(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    tables: Sequence[Tensor] = (),
    mask: MaskLike = None,
    normalize: NormalizeLike = None,
    sink: float | Tensor = 0.0,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: Window = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """gdpa.attention_varlen on k and v in one tensor, whose gradient is written as one.

    q (Tq, Hq, D), kv (Tk, 2, Hk, D) -> (Tq, Hq, D). The other arguments are those of :func:`gdpa.attention_varlen`;
    with cu_seqlens_q=None the queries are shared, with cu_seqlens_k=None kv is dense, (B, Lk, 2, Hk, D).

    >>> out = gdpa.attention_varlen_kvpacked(q, linear(x).unflatten(-1, (2, heads, -1)), None, cu_seqlens)
    """
    return attend_varlen(
        q, kv, cu_seqlens_q, cu_seqlens_k, activation, params=params, tables=tables, mask=mask,
        normalize=normalize, sink=sink, return_weights_sum=return_weights_sum,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k, scale=scale,
        out_scale=out_scale, causal=causal, window=window, backend=backend,
    )  # fmt: skip


def _of_one_side(message: Any) -> Any:
    """What is wrong with an argument of both sides, by the name that it has here."""
    return re.sub(r"\b(cu_seqlens|max_seqlen|seqused)_[qk]\b", r"\1", message) if isinstance(message, str) else message


def attend(
    q: Tensor | None, rows: Tensor, activation: Any, *, params: Any, scale: Any, out_scale: Any, causal: Any,
    window: Any, backend: Any, tables: Any = (), mask: Any = None, normalize: Any = None, sink: Any = 0.0,
    return_weights_sum: Any = False, grouped: bool = False,
) -> Any:  # fmt: skip
    """Dense: q (B, Lq, Hq, D) and rows (B, Lk, 2, Hk, D), or rows (B, L, 3, H, D) alone, in which Hq / Hk + 2 may stand
    for the 3 if ``grouped``."""
    arguments = (scale, out_scale, causal, window, backend)
    more = (tables, mask, normalize, sink, return_weights_sum)

    given = (q, rows, activation, params, more, *arguments, grouped)
    if direct.nobody_watches():
        layout = direct.together(q is not None, False, False, False)
        result = direct.call(
            layout, q, rows, None, None, None, None, None, activation, params, more, (*arguments, grouped),
            _dense_call, given,
        )  # fmt: skip
        if result is not None:
            return result
    return _dense_call(*given).run_dense(lambda t: t.transpose(1, 2))


def _dense_call(
    q: Tensor | None, rows: Tensor, activation: Any, params: Any, more: tuple[Any, ...], scale: Any, out_scale: Any,
    causal: Any, window: Any, backend: Any, grouped: bool,
) -> Call:  # fmt: skip
    _check(q, rows, 5, "(B, L, 3, H, D)" if q is None else "(B, Lk, 2, Hk, D)", grouped)
    if q is not None:
        checks.tensor("q", q, 4, "(B, Lq, Hq, D)")
    q, rows = _cast(q, rows)
    x = Operands(*parts(None if q is None else q.transpose(1, 2), rows))
    checks.operands(x, "q", "kv")
    tables, mask, normalize, sink, return_weights_sum = more
    return make_call(
        x, activation, params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, max_q=None, max_k=None, backend=backend,
        return_weights_sum=return_weights_sum, rows=rows,
    )  # fmt: skip


def attend_varlen(
    q: Tensor | None, rows: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, activation: Any, *, params: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, scale: Any, out_scale: Any, causal: Any, window: Any, backend: Any,
    tables: Any = (), mask: Any = None, normalize: Any = None, sink: Any = 0.0, return_weights_sum: Any = False,
    seqused_q: Any = None, seqused_k: Any = None, grouped: bool = False,
) -> Any:  # fmt: skip
    """Packed: q (Tq, Hq, D) and rows (Tk, 2, Hk, D), or rows (T, 3, H, D) alone, likewise."""
    arguments = (max_seqlen_q, max_seqlen_k, scale, out_scale, causal, window, backend)
    more = (tables, mask, normalize, sink, return_weights_sum)

    given = (q, rows, cu_q, cu_k, activation, params, more, *arguments, seqused_q, seqused_k, grouped)
    if direct.nobody_watches():
        layout = direct.together(q is not None, True, cu_q is not None, cu_k is not None)
        result = direct.call(
            layout, q, rows, None, cu_q, cu_k, seqused_q, seqused_k, activation, params, more, (*arguments, grouped),
            _varlen_call, given,
        )  # fmt: skip
        if result is not None:
            return result
    return _varlen_call(*given).run_varlen()


def _varlen_call(
    q: Tensor | None, rows: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, activation: Any, params: Any,
    more: tuple[Any, ...], max_seqlen_q: Any, max_seqlen_k: Any, scale: Any, out_scale: Any, causal: Any, window: Any,
    backend: Any, seqused_q: Any, seqused_k: Any, grouped: bool,
) -> Call:  # fmt: skip
    if q is None:
        _check(q, rows, 4, "(T, 3, H, D)", grouped)
    elif cu_k is None:
        _check(q, rows, 5, "(B, Lk, 2, Hk, D) when cu_seqlens_k is None")
    else:
        _check(q, rows, 4, "(Tk, 2, Hk, D)")
    if q is not None:
        checks.tensor("q", q, 3, "(Tq, Hq, D)")
    q, rows = _cast(q, rows)
    rows = rows if rows.dim() == 5 else rows[None]
    q4, k4, v4 = parts(None if q is None else q.transpose(0, 1)[None], rows)
    x = Operands(q4, k4, v4, cu_q, cu_k, None, seqused_q, seqused_k)
    max_q, max_k = sequences(x, max_seqlen_q, max_seqlen_k)
    tables, mask, normalize, sink, return_weights_sum = more
    return make_call(
        x, activation, params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, max_q=max_q, max_k=max_k, backend=backend,
        return_weights_sum=return_weights_sum, rows=rows,
    )  # fmt: skip


def _cast(q: Tensor | None, rows: Tensor) -> tuple[Tensor | None, Tensor]:
    if q is None:
        (rows,) = autocast(rows)
        return None, rows
    q, rows = autocast(q, rows)
    return q, rows


def _check(q: Tensor | None, rows: Any, ndim: int, layout: str, grouped: bool = False) -> None:
    name, count = ("qkv", 3) if q is None else ("kv", 2)
    checks.tensor(name, rows, ndim, layout)
    found = rows.shape[-3]
    if found == count or (grouped and found > count):
        return
    hint = "; where q has more heads than k and v, take q by itself and a kv-packed form" if q is None else ""
    raise ValueError(f"{name} must have shape {layout}, got {tuple(rows.shape)}{hint}")
