"""Refuse bad arguments by name and value, before anything runs.

``operands`` and ``settings`` look at shapes, types and numbers and are traced by torch.compile; ``offsets`` looks at
the data of cu_seqlens and runs inside the operator: always on the CPU, on a GPU only under GDPA_CHECK=1, since there
it must wait for the device.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from gdpa.problem import Operands, Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def tensor(name: str, t: Any, ndim: int, layout: str) -> None:
    """``t`` is a dense floating point tensor of ``ndim`` dimensions with a contiguous last one."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, its layout is {t.layout}")
    if t.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {t.dtype}")
    if t.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(t.shape)}")
    if t.shape[-1] == 0:
        raise ValueError(f"{name} has head dimension 0: shape {tuple(t.shape)}")
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tuple(t.stride())}; call {name}.contiguous()"
        )


def same(what: str, q: Tensor, others: dict[str, Tensor]) -> None:
    """All tensors share q's dtype, or device."""
    for name, t in others.items():
        if getattr(t, what) != getattr(q, what):
            raise ValueError(f"q and {name} must have one {what}: q has {getattr(q, what)}, {name} {getattr(t, what)}")


def operands(x: Operands) -> None:
    """q, k, v in the internal layout fit each other (see problem.py)."""
    q, k, v = x.q, x.k, x.v
    same("dtype", q, {"k": k, "v": v})
    same("device", q, {"k": k, "v": v})
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, heads and length: k {tuple(k.shape)}, v {tuple(v.shape)}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one head dimension: q has {q.shape[3]}, k has {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q's heads ({q.shape[1]}) must be a multiple of k's heads ({k.shape[1]})")


def cu_seqlens(name: str, cu: Any, q: Tensor) -> None:
    """Offsets are int32 or int64, one-dimensional, of B+1 >= 1 entries, on q's device. Their data: see ``offsets``."""
    if not isinstance(cu, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(cu).__name__}")
    if cu.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu.dtype}")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} must have shape (B+1,), got {tuple(cu.shape)}")
    if cu.device != q.device:
        raise ValueError(f"{name} must be on q's device ({q.device}), it is on {cu.device}")
    if cu.shape[0] > 1 and cu.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, its stride is {cu.stride(0)}")


def number(name: str, value: Any) -> float:
    """A finite Python number (a tensor would mean a device synchronisation)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}; tensors can go through params")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def band(causal: Any, window: Any) -> tuple[int | None, int | None]:
    """(left, right) of the band that ``causal`` and ``window`` describe together."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window must be None or a pair (left, right), got {window!r}")
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"window's {side} bound must be an int or None, got {value!r}")
        if value is not None and not 0 <= value < 2**31:
            raise ValueError(f"window's {side} bound must lie in [0, 2^31), got {value} (None is unbounded)")
    left, right = window
    if causal:
        right = 0  # causal narrows a wider window
    return left, right


def max_seqlen(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}; a tensor would need a device sync")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value  # type: ignore[return-value]


def params(values: Any, q: Tensor, heads: int) -> Tensor | None:
    """The params as one (n_params, Hq) tensor in float32 (float64 for float64 inputs), None if there are none."""
    if isinstance(values, Tensor):
        raise TypeError("params must be a tuple or list of tensors, got one tensor; write params=(x,)")
    if not isinstance(values, tuple | list):
        raise TypeError(f"params must be a tuple or list of tensors, got {type(values).__name__}")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = []
    for i, p in enumerate(values):
        if not isinstance(p, Tensor):
            raise TypeError(
                f"params[{i}] must be a tensor, got {type(p).__name__}; plain numbers belong in the function"
            )
        if not p.is_floating_point():
            raise TypeError(f"params[{i}] must be floating point, got {p.dtype}")
        if p.shape != () and p.shape != (heads,):
            raise ValueError(
                f"params[{i}] must have shape () or ({heads},), one value per query head; got {tuple(p.shape)}"
            )
        if p.device != q.device:
            raise ValueError(f"params[{i}] must be on q's device ({q.device}), it is on {p.device}")
        rows.append(p.to(wide).expand(heads))
    return torch.stack(rows) if rows else None


def offsets(problem: Problem, x: Operands) -> None:
    """The data of cu_seqlens: starts at 0, never decreases, ends at the number of rows, within max_seqlen."""
    if problem.device.type != "cpu" and os.environ.get("GDPA_CHECK", "0") != "1":
        return
    sides = (
        ("cu_seqlens_q", x.cu_q, problem.rows_q, problem.max_q),
        ("cu_seqlens_k", x.cu_k, problem.rows_k, problem.max_k),
    )
    for name, cu, rows, longest in sides:
        if cu is None:
            continue
        values = cu.tolist()
        if values[0] != 0:
            raise ValueError(f"{name} must start at 0, it starts at {values[0]}")
        lengths = [b - a for a, b in zip(values, values[1:], strict=False)]
        if lengths and min(lengths) < 0:
            i = next(i for i, n in enumerate(lengths) if n < 0)
            raise ValueError(f"{name} must not decrease: entry {i + 1} is {values[i + 1]} after {values[i]}")
        if values[-1] != rows:
            raise ValueError(f"{name} must end at the number of rows ({rows}), it ends at {values[-1]}")
        if longest is not None and lengths and max(lengths) > longest:
            short = name.replace("cu_seqlens", "max_seqlen")
            raise ValueError(f"{short}={longest} is less than the longest sequence ({max(lengths)})")
