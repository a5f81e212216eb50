"""Refuse bad arguments by name and value, before anything runs.

All but ``offsets`` look at shapes, types and numbers and are traced by torch.compile. ``offsets`` looks at the data of
cu_seqlens and runs inside the operator: always on the CPU, on a GPU only under GDPA_CHECK=1, since there it must wait
for the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gdpa.arguments.integers import as_int, is_int
from gdpa.compat import forward_mode
from gdpa.functions.places.names import TableKind
from gdpa.masks.mask import kinds_of
from gdpa.problem import Operands, Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What shapes and numbers are while torch.compile or torch.export leaves them open.
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
NO_FORWARD_MODE = (
    "gdpa: forward-mode differentiation (jvp, jacfwd, hessian) is not available on fused backends; "
    "call with backend='reference'"
)
_variables: Any = getattr(os.environ, "_data", os.environ)  # what is below it, with names as the system has them
_CHECK: Any = "GDPA_CHECK" if _variables is os.environ else os.environ.encodekey("GDPA_CHECK")
FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_LENGTH = 2**31  # lengths and band bounds are 32-bit integers in the kernels


def tensor(name: str, t: Any, ndim: int, layout: str) -> None:
    """``t`` is a dense floating point tensor of ``ndim`` dimensions with a contiguous last one."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.is_nested:
        raise TypeError(
            f"{name} is a nested tensor; pass it to gdpa.attention: attention_varlen takes packed rows and offsets"
        )
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, but its layout is {t.layout}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}")
    if t.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(t.shape)}")
    if t.shape[-1] == 0:
        raise ValueError(f"{name} has head dimension 0: shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tuple(t.stride())}: use {name}.contiguous()"
        )


def operands(x: Operands, name_q: str, name_k: str) -> None:
    """q, k, v in the internal layout (see problem.py) fit each other. The names are those of the arguments that tell
    how many sequences there are."""
    q, k, v = x.q, x.k, x.v
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have the same dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on the same device, got {q.device}, {k.device} and {v.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and length: k is {tuple(k.shape)}, v is {tuple(v.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same head dimension: q has {q.shape[3]}, k has {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q's heads ({q.shape[1]}) must be a multiple of k's heads ({k.shape[1]})")
    n_q = q.shape[0] if x.cu_q is None else x.cu_q.shape[0] - 1
    n_k = k.shape[0] if x.cu_k is None else x.cu_k.shape[0] - 1
    shared = x.cu_q is None and q.shape[0] == 1
    if not shared and n_q != n_k:  # in this order: comparing 1 with B would hold an exported program to B != 1
        raise ValueError(f"{name_q} and {name_k} disagree on the number of sequences: {n_q} and {n_k}")


def cu_seqlens(name: str, cu: Any, rows: Tensor, rows_name: str = "q", optional: bool = True) -> None:
    """Offsets are int32 or int64, one-dimensional, of B+1 >= 1 entries, on the device of ``rows``. Their data: see
    ``offsets``."""
    _integers(name, cu, rows, rows_name, optional)
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} must have shape (B+1,), got {tuple(cu.shape)}")
    _contiguous(name, cu)


def seqused(x: Operands) -> None:
    """Used lengths are int32 or int64, one per sequence, on q's device. Their data: see ``offsets``."""
    n_seqs = (x.cu_q if x.cu_k is None else x.cu_k).shape[0] - 1  # type: ignore[union-attr]  # one of them is given
    for name, used in (("seqused_q", x.used_q), ("seqused_k", x.used_k)):
        if used is None:
            continue
        _integers(name, used, x.q, "q")
        if used.shape != (n_seqs,):
            raise ValueError(f"{name} must have one length per sequence, shape ({n_seqs},), got {tuple(used.shape)}")
        _contiguous(name, used)
    if x.used_q is not None and x.cu_q is None:
        raise ValueError(
            "seqused_q was given without cu_seqlens_q: queries shared by all sequences have a single length"
        )


def _integers(name: str, t: Any, rows: Tensor, rows_name: str, optional: bool = True) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor{' or None' if optional else ''}, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {t.dtype}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, but its layout is {t.layout}")
    if t.device != rows.device:
        raise ValueError(f"{name} must be on {rows_name}'s device ({rows.device}), but it is on {t.device}")


def _contiguous(name: str, t: Tensor) -> None:
    if t.shape[0] > 1 and t.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, but its stride is {t.stride(0)}")


def max_seqlen(name: str, value: Any, cu: Tensor | None, rows: int) -> int | None:
    """An upper bound on the lengths; a side without offsets has ``rows`` rows in every sequence."""
    if value is None:
        return None
    longest = as_int(value)
    if not is_int(longest):
        sync = "; a tensor would need a device sync" if isinstance(value, Tensor) else ""
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}{sync}")
    if not 0 <= longest < MAX_LENGTH:
        raise ValueError(f"{name} must lie in [0, 2^31), got {longest}")
    if cu is None and longest < rows:
        raise ValueError(f"{name}={longest} is less than the length of every sequence ({rows})")
    return longest


def number(name: str, value: Any, dtype: torch.dtype = torch.float64) -> float:
    """A finite Python number (a tensor would mean a device synchronisation); finite in float32 for inputs of any other
    ``dtype`` than float64, as their scores are computed in that."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}; pass tensors through params")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value}")
    if dtype != torch.float64 and not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise ValueError(f"{name} must be finite in float32, which scores of {dtype} are computed in; got {value}")
    return value * 1.0  # type: ignore[operator,return-value]  # unlike float(), it leaves a symbolic number symbolic


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def band(causal: Any, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of the band that ``causal`` and ``window`` describe together."""
    flag("causal", causal)
    pair = bounds(window)
    left, right = (None, None) if pair is None else pair
    return left, 0 if causal else right  # causal narrows a wider window


def bounds(window: Any) -> tuple[int | None, int | None] | None:
    """(left, right) of a window."""
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be None or a pair (left, right), got {window!r}")
    return _bound("left", window[0]), _bound("right", window[1])


def _bound(side: str, value: Any) -> int | None:
    if value is None:
        return None
    found = as_int(value)
    if not is_int(found):
        raise TypeError(f"window's {side} bound must be an int or None, got {value!r}")
    if not 0 <= found < MAX_LENGTH:
        more = "; mask=gdpa.masks.window(left, right) takes negative bounds" if found < 0 else ""
        raise ValueError(f"window's {side} bound must lie in [0, 2^31), got {found} (None means unbounded{more})")
    return found


def params(values: Any, q: Tensor, heads: int) -> Tensor | None:
    """The params as one (n_params, Hq) tensor in float32 (float64 for float64 inputs), None if there are none."""
    if isinstance(values, Tensor):
        raise TypeError("params must be a tuple or list of tensors, got one tensor; write params=(x,)")
    if not isinstance(values, tuple | list):
        raise TypeError(f"params must be a tuple or list of tensors, got {type(values).__name__}")
    for i, p in enumerate(values):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"params[{i}] must be a tensor, got {type(p).__name__}; write plain numbers into the function"
            )
        if p.dtype not in DTYPES:
            raise TypeError(f"params[{i}] must be float16, bfloat16, float32 or float64, got {p.dtype}")
        if p.layout != torch.strided or p.is_nested:
            raise TypeError(f"params[{i}] must be a dense tensor, but its layout is {p.layout}")
        if p.shape != () and p.shape != (heads,):
            raise ValueError(
                f"params[{i}] must have shape () or ({heads},), one value per query head; got {tuple(p.shape)}"
            )
        if p.device != q.device:
            raise ValueError(f"params[{i}] must be on q's device ({q.device}), but it is on {p.device}")
    return stacked(values, q, heads) if values else None


def stacked(values: Sequence[Tensor], q: Tensor, heads: int) -> Tensor:
    """Checked params as one tensor."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.stack([p.to(wide).expand(heads) for p in values])


def size_of_table(name: str, t: Tensor) -> None:
    """Refuse a table whose entries have no number of 32 bits. (A symbolic size would get a bound by the comparison, and
    torch.export refuse a Dim that has none: the operator compares when the size is known.)"""
    size = t.numel()
    if not isinstance(size, torch.SymInt) and size >= MAX_LENGTH:
        raise ValueError(f"{name} must have fewer than 2^31 entries, but its shape is {tuple(t.shape)}")


def tables(values: Any, q: Tensor, name: str = "tables") -> tuple[list[Tensor], tuple[TableKind, ...]]:
    """Tables as kernels take them, contiguous and floats as wide as params, and their kinds."""
    kinds = kinds_of(values, name)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    found = []
    for i, t in enumerate(values):
        if t.device != q.device:
            raise ValueError(f"{name}[{i}] must be on q's device ({q.device}), but it is on {t.device}")
        size_of_table(f"{name}[{i}]", t)
        found.append((t.to(wide) if t.is_floating_point() else t).contiguous())
    return found, kinds


def no_forward_mode(x: Operands, *grads: Tensor | None) -> None:
    """The operators have no forward-mode derivative; PyTorch would drop the tangents and go on with zeros."""
    if not forward_mode():
        return
    for t in (x.q, x.k, x.v, x.params, x.sink, *x.tables, *grads):
        if t is not None and t.is_floating_point() and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE)


def looks_at_offsets(problem: Problem) -> bool:
    """On a GPU that would wait for it: there only where somebody has asked for checks."""
    return problem.device.type == "cpu" or asked()


def asked() -> bool:
    """Whether GDPA_CHECK is 1. Asked at every call: os.environ would take 2 us to find that it is not set."""
    return _variables.get(_CHECK) in ("1", b"1")


def offsets(problem: Problem, x: Operands) -> None:
    """The data of cu_seqlens: starts at 0, never decreases, ends within the rows. The data of seqused: from 0 to the
    rows of each sequence. Lengths are within max_seqlen."""
    if not looks_at_offsets(problem):
        return
    for side, cu, used, rows, longest in (
        ("q", x.cu_q, x.used_q, problem.rows_q, problem.max_q),
        ("k", x.cu_k, x.used_k, problem.rows_k, problem.max_k),
    ):
        lengths = None if cu is None else lengths_between(f"cu_seqlens_{side}", cu, rows)
        if used is not None:
            lengths = _used(f"seqused_{side}", used, rows if lengths is None else lengths)
        if cu is not None and lengths is not None and longest is not None and lengths.numel():
            found = int(lengths.max())
            if found > longest:
                raise ValueError(f"max_seqlen_{side}={longest} is less than the longest sequence ({found})")


def own_offsets(name: str, cu: Any, rows: Tensor, rows_name: str) -> None:
    """As ``cu_seqlens`` and ``offsets``, of offsets that may reach no attention; nothing while a program is traced."""
    if torch.compiler.is_compiling():
        return
    cu_seqlens(name, cu, rows, rows_name, optional=False)
    if type(cu) is Tensor and (cu.device.type == "cpu" or asked()):  # tensors of other types may hold no data
        lengths_between(name, cu, rows.shape[0])


def lengths_between(name: str, cu: Tensor, rows: int) -> Tensor:
    """The lengths between good offsets."""
    cu = cu.detach().long().cpu()
    first, last = int(cu[0]), int(cu[-1])
    if first != 0:
        raise ValueError(f"{name} must start at 0, but it starts at {first}")
    lengths = cu.diff()
    if bool((lengths < 0).any()):
        i = int((lengths < 0).nonzero()[0])
        raise ValueError(f"{name} must not decrease: entry {i + 1} is {int(cu[i + 1])} after {int(cu[i])}")
    if last > rows:
        raise ValueError(f"{name} must not end after the last of the {rows} rows, but it ends at {last}")
    return lengths


def _used(name: str, used: Tensor, slots: Tensor | int) -> Tensor:
    """Good used lengths, of sequences that have as many rows as ``slots`` says."""
    used = used.detach().long().cpu()
    bad = (used < 0) | (used > slots)
    if bool(bad.any()):
        b = int(bad.nonzero()[0])
        slot = slots if isinstance(slots, int) else int(slots[b])
        raise ValueError(
            f"{name} must lie between 0 and the number of rows of each sequence: got {int(used[b])} of {slot} for b={b}"
        )
    return used
