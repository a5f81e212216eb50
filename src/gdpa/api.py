"""attention() and attention_varlen(): check, bring to the one internal layout, call the operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdpa import backends, checks, reference
from gdpa.functions.activation import Activation, from_keys, resolve
from gdpa.nested import is_jagged, jagged_like, offsets_of, rows_of
from gdpa.problem import Band, Operands, make_problem

ActivationLike = str | Callable[..., Tensor] | Activation | Sequence[Any]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention with any function in place of softmax.

        o_i = out_scale * sum_j f(scale * <q_i, k_j>; params) v_j

    q (B, Hq, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv) -> (B, Hq, Lq, Dv), as F.scaled_dot_product_attention; Hq is
    a multiple of Hk. q may have batch 1 (queries shared by the batch). Each may be a jagged nested tensor.

    Args:
        activation: a built-in's name, a function f(s, *params) of element-wise torch operations, a gdpa.Activation,
            or a list of those, one per query head.
        params: tensors of shape () or (Hq,), differentiable.
        scale: factor of the scores, 1/sqrt(D) by default. ``out_scale``: factor of the output.
        causal, window: key j is kept iff -left <= j - i - (Lk - Lq) <= right; causal means right = 0.
        backend: force one of "triton", "cpu", "reference"; None takes the best (``gdpa.explain`` tells which).

    >>> out = gdpa.attention(q, k, v, lambda s: torch.relu(s) ** 2, out_scale=1 / 1024)
    """
    call = _dense_call(q, k, v, activation, params, scale, out_scale, causal, window, backend)
    out = call.run()
    if is_jagged(q):
        return jagged_like(out[0].transpose(0, 1), q).transpose(1, 2)
    return out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    activation: ActivationLike = "gelu",
    *,
    params: Sequence[Tensor] = (),
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention over sequences packed end to end, with no padding; the arguments not named here are attention()'s.

    q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) -> (Tq, Hq, Dv). Sequence b has rows cu_seqlens[b] to cu_seqlens[b+1].

    Args:
        cu_seqlens_q: B+1 offsets, int32 or int64, on the tensors' device; None: q (Lq, Hq, D) is one block of queries
            shared by all sequences, and the result is (B*Lq, Hq, Dv).
        cu_seqlens_k: likewise; None: k and v are dense, (B, Lk, Hk, D).
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths; optional hints, never read off the device.

    >>> out = gdpa.attention_varlen(q, k, v, cu, cu, "silu", out_scale=1 / max_len, causal=True)
    """
    call = _varlen_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, params, max_seqlen_q, max_seqlen_k, scale, out_scale, causal,
        window, backend,
    )  # fmt: skip
    out = call.run()  # (1 or B, Hq, rows, Dv)
    return out.transpose(1, 2).flatten(0, 1)


def explain(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> str:
    """Which backend would run this call, and why each other one would not: takes the arguments of attention() or,
    with cu_seqlens, of attention_varlen().

    >>> print(gdpa.explain(q, k, v, "silu", causal=True))
    """
    varlen = (
        "cu_seqlens_q" in kwargs
        or "cu_seqlens_k" in kwargs
        or (args and (args[0] is None or isinstance(args[0], Tensor)))
    )
    return (_explain_varlen if varlen else _explain_dense)(q, k, v, *args, **kwargs)


def _explain_dense(
    q: Tensor, k: Tensor, v: Tensor, activation: ActivationLike = "gelu", *, params: Any = (), scale: Any = None,
    out_scale: Any = 1.0, causal: Any = False, window: Any = None, backend: Any = None,
) -> str:  # fmt: skip
    return _dense_call(q, k, v, activation, params, scale, out_scale, causal, window, backend).explain()


def _explain_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, activation: ActivationLike = "gelu", *,
    params: Any = (), max_seqlen_q: Any = None, max_seqlen_k: Any = None, scale: Any = None, out_scale: Any = 1.0,
    causal: Any = False, window: Any = None, backend: Any = None,
) -> str:  # fmt: skip
    call = _varlen_call(
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, params, max_seqlen_q, max_seqlen_k, scale, out_scale, causal,
        window, backend,
    )  # fmt: skip
    return call.explain()


class _Call:
    """A checked call in the internal layout, ready to run or to be explained."""

    def __init__(
        self, x: Operands, activation: Any, params: Any, scale: Any, out_scale: Any, causal: Any, window: Any,
        max_q: int | None, max_k: int | None, backend: Any,
    ) -> None:  # fmt: skip
        checks.operands(x)
        heads = x.q.shape[1]
        stacked = checks.params(params, x.q, heads)
        self.x = Operands(x.q, x.k, x.v, x.cu_q, x.cu_k, stacked)
        self.keys = _keys(activation, len(params), heads)
        self.scale = 1.0 / math.sqrt(x.q.shape[3]) if scale is None else checks.number("scale", scale)
        self.out_scale = checks.number("out_scale", out_scale)
        self.left, self.right = checks.band(causal, window)
        self.max_q, self.max_k = max_q, max_k
        if backend is not None and backend not in backends.BACKENDS:
            raise ValueError(f"backend={backend!r} is unknown; known backends: {', '.join(backends.BACKENDS)}")
        self.backend = backend

    def run(self) -> Tensor:
        """(out_batch, Hq, rows_q, Dv)."""
        x = self.x
        if self.backend == "reference":  # plain torch, so that autograd can differentiate it twice
            problem = self.problem()
            checks.offsets(problem, x)
            return reference.attention(problem, x)
        return torch.ops.gdpa.attention(
            x.q, x.k, x.v, x.cu_q, x.cu_k, x.params, self.keys, self.scale, self.out_scale, self.left, self.right,
            self.max_q, self.max_k, self.backend,
        )  # fmt: skip

    def problem(self) -> Any:
        return make_problem(
            self.x,
            from_keys(self.keys),
            self.scale,
            self.out_scale,
            Band(self.left, self.right),
            self.max_q,
            self.max_k,
        )

    def explain(self) -> str:
        return backends.explain(self.problem(), self.backend)


def _keys(activation: Any, n_params: int, heads: int) -> list[str]:
    """The keys of the functions' graphs. torch.compile takes them as constants of the compiled code."""
    if isinstance(activation, Activation):  # the common case, without tracing or look-up
        if activation.n_params != n_params:
            raise ValueError(
                f"params has {n_params} entries, but activation {activation.name!r} takes {activation.n_params}"
            )
        return [activation.key]
    return list(_resolve_keys(activation, n_params, heads))


@torch.compiler.assume_constant_result
def _resolve_keys(activation: Any, n_params: int, heads: int) -> tuple[str, ...]:
    return tuple(act.key for act in resolve(activation, n_params, heads))


def _dense_call(
    q: Any,
    k: Any,
    v: Any,
    activation: Any,
    params: Any,
    scale: Any,
    out_scale: Any,
    causal: Any,
    window: Any,
    backend: Any,
) -> _Call:
    if is_jagged(k) != is_jagged(v):
        raise TypeError("k and v must both be jagged nested tensors, or neither")
    cu_q, cu_k = offsets_of("q", q), offsets_of("k", k)
    if is_jagged(v):
        offsets_of("v", v)
        if k.shape[2] != v.shape[2]:
            raise ValueError(
                "k and v must share their offsets: build both with nested_tensor_from_jagged(values, offsets)"
            )
    layout = "(B, H, L, D)"
    sides = {}
    for name, t in (("q", q), ("k", k), ("v", v)):
        t = rows_of(t) if is_jagged(t) else t
        checks.tensor(name, t, 4, layout)
        sides[name] = t
    x = Operands(*autocast(sides["q"], sides["k"], sides["v"]), cu_q, cu_k)
    _check_batches(x, "q", "k")
    return _Call(x, activation, params, scale, out_scale, causal, window, None, None, backend)


def _varlen_call(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, activation: Any, params: Any, max_q: Any, max_k: Any, scale: Any,
    out_scale: Any, causal: Any, window: Any, backend: Any,
) -> _Call:  # fmt: skip
    checks.tensor("q", q, 3, "(rows, heads, D)")
    for name, t in (("k", k), ("v", v)):
        if cu_k is None:
            checks.tensor(name, t, 4, "(B, Lk, heads, D) when cu_seqlens_k is None")
        else:
            checks.tensor(name, t, 3, "(rows, heads, D)")
    if cu_q is None and cu_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k are both None: use gdpa.attention for dense tensors")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None:
            checks.cu_seqlens(name, cu, q)
    max_q, max_k = checks.max_seqlen("max_seqlen_q", max_q), checks.max_seqlen("max_seqlen_k", max_k)
    q, k, v = autocast(q, k, v)
    q4 = q.transpose(0, 1)[None]
    k4, v4 = (
        (k.transpose(1, 2), v.transpose(1, 2)) if cu_k is None else (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    )
    x = Operands(q4, k4, v4, cu_q, cu_k)
    _check_batches(x, "cu_seqlens_q", "cu_seqlens_k")
    return _Call(x, activation, params, scale, out_scale, causal, window, max_q, max_k, backend)


def _check_batches(x: Operands, name_q: str, name_k: str) -> None:
    """Both sides speak of the same number of sequences; dense queries may also be one block for all."""
    n_q = x.cu_q.shape[0] - 1 if x.cu_q is not None else x.q.shape[0]
    n_k = x.cu_k.shape[0] - 1 if x.cu_k is not None else x.k.shape[0]
    shared = x.cu_q is None and x.q.shape[0] == 1
    if n_q != n_k and not shared:
        raise ValueError(f"{name_q} and {name_k} disagree on the number of sequences: {n_q} and {n_k}")


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast, cast as F.scaled_dot_product_attention is cast: to the region's dtype, float64 excepted."""
    device = q.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)
