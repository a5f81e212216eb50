"""What the tests share: which backends run here, a plain PyTorch implementation, and when a result is good enough.

A result passes if its error against float64 is at most 2 times (gradients: 3 times) that of plain PyTorch in the same
precision. Both are computed here by ``naive``, which shares no code with the library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from gdpa.testing.cases import SMALL_CASES, Case, Inputs, call, dense, make_inputs

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
FULL = os.environ.get("GDPA_FULL_GRID", "0") == "1"  # every case; else those that can fail for different reasons
SIMULATE = os.environ.get("GDPA_SIMULATE", "0") == "1"  # Hopper's kernels, by the machine of simulator/
GPU = torch.cuda.is_available()
HOPPER = GPU and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
CASES = {case.name: case for case in SMALL_CASES}
# What older versions of Dynamo cannot do, or do wrong without gdpa too.
NEW = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
takes_modules = pytest.mark.skipif(not NEW, reason="before 2.13 Dynamo takes no module for a constant: an error")
guards_defaults = pytest.mark.skipif(not NEW, reason="before 2.13 Dynamo does not guard a function's defaults")
T = TypeVar("T")


def in_turn(options: Sequence[T], index: int) -> Sequence[T]:
    """Which of ``options`` the ``index``-th case of a test meets: one, cases taking turns; in the full grid all."""
    return options if FULL else (options[index % len(options)],)


# Small enough for Triton's interpreter, whose tiles have 16 rows and columns.
TINY = dense("tiny", 1, 10, 18, heads=2, d=16)
TINY_PACKED = Case("tiny-packed", (5, 0, 17), (9, 4, 3), heads=2, d=8, packed_q=True, packed_k=True)
TINY_WINDOW = Case(
    "tiny-window", (9, 0, 5), (3, 7, 18), heads=3, heads_k=1, d=8, packed_q=True, packed_k=True, window=(6, None)
)
TINY_SHARED = dense("tiny-shared", 3, 5, 18, heads=2, d=8, shared=True)
TINY_SHARED_PACKED = Case(
    "tiny-shared-packed", (5,) * 3, (0, 18, 4), heads=2, heads_k=1, d=8, packed_k=True, shared=True
)
TINY_CASES = [TINY, TINY_PACKED, TINY_WINDOW, TINY_SHARED, TINY_SHARED_PACKED]

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Target:
    """A backend with the precision and the device it is tested on."""

    backend: str
    dtype: torch.dtype

    @property
    def device(self) -> str:
        return "cuda" if self.backend in ("triton", "hopper") and not (INTERPRET or SIMULATE) else "cpu"

    def __repr__(self) -> str:
        return f"{self.backend}-{str(self.dtype).removeprefix('torch.')}"


ALL = ("reference", "cpu", "triton", "hopper")


def targets(*dtypes: torch.dtype, backends: Sequence[str] = ALL, interpret: Sequence[torch.dtype] = ()) -> list[Any]:
    """Parameters for pytest: each backend in each dtype. The slow interpreter may be given fewer of them with
    ``interpret``; it never gets bfloat16, which it computes wrongly. Hopper's kernels compute 16 bits only: in tests of
    float32 alone they run in bfloat16."""
    narrow = tuple(d for d in dtypes if d in (f16, bf16)) or (bf16,)
    found = []
    for backend in backends:
        for dtype in narrow if backend == "hopper" else dtypes:
            if backend == "triton" and INTERPRET and (dtype == bf16 or (interpret and dtype not in interpret)):
                continue
            marks = [getattr(pytest.mark, backend)] if backend in ("triton", "hopper") else []
            found.append(pytest.param(Target(backend, dtype), marks=marks, id=repr(Target(backend, dtype))))
    return found


def on_targets(
    cases: Sequence[Any], *dtypes: torch.dtype, backends: Sequence[str] = ALL, interpret: Sequence[torch.dtype] = ()
) -> list[Any]:
    """Parameters for pytest: each case, which has a name, on each target; on backends of the CPU dtypes take turns."""
    return [
        pytest.param(case, *target.values, marks=target.marks, id=f"{case.name}-{target.id}")
        for i, case in enumerate(cases)
        for target in targets(*dtypes, backends=backends, interpret=interpret)
        if target.marks or target.values[0].dtype in in_turn(dtypes, i)
    ]


# For tests that only make sense on a GPU.
on_each_gpu_backend = pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=pytest.mark.hopper)])


@contextmanager
def skipping_refusals(target: Target) -> Iterator[None]:
    """Skip the test where Hopper's backend says that it does not support the problem; triton runs it then."""
    try:
        yield
    except gdpa.UnsupportedProblemError as refused:
        if target.backend != "hopper":
            raise
        pytest.skip(str(refused))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As those set it who build a model in 16 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- plain PyTorch ---------------------------------------------------------------------------------------------------
def keep_mask(case: Case, len_q: int, len_k: int) -> Tensor:
    """(len_q, len_k) of bool."""
    left, right = case.window or (None, None)
    return _keep_mask(left, 0 if case.causal else right, len_q, len_k)


@cache
def _keep_mask(left: int | None, right: int | None, len_q: int, len_k: int) -> Tensor:
    """Pair by pair from the definition."""

    def kept(i: int, j: int) -> bool:
        distance = j - i - (len_k - len_q)
        return (left is None or distance >= -left) and (right is None or distance <= right)

    rows = [[kept(i, j) for j in range(len_k)] for i in range(len_q)]
    return torch.tensor(rows, dtype=torch.bool).reshape(len_q, len_k)


def naive(
    case: Case,
    x: Inputs,
    fn: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
    params: Sequence[Tensor] = (),
    scale: float | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """The definition as one would write it in PyTorch, everything in the dtype of the inputs, on the CPU.

    ``fn`` is one Python function or one per query head. The result has the shape of gdpa's.
    """
    scale = 1 / math.sqrt(case.d) if scale is None else scale
    group = case.heads // (case.heads_k or case.heads)
    outputs = []
    for b, (len_q, len_k) in enumerate(zip(case.len_q, case.len_k, strict=True)):
        q = _sequence(x.q, case, b, case.len_q, case.packed_q, case.shared)  # (H, Lq, D)
        k = _sequence(x.k, case, b, case.len_k, case.packed_k).repeat_interleave(group, dim=0)
        v = _sequence(x.v, case, b, case.len_k, case.packed_k).repeat_interleave(group, dim=0)
        s = (q @ k.mT) * scale
        p = _apply(fn, s, [a.to(s.dtype).expand(case.heads).view(-1, 1, 1) for a in params]).to(s.dtype)
        p = torch.where(keep_mask(case, len_q, len_k), p, torch.zeros_like(p))
        outputs.append((p @ v) * out_scale)
    if not case.varlen:
        return torch.stack(outputs)
    return torch.cat([o.transpose(0, 1) for o in outputs])


def _sequence(t: Tensor, case: Case, b: int, lengths: Sequence[int], packed: bool, shared: bool = False) -> Tensor:
    """(heads, length, D) of sequence b."""
    if packed:
        start = sum(lengths[:b])
        return t[start : start + lengths[b]].transpose(0, 1)
    if not case.varlen:
        return t[0 if shared else b]
    return t.transpose(0, 1) if shared else t[b].transpose(0, 1)


def _apply(fn: Any, s: Tensor, params: list[Tensor]) -> Tensor:
    if callable(fn):
        return fn(s.clone(), *params).expand_as(s)
    heads = [f(s[h : h + 1].clone(), *(a[h : h + 1] for a in params)).expand_as(s[:1]) for h, f in enumerate(fn)]
    return torch.cat(heads)


# ---- results and their comparison ------------------------------------------------------------------------------------
Results = dict[str, Tensor]


def gradients(out: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, params: Sequence[Tensor] = ()) -> Results:
    """out and the gradients of all inputs, by name, on the CPU."""
    inputs = {"dq": q, "dk": k, "dv": v, **{f"dparam{i}": p for i, p in enumerate(params)}}
    grads: Sequence[Tensor] = [torch.zeros_like(t) for t in inputs.values()]
    if out.requires_grad:
        grads = torch.autograd.grad(out, list(inputs.values()), do, allow_unused=True, materialize_grads=True)
    return {"out": out.detach().cpu(), **{name: g.cpu() for name, g in zip(inputs, grads, strict=True)}}


def on(device: str, x: Inputs) -> Inputs:
    """The same data as fresh leaves on ``device``."""
    q, k, v = (t.detach().to(device).requires_grad_() for t in x.leaves)
    cu_q, cu_k = (None if cu is None else cu.to(device) for cu in (x.cu_q, x.cu_k))
    return Inputs(q, k, v, cu_q, cu_k)


def output_gradient(case: Case, seed: int = 0) -> Tensor:
    """A random gradient for the output of ``case``."""
    shape = (case.heads, case.dv or case.d)
    rows = sum(case.len_q)
    full = (rows, *shape) if case.varlen else (len(case.len_q), case.heads, case.len_q[0], shape[1])
    return torch.randn(full, generator=torch.Generator().manual_seed(seed + 1))


def run_naive(
    case: Case, x: Inputs, dtype: torch.dtype, fn: Any, params: Sequence[Tensor], do: Tensor, **kwargs: Any
) -> Results:
    """``naive`` and its gradients with everything converted to ``dtype``."""
    x = x.to(dtype)
    leaves = tuple(p.detach().to(dtype).requires_grad_() for p in params)
    return gradients(naive(case, x, fn, leaves, **kwargs), do.to(dtype), *x.leaves, leaves)


def run_gdpa(
    case: Case, x: Inputs, target: Target, activation: Any, params: Sequence[Tensor], do: Tensor, **kwargs: Any
) -> Results:
    """gdpa's output and gradients on ``target``."""
    x = on(target.device, x.to(target.dtype))
    leaves = tuple(p.detach().to(target.device).requires_grad_() for p in params)
    with skipping_refusals(target):
        out = call(case, x, activation, params=leaves, backend=target.backend, **kwargs)
    assert out.dtype == target.dtype
    return gradients(out, do.to(target.device, target.dtype), *x.leaves, leaves)


# What an output may differ by in any case, relative to its largest entry: some float32 rounding; half a unit of float16
# and bfloat16, since the exact result must be rounded too.
FLOOR = {f64: 1e-12, f32: 3e-6, f16: 2**-11, bf16: 2**-9}


def problems(got: Results, plain: Results, exact: Results, dtype: torch.dtype, rounding: float = 0.0) -> list[str]:
    """What is wrong with ``got``, in words. Nothing, if its errors are within 2 (gradients: 3) times ``plain``'s.

    ``rounding``: a relative error that the function itself brings along, because it computes in 16 bits.
    """
    found = []
    for name, want in exact.items():
        have, factor = got[name].double(), 2.0 if name == "out" else 3.0
        if have.shape != want.shape:
            found.append(f"{name}: shape {tuple(have.shape)} instead of {tuple(want.shape)}")
            continue
        if want.numel() == 0:
            continue
        largest = float(want.abs().max())
        for norm, measure in (("largest", lambda e: e.abs().max()), ("rms", lambda e: e.square().mean().sqrt())):
            # Where plain PyTorch overflows (exp in float16) it gives no licence.
            error, usual = measure(have - want), measure((plain[name].double() - want).nan_to_num(0.0, 0.0, 0.0))
            allowed = max(factor * float(usual), max(FLOOR[dtype], rounding) * (largest + 1e-30))
            if not error <= allowed:  # also if it is NaN
                found.append(f"{name}: {norm} error {error:.3g}, allowed {allowed:.3g} (values to {largest:.3g})")
    return found


def check(
    case: Case,
    target: Target,
    fn: Any,
    activation: Any = None,
    params: Sequence[Tensor] = (),
    spread: float = 2.5,
    rounding: float = 0.0,
    seed: int = 0,
    **kwargs: Any,
) -> None:
    """Compare gdpa on ``target`` with float64 and with plain PyTorch, on random inputs: output and all gradients."""
    activation = fn if activation is None else activation
    found = compare(case, target, fn, activation, params, spread, rounding, seed, **kwargs)
    assert not found, f"{case.name} on {target!r}: " + "; ".join(found)


def compare(
    case: Case, target: Target, fn: Any, activation: Any, params: Sequence[Tensor], spread: float = 2.5,
    rounding: float = 0.0, seed: int = 0, **kwargs: Any,
) -> list[str]:  # fmt: skip
    """``check``, with what is wrong as its result."""
    x = make_inputs(case, target.dtype, "cpu", seed, spread)
    do = output_gradient(case, seed).to(target.dtype)
    exact = run_naive(case, x, f64, fn, params, do, **kwargs)
    plain = run_naive(case, x, target.dtype, fn, params, do, **kwargs)
    got = run_gdpa(case, x, target, activation, params, do, **kwargs)
    return problems(got, plain, exact, target.dtype, rounding)


# ---- backends without the API ----------------------------------------------------------------------------------------
def operands(case: Case, x: Inputs, params: Sequence[Tensor] = ()) -> Operands:
    """The internal layout of a case's tensors, as api.py makes it (problem.py describes it)."""

    def rows(t: Tensor) -> Tensor:
        if not case.varlen:
            return t.detach()
        return t.detach().transpose(1, 2) if t.dim() == 4 else t.detach().transpose(0, 1)[None]

    stacked = torch.stack([p.detach().expand(case.heads) for p in params]) if params else None
    return Operands(rows(x.q), rows(x.k), rows(x.v), x.cu_q, x.cu_k, stacked)


def problem_of(case: Case, x: Operands, activation: Any, scale: float | None = None, out_scale: float = 1.0) -> Problem:
    act = resolve_one(activation, 0 if x.params is None else len(x.params))
    scale = 1 / math.sqrt(case.d) if scale is None else scale
    return make_problem(x, (act,), scale, out_scale, Band(*case.band))


def poisoned(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype, device=like.device)
