"""attention() and attention_varlen(): check, convert to the one internal layout, call the operator."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gdpa import backends, numerics, ops
from gdpa.arguments import checks
from gdpa.arguments.nested import is_jagged, pack_like, same_lengths, unpack
from gdpa.arguments.normalizing import functions_and_norms, sink_of
from gdpa.calling import direct
from gdpa.compat import is_traceable_wrapper_subclass, jit_records, make_fx_records
from gdpa.foreign import points_the_way
from gdpa.functions.activation import Activation, keep_for_programs, key_in_program, resolve_one
from gdpa.functions.mask import keep_mask_for_programs, mask_from_key, mask_key_in_program
from gdpa.functions.modules import Lifted, has_parameters, lift
from gdpa.functions.places.names import TableKind
from gdpa.functions.tracing.guards import guard_what_it_reads
from gdpa.functions.tracing.pending import told_of_pending
from gdpa.masks.mask import Mask, as_mask
from gdpa.numerics import autocast
from gdpa.ops import normalized as ops_normalized
from gdpa.ops.transforms import inside_transforms
from gdpa.problem import PLAIN, Operands, Settings

ActivationLike = str | Callable[..., Tensor] | Activation | Sequence[Any]
MaskLike = Mask | Callable[..., Tensor] | None
NormalizeLike = str | Sequence[str | None] | None


@points_the_way
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    window: tuple[int | None, int | None] | None = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """Attention with any function in place of softmax.

        o_i = out_scale * sum_j p_ij v_j,    p_ij = f(scale * <q_i, k_j>; params)

    q (B, Hq, Lq, D), k (B, Hk, Lk, D), v (B, Hk, Lk, Dv) -> (B, Hq, Lq, Dv), as in F.scaled_dot_product_attention; Hq
    is a multiple of Hk. q may have batch 1 (queries shared by the batch). Each may be a jagged nested tensor.

    Args:
        activation: a built-in's name, a function f(s, *params) of element-wise torch operations, a gdpa.Activation,
            or a list of those, one per query head. An nn.Module's parameters are further params. A function may also
            take *tables after the params, and positions by keyword (b, h, q_idx, kv_idx, q_len, kv_len, q_row, kv_row),
            or be a score mod of FlexAttention.
        params: tensors of shape () or (Hq,), differentiable.
        tables: tensors that the function indexes by positions (docs/positions.md); float ones are differentiable.
        mask: a gdpa.Mask, or a function of positions that returns bool; applied after f, with causal and window.
        normalize: "sum" divides o_i by sink + sum_j p_ij, "abs" by sink + sum_j |p_ij|; or a list, one per query head.
            A denominator of 0 gives zeros. activation="softmax" is "exp" with "sum" (docs/rowsums.md).
        sink: a number, or a tensor of shape () or (Hq,), differentiable.
        scale: factor of the scores, 1/sqrt(D) by default. ``out_scale``: factor of the output.
        causal, window: key j is kept iff -left <= j - i - (Lk - Lq) <= right; causal means right = 0. (The is_causal of
            F.scaled_dot_product_attention has no Lk - Lq.)
        backend: force "hopper", "triton", "cpu" or "reference"; None takes the best (``gdpa.explain`` says which).
        return_weights_sum: return (out, sums): the denominators, or their logarithms where f is exp of something, in
            float32, (B, Hq, Lq), differentiable; 1 for heads without normalisation.

    >>> out = gdpa.attention(q, k, v, lambda s: torch.relu(s) ** 2, out_scale=1 / 1024)
    """
    arguments = (scale, out_scale, causal, window, backend)
    given = (q, k, v, activation, params, tables, mask, normalize, sink, *arguments, return_weights_sum)
    if direct.nobody_watches():
        more = (tables, mask, normalize, sink, return_weights_sum)
        result = direct.call(
            direct.DENSE, q, k, v, None, None, None, None, activation, params, more, arguments, _dense_call, given
        )
        if result is not None:
            return result
    return _dense_call(*given).run_dense(lambda t: pack_like(t, given[0]) if is_jagged(given[0]) else t)


@points_the_way
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    window: tuple[int | None, int | None] | None = None,
    backend: str | None = None,
    return_weights_sum: bool = False,
) -> Any:
    """Attention over sequences packed end to end, with no padding; arguments not listed here are those of attention().

    q (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv) -> (Tq, Hq, Dv). Sequence b has rows cu_seqlens[b] to cu_seqlens[b+1].
    Rows after the last sequence (cu_seqlens[-1] < Tq: a batch of fixed capacity) and rows after seqused belong to no
    sequence: they are not read, and are zero in the output and the gradients.

    Args:
        cu_seqlens_q: B+1 offsets, int32 or int64, on the tensors' device; None: q (Lq, Hq, D) is one block of queries
            shared by all sequences, and the result is (B*Lq, Hq, Dv).
        cu_seqlens_k: likewise; None: k and v are dense, (B, Lk, Hk, D).
        max_seqlen_q, max_seqlen_k: upper bounds on the lengths, optional. They help to choose tiles and never change a
            result; one that is too small costs time, and is an error where cu_seqlens are checked.
        seqused_q, seqused_k: B lengths, int32 or int64, on the tensors' device; sequence b uses only that many rows,
            the first ones of those it has. seqused_q needs cu_seqlens_q; seqused_k goes with dense keys too.
        return_weights_sum: the sums are (Tq, Hq); rows of no sequence have 0.

    >>> out = gdpa.attention_varlen(q, k, v, cu, cu, "silu", out_scale=1 / max_len, causal=True)
    """
    arguments = (max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, scale, out_scale, causal, window, backend)
    given = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, activation, params, tables, mask, normalize, sink, *arguments,
        return_weights_sum,
    )  # fmt: skip
    if direct.nobody_watches():
        layout = direct.varlen(cu_seqlens_q is not None, cu_seqlens_k is not None)
        more = (tables, mask, normalize, sink, return_weights_sum)
        numbers = (max_seqlen_q, max_seqlen_k, scale, out_scale, causal, window, backend)
        result = direct.call(
            layout, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, activation, params, more, numbers,
            _varlen_call, given,
        )  # fmt: skip
        if result is not None:
            return result
    return _varlen_call(*given).run_varlen()


@points_the_way
def explain(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> str:
    """Which backend would run this call, and why the others would not. Takes the arguments of attention() or, with
    cu_seqlens, of attention_varlen().

    >>> print(gdpa.explain(q, k, v, "silu", causal=True))
    """
    offsets_given = len(args) > 1 or isinstance((*args, None)[0], Tensor)  # attention() has one more, a function
    varlen = offsets_given or "cu_seqlens_q" in kwargs or "cu_seqlens_k" in kwargs
    function, prepare = (attention_varlen, _varlen_call) if varlen else (attention, _dense_call)
    bound = inspect.signature(function).bind(q, k, v, *args, **kwargs)
    bound.apply_defaults()
    return prepare(**bound.arguments).explain()


@dataclass(frozen=True)
class Call:
    """A checked call in the internal layout, ready to run or to be explained. ``rows``: the one tensor that k and v,
    and q unless it stands by itself, are views of (see gdpa.problem.parts); None if they are separate tensors."""

    x: Operands
    settings: Settings
    rows: Tensor | None = None
    functions: tuple[Activation, ...] = ()  # alive until the operator has looked up their keys; none while compiling
    mask: Mask | None = None  # likewise
    with_sums: bool = False  # the caller wants the row sums too

    def run(self) -> tuple[Tensor, Tensor | None]:
        """(out_batch, Hq, rows_q, Dv), and the row sums (out_batch, Hq, rows_q) if anything is normalised."""
        x, settings = self.x, self.settings
        divided = is_traceable_wrapper_subclass(x.q)  # a DTensor
        compiling = torch.compiler.is_compiling()
        as_operator = (compiling and not inside_transforms()) or x.q.is_meta or divided
        if settings.backend == "reference" and not as_operator:
            # Plain torch, so that autograd can differentiate it in any mode and as often as asked.
            if compiling:
                _keep_for_programs(tuple(settings.activations), settings.mask)
            args = (x.q, x.k, x.v, *x.others, *settings.values)
            return ops_normalized.by_reference(x.sink, list(settings.normalize), *args)
        checks.no_forward_mode(x)
        if not compiling and make_fx_records():  # on fake tensors the operator does it
            _keep_for_programs(tuple(settings.activations), settings.mask)
        if compiling:
            keys = [_key_in_program(key) for key in settings.activations]
            mask_key = None if settings.mask is None else _mask_key_in_program(settings.mask)
            settings = replace(settings, activations=keys, mask=mask_key)
        together = self.rows is not None and not divided
        alone = x.q if together and self.rows.shape[2] == 2 else None  # type: ignore[union-attr]
        tensors = (alone, self.rows) if together else (x.q, x.k, x.v)
        args = (*tensors, *x.others, *settings.values)
        if settings.normalize:
            op = ops_normalized.normalized_packed if together else ops_normalized.normalized
            return op(x.sink, list(settings.normalize), *args)  # type: ignore[return-value]
        return (ops.attention_packed if together else ops.attention)(*args), None

    def run_dense(self, finish: Callable[[Tensor], Tensor]) -> Any:
        """Run, and return the output (out_batch, Hq, rows_q, Dv) as ``finish`` makes it of it; so the sums, if
        wanted."""
        out, sums = self.run()
        return (finish(out), finish(sums)) if self.with_sums and sums is not None else finish(out)

    def run_varlen(self) -> Any:
        """Run, and return the output with all sequences end to end, (rows, Hq, Dv); and the sums (rows, Hq), if
        wanted."""
        return self.run_dense(self._end_to_end)

    def _end_to_end(self, t: Tensor) -> Tensor:
        t = t.transpose(1, 2)  # (1 or B, rows, Hq, ...)
        if self.x.cu_q is None and is_traceable_wrapper_subclass(t):
            # A DTensor's shard may not have the strides it reports.
            t = t.clone(memory_format=torch.contiguous_format)
        return t.flatten(0, 1)

    def explain(self) -> str:
        problem = self.settings.problem(self.x)
        text = backends.explain(problem, self.settings.backend)
        if self.mask is None or problem.mask is not None:
            return text
        return f"{text}\nmask: {mask_from_key(self.mask.key).name}; a band, computed just as causal= and window= are"


def _dense_call(
    q: Any, k: Any, v: Any, activation: Any, params: Any, tables: Any, mask: Any, normalize: Any, sink: Any,
    scale: Any, out_scale: Any, causal: Any, window: Any, backend: Any, return_weights_sum: Any,
) -> Call:  # fmt: skip
    sides = (unpack("q", q), unpack("k", k), unpack("v", v))
    same_lengths(k, v)
    for name, side in zip("qkv", sides, strict=True):
        checks.tensor(name, side.t, 4, "(B, H, L, D)")
    rows_q, rows_k, rows_v = sides
    q4, k4, v4 = autocast(rows_q.t, rows_k.t, rows_v.t)
    x = Operands(q4, k4, v4, rows_q.cu, rows_k.cu)
    checks.operands(x, "q", "k")
    return make_call(
        x, activation, params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, max_q=rows_q.longest, max_k=rows_k.longest, backend=backend,
        return_weights_sum=return_weights_sum,
    )  # fmt: skip


def _varlen_call(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, activation: Any, params: Any, tables: Any, mask: Any,
    normalize: Any, sink: Any, max_seqlen_q: Any, max_seqlen_k: Any, seqused_q: Any, seqused_k: Any, scale: Any,
    out_scale: Any, causal: Any, window: Any, backend: Any, return_weights_sum: Any,
) -> Call:  # fmt: skip
    checks.tensor("q", q, 3, "(rows, heads, D)")
    dense_k = cu_seqlens_k is None
    for name, t in (("k", k), ("v", v)):
        if dense_k:
            checks.tensor(name, t, 4, "(B, Lk, heads, D) when cu_seqlens_k is None")
        else:
            checks.tensor(name, t, 3, "(rows, heads, D)")
    q, k, v = autocast(q, k, v)
    q4 = q.transpose(0, 1)[None]
    k4, v4 = [t.transpose(1, 2) if dense_k else t.transpose(0, 1)[None] for t in (k, v)]
    x = Operands(q4, k4, v4, cu_seqlens_q, cu_seqlens_k, None, seqused_q, seqused_k)
    max_q, max_k = sequences(x, max_seqlen_q, max_seqlen_k)
    return make_call(
        x, activation, params, tables=tables, mask=mask, normalize=normalize, sink=sink, scale=scale,
        out_scale=out_scale, causal=causal, window=window, max_q=max_q, max_k=max_k, backend=backend,
        return_weights_sum=return_weights_sum,
    )  # fmt: skip


def sequences(x: Operands, max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int | None, int | None]:
    """Check the offsets, lengths and hints of packed operands; returns the hints."""
    if x.cu_q is None and x.cu_k is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k are both None: use gdpa.attention for dense tensors")
    for name, cu in (("cu_seqlens_q", x.cu_q), ("cu_seqlens_k", x.cu_k)):
        if cu is not None:
            checks.cu_seqlens(name, cu, x.q)
    max_q = checks.max_seqlen("max_seqlen_q", max_seqlen_q, x.cu_q, x.q.shape[2])
    max_k = checks.max_seqlen("max_seqlen_k", max_seqlen_k, x.cu_k, x.k.shape[2])
    checks.operands(x, "cu_seqlens_q", "k" if x.cu_k is None else "cu_seqlens_k")
    checks.seqused(x)
    return max_q, max_k


def make_call(
    x: Operands, activation: Any, params: Any, *, tables: Any, mask: Any, normalize: Any, sink: Any, scale: Any,
    out_scale: Any, causal: Any, window: Any, max_q: int | None, max_k: int | None, backend: Any,
    return_weights_sum: Any, rows: Tensor | None = None,
) -> Call:  # fmt: skip
    """The Call of checked operands; checks all other arguments. (Each public form checks its own layout of tensors.)"""
    if not torch.compiler.is_compiling() and jit_records():
        raise NotImplementedError("torch.jit.trace cannot record functions; use torch.export or torch.compile")
    heads = x.q.shape[1]
    activation, params = lift(activation, params, heads)
    specs, norms = functions_and_norms(activation, normalize, heads)
    total = sink_of(sink, norms, activation, x.q)
    if total is not None:
        x = replace(x, sink=total)
    normalized = any(norm != PLAIN for norm in norms)
    checks.flag("return_weights_sum", return_weights_sum)
    if return_weights_sum and not normalized:
        raise ValueError("return_weights_sum=True needs normalize: without it nothing is divided by a sum")
    stacked = checks.params(params, x.q, heads)
    if stacked is not None:
        x = replace(x, params=stacked)
    own_tables, kinds = checks.tables(tables, x.q)
    own_mask = None if mask is None else as_mask(mask)
    if own_tables or own_mask is not None:
        mask_tables = [] if own_mask is None else checks.tables(own_mask.tables, x.q, "mask.tables")[0]
        x = replace(x, tables=[*own_tables, *mask_tables])
    left, right = checks.band(causal, window)
    backends.check_name(backend)
    keys, found = functions(specs, len(params), kinds, x.q)
    if len(set(zip(keys, norms, strict=True))) == 1:
        keys, norms = keys[:1], norms[:1]
    settings = Settings(
        keys,
        1.0 / math.sqrt(x.q.shape[3]) if scale is None else checks.number("scale", scale, x.q.dtype),
        checks.number("out_scale", out_scale, x.q.dtype),
        left,
        right,
        max_q,
        max_k,
        numerics.current(),
        backend,
        None if own_mask is None else own_mask.key,
        any(t.requires_grad for t in own_tables) and torch.is_grad_enabled(),
        norms if normalized else (),
    )
    return Call(x, settings, rows, tuple(found), own_mask, return_weights_sum)


def functions(
    specs: list[Any], n_params: int, tables: tuple[TableKind, ...], q: Tensor
) -> tuple[list[str], list[Activation]]:
    """The keys of the functions' graphs, and the functions."""
    if torch.compiler.is_compiling():
        return [_constant_key(one, n_params, tables, q) for one in specs], []
    found = [resolve_one(one, n_params, tables) for one in specs]
    return [one.key for one in found], found


def _constant_key(activation: Any, n_params: int, tables: tuple[TableKind, ...], q: Tensor) -> str:
    """The key of one function's graph, which torch.compile takes as a constant of the compiled code."""
    if isinstance(activation, Activation):
        if activation.n_params != n_params or activation.tables != tables:
            return resolve_one(activation, n_params, tables).key  # which refuses it
        return activation.key
    key = _resolve_key(activation, n_params, tables)
    if not isinstance(activation, str):
        own = len(list(activation.parameters())) if isinstance(activation, nn.Module) else 0
        guard_what_it_reads(activation, n_params - own, tables, q)
    return key


def _resolve_key(activation: Any, n_params: int, tables: tuple[TableKind, ...]) -> str:
    if has_parameters(activation):
        activation = Lifted(activation, n_params - len(list(activation.parameters())))
    with told_of_pending():
        return resolve_one(activation, n_params, tables).key


def _keep_for_programs(keys: tuple[str, ...], mask: str | None) -> bool:
    keep_for_programs(keys)
    keep_mask_for_programs(mask)
    return True


def _key_in_program(key: str) -> str:
    """Only exported programs leave this process; is_exporting(), asked by Dynamo, may say so of compiled ones."""
    return key_in_program(key) if torch.compiler.is_exporting() else key


def _mask_key_in_program(key: str) -> str:
    return mask_key_in_program(key) if torch.compiler.is_exporting() else key


# torch.compiler.assume_constant_result does just this, but imports Dynamo for it, which takes most of a second.
_resolve_key._dynamo_marked_constant = True  # type: ignore[attr-defined]
_keep_for_programs._dynamo_marked_constant = True  # type: ignore[attr-defined]
_key_in_program._dynamo_marked_constant = True  # type: ignore[attr-defined]
_mask_key_in_program._dynamo_marked_constant = True  # type: ignore[attr-defined]
