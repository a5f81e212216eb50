"""Peak memory of a pass, beyond its inputs (q, k, v and, for a backward, the output's gradient).

On a GPU torch's allocator counts. On a CPU nothing in the process does: torch's profiler sees torch's own tensors but
not the scratch memory of the matrix library or of a C++ kernel. So the peak is that of the resident set, as the
system counts it, in a fresh process that does nothing else: `python -m gdpa.bench.kernels.memory` reads a request,
warms up on a tiny case (which loads code and traces the function), makes the inputs, and reports growth from there. Its
malloc is told to give freed memory back at once, so that nothing hides in memory kept from before.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.contenders.everybody import EXACT, Ours, contenders
from gdpa.bench.kernels.passes import PASSES
from gdpa.testing.cases import Case, make_inputs

Peaks = dict[str, int]  # bytes, by pass


def gpu_peaks(prepared: Prepared, device: torch.device, passes: tuple[str, ...] = PASSES) -> Peaks:
    """By torch's allocator, which also serves the kernels' own buffers."""

    def reset() -> None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    def peak() -> int:
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return _peaks(prepared, passes, lambda: torch.cuda.memory_allocated(device), reset, peak)


def _peaks(
    prepared: Prepared,
    passes: tuple[str, ...],
    current: Callable[[], int],
    reset: Callable[[], None],
    peak: Callable[[], int],
) -> Peaks:
    """Every pass starts from nothing but inputs; the backward's peak thus counts what the forward kept for it."""
    out = prepared.forward()
    grad = torch.randn_like(out)
    del out
    found = {}
    for which in passes:
        gc.collect()
        before = current()
        reset()
        out = prepared.forward()
        if which == "bwd":
            reset()
        if which != "fwd":
            grads = torch.autograd.grad(out, prepared.leaves, grad)
            del grads
        found[which] = max(peak() - before, 0)
        del out
    return found


@dataclass(frozen=True)
class Request:
    """What a fresh process measures: one contender on several cases."""

    cases: tuple[Case, ...]
    contender: str
    function: str
    params: tuple[float, ...]
    dtype: str
    passes: tuple[str, ...] = PASSES
    precision: str | None = None  # of a backend of gdpa, as its layout
    layout: str | None = None


def cpu_peaks(request: Request) -> list[Peaks] | None:
    """Peaks of every case of ``request``, None where the system cannot tell (Windows)."""
    if sys.platform == "win32":
        return None
    # The C library's malloc, and mimalloc, which torch brings for some processors.
    keep_nothing = {
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MIMALLOC_PURGE_DELAY": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "gdpa.bench.kernels.memory"],
        input=json.dumps(asdict(request)),
        env={**os.environ, **keep_nothing, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {request.contender} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answer(request: Request) -> list[Peaks]:
    from gdpa.bench.functions import benchmark_function

    function = benchmark_function(request.function, request.params)
    dtype = getattr(torch, request.dtype)
    (contender,) = contenders(torch.device("cpu"), dtype, (request.contender,))
    if isinstance(contender, Ours):
        contender = replace(contender, precision=request.precision or EXACT, layout=request.layout)

    def prepare(case: Case) -> Prepared:
        prepared = contender.prepare(case, make_inputs(case, dtype), function)
        if isinstance(prepared, str):
            raise RuntimeError(prepared)
        return prepared

    first = request.cases[0]
    tiny = replace(
        first, len_q=tuple(min(n, 8) for n in first.len_q[:2]), len_k=tuple(min(n, 8) for n in first.len_k[:2])
    )
    _peaks(prepare(tiny), PASSES, _resident, _reset_highest, _highest)
    answers = []
    for case in request.cases:
        answers.append(_peaks(prepare(case), request.passes, _resident, _reset_highest, _highest))
    return answers


def _resident() -> int:
    return _status("VmRSS") if sys.platform == "linux" else _highest()


def _highest() -> int:
    """The largest resident set since the start, or since _reset_highest().

    Linux's ru_maxrss will not do: a process inherits that of the one that started it.
    """
    if sys.platform == "linux":
        return _status("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, field
    return int(found.group(1)) * 1024


def _reset_highest() -> None:
    """Linux only. Elsewhere peaks are those since the start, which cases that grow make nearly the same."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def _read(sent: dict[str, Any]) -> Request:
    def tuples(record: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}

    return Request(**{**tuples(sent), "cases": tuple(Case(**tuples(case)) for case in sent["cases"])})


if __name__ == "__main__":
    print(json.dumps(_answer(_read(json.load(sys.stdin)))))
