"""Compiling ahead: the kernels of a call without the call, several at a time.

Kernels are compiled from what a launch would be given, but on meta tensors, which have a shape, strides and no memory:
nothing runs on the device, and nothing is allocated there. Triton's compiler lets go of the interpreter for most of its
work, so threads help: the backward of a new function is compiled beside its forward.
"""

from __future__ import annotations

import ast
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gdpa import numerics, ops
from gdpa.arguments import checks
from gdpa.backends import Backend, check_name, interpreting, select
from gdpa.backends.triton.compiled import order
from gdpa.backends.triton.compiled.ahead import compiling
from gdpa.calling.layouts import packed
from gdpa.functions.activation import Activation, from_name
from gdpa.functions.activation import activation as traced
from gdpa.masks.band import Band
from gdpa.problem import Divided, Operands, Problem, make_problem, sums_dtype

AT_ONCE = 4  # compilers; each is busy with one thread and 200 MB


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and the seconds it took: about 0.1 if it was found on disk."""

    name: str
    seconds: float


@dataclass(frozen=True)
class WarmUp:
    """What :func:`gdpa.warm_up` did; ``str()`` of it is a report."""

    activation: str
    seconds: float
    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.activation}: {len(self.kernels)} kernels in {self.seconds:.1f} s"
        return "\n".join([head, *(f"  {k.name}: {k.seconds:.1f} s" for k in self.kernels), *self.notes])


def warm_up(
    activation: str | Callable[..., Tensor] | Activation,
    *,
    shapes: Sequence[tuple[int, int, int, int]] = ((8, 8, 1024, 128),),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    varlen: Sequence[bool] = (False, True),
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    backward: bool = True,
    device: torch.device | str | int | None = None,
    backend: str | None = None,
) -> WarmUp:
    """Compile the kernels of a function before its first call, all at once; returns what it did, as a report.

    Nothing runs on the GPU. A call finds its kernels compiled if it agrees in dtype, head dimension, band and in what
    the tile sizes follow from (roughly the lengths); compiled kernels also stay on disk, for later processes.

    Args:
        activation: as in :func:`gdpa.attention`, one function. Its params are those arguments that have no default.
        shapes: (B, H, L, D), of q, k and v.
        varlen: which forms: dense tensors (False), packed sequences (True).
        causal, window, scale, backend: as in :func:`gdpa.attention`.
        backward: whether gradients will be asked for.
        device: as torch.device takes it, an index included; the current GPU by default.

    >>> print(gdpa.warm_up(lambda s: torch.relu(s) ** 2, shapes=[(32, 8, 512, 64)], dtypes=[torch.bfloat16]))
    """
    start = time.perf_counter()
    act = _resolve(activation)
    if act.tables:
        raise ValueError(f"activation {act.name!r} takes tables; such kernels are only compiled by a call")
    place = _place(device)
    _check_kinds(shapes, dtypes, varlen)
    checks.flag("backward", backward)
    check_name(backend)
    band = Band(*checks.band(causal, window))
    jobs: list[tuple[Any, ...]] = []
    notes: list[str] = []
    for shape, dtype, is_packed in product(shapes, dtypes, varlen):
        x = _operands(shape, dtype, is_packed, act.n_params)
        own_scale = 1.0 / math.sqrt(shape[3]) if scale is None else checks.number("scale", scale, dtype)
        problem = make_problem(x, (act,), own_scale, 1.0, band, precision=numerics.current())
        problem = replace(problem, device=place)
        chosen = select(problem, backend)
        if not compiles(chosen):
            notes.append(f"  {dtype} {shape}: the {chosen.name} backend compiles nothing")
            continue
        jobs.append((compile_forward, problem, chosen, x))
        if backward:
            jobs.append((compile_backward, problem, chosen, x))
    parse_one_at_a_time()
    with ThreadPoolExecutor(AT_ONCE, "gdpa-compile") as pool:
        futures = [pool.submit(compile_pass, *job) for compile_pass, *job in jobs]
        kernels = [kernel for future in futures for kernel in future.result()]
    return WarmUp(act.name, time.perf_counter() - start, tuple(kernels), tuple(dict.fromkeys(notes)))


def compiles(backend: Backend) -> bool:
    """Whether Triton compiles its kernels."""
    return backend.name in ("hopper", "triton") and not interpreting()


def _resolve(activation: Any) -> Activation:
    if isinstance(activation, list | tuple):
        raise TypeError(f"activation must be one function, got a {type(activation).__name__}: warm up each of them")
    if isinstance(activation, str):
        return from_name(activation)
    if not callable(activation):
        from gdpa.functions.tracing.trace import check_callable

        check_callable(activation, 0)  # which says so
    return traced(activation)


def _place(device: Any) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not isinstance(device, str | int | torch.device) or isinstance(device, bool):
        raise TypeError(f"device must be a torch.device, its name, its index or None, got {device!r}")
    try:
        place = torch.device(device)
    except (RuntimeError, ValueError) as error:  # the latter of an index beyond 64 bits
        raise ValueError(f"device={device!r} is unknown: {str(error).splitlines()[0]}") from error
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device={device!r} does not exist: torch sees {count} GPU{'s' * (count != 1)}")
    return place


def _check_kinds(shapes: Any, dtypes: Any, varlen: Any) -> None:
    """Each is a list of what a call may be."""
    for name, given, entry in (
        ("shapes", shapes, "(B, H, L, D)"), ("dtypes", dtypes, "torch.bfloat16"), ("varlen", varlen, "True")
    ):  # fmt: skip
        if not isinstance(given, list | tuple):
            raise TypeError(f"{name} must be a list, such as [{entry}], got {given!r}")
    for i, shape in enumerate(shapes):
        if not isinstance(shape, list | tuple) or len(shape) != 4 or not all(_is_size(n) for n in shape):
            raise ValueError(f"shapes[{i}] must be (B, H, L, D), four positive ints, got {shape!r}")
    for i, dtype in enumerate(dtypes):
        if dtype not in checks.DTYPES:
            raise TypeError(f"dtypes[{i}] must be torch.float16, bfloat16, float32 or float64, got {dtype!r}")
    for i, form in enumerate(varlen):
        checks.flag(f"varlen[{i}]", form)


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 < n < checks.MAX_LENGTH


def _operands(shape: tuple[int, ...], dtype: torch.dtype, is_packed: bool, n_params: int) -> Operands:
    batch, heads, length, d = shape
    params = torch.empty(n_params, heads, dtype=sums_dtype(dtype), device="meta") if n_params else None
    if not is_packed:
        q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(3))
        return Operands(q, k, v, params=params)
    q, k, v = (packed(torch.empty(batch * length, heads, d, dtype=dtype, device="meta")) for _ in range(3))
    cu = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    return Operands(q, k, v, cu, cu, params)


# ---- one pass --------------------------------------------------------------------------------------------------------
def without_memory(x: Operands) -> Operands:
    """The same tensors on the meta device; tensors that are one stay one."""
    made: dict[Any, Tensor] = {}

    def like(t: Any) -> Any:
        if t is None:
            return None
        shape, strides = t.shape, t.stride()
        key = (t.data_ptr(), shape, strides, t.dtype)
        if key not in made:
            made[key] = torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")
        return made[key]

    return Operands(
        like(x.q), like(x.k), like(x.v), like(x.cu_q), like(x.cu_k), like(x.params), like(x.used_q), like(x.used_k),
        [like(t) for t in x.tables], like(x.sink),
    )  # fmt: skip


def compile_forward(problem: Problem, backend: Backend, x: Operands) -> list[Kernel]:
    return _compile(problem, lambda: _forward(problem, backend, x))


def compile_backward(problem: Problem, backend: Backend, x: Operands) -> list[Kernel]:
    return _compile(problem, lambda: _backward(problem, backend, x))


def _forward(problem: Problem, backend: Backend, x: Operands) -> None:
    ops.write_output(problem, backend, x, ops.empty_output(x.q, x.v, problem.out_batch))


def _backward(problem: Problem, backend: Backend, x: Operands) -> None:
    grad = ops.empty_output(x.q, x.v, problem.out_batch)
    dq, dk, dv = map(_empty_like, (x.q, x.k, x.v))
    dparams = None if x.params is None else torch.empty_like(x.params)
    more: dict[str, Any] = {}
    if problem.norms:
        sums = torch.empty(grad.shape[:3], dtype=sums_dtype(problem.dtype), device=grad.device)
        more["sums"] = Divided(grad, sums, None, None if x.sink is None else torch.empty_like(x.sink))
    if problem.learn:
        more["dtables"] = ops.table_gradients(ops.empty_dtables(x, True), x.tables[: problem.n_tables])
    ops.run_backward(problem, x, backend, grad, dq, dk, dv, dparams, **more)


def _empty_like(t: Tensor) -> Tensor:
    """torch.empty_like, which for tensors without memory is Python and imports sympy: half a second."""
    dense = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1 and stride != dense:
            return torch.empty_like(t)
        dense *= size
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _compile(problem: Problem, launches: Callable[[], None]) -> list[Kernel]:
    """Compile what ``launches`` would launch."""
    on_device: Callable[[], AbstractContextManager[Any]] = nullcontext
    if problem.device.type == "cuda":
        on_device = partial(torch.cuda.device, problem.device)
    with torch.no_grad(), on_device(), compiling(on_device) as compiled:
        launches()
    return [Kernel(name, seconds) for name, seconds in compiled]


@cache
def parse_one_at_a_time() -> None:
    """Triton parses source as it compiles. Two threads that call ast.parse at once get a SystemError from Python 3.11
    and 3.12 before 3.11.8 and 3.12.2 (github.com/python/cpython/issues/106905): there it waits its turn from now on."""
    if not ((3, 11) <= sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)):
        return
    lock, parse = threading.RLock(), ast.parse

    @wraps(parse)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return parse(*args, **kwargs)

    ast.parse = in_turn


# ---- the backward beside the forward ---------------------------------------------------------------------------------
@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "gdpa-compile")


def start_backward(problem: Problem, backend: Backend, x: Operands) -> Future[Any] | None:
    """Begin to compile the backward of a call whose forward is about to run, in another thread. Not while a CUDA graph
    is captured, which another thread's calls could break; nor where PyTorch computes a part of it (see
    reference.add_table_gradients)."""
    if not compiles(backend) or (x.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    if problem.learn and torch.are_deterministic_algorithms_enabled():
        return None
    parse_one_at_a_time()
    return _background().submit(_compile_first, order.expect(), problem, backend, without_memory(x))


def _compile_first(ticket: object, problem: Problem, backend: Backend, x: Operands) -> list[Kernel]:
    with order.first(ticket):
        return compile_backward(problem, backend, x)
