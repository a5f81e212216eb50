"""Measures every case on dense and jagged batches, one document for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gdpa.bench import machine, noise, turns
from gdpa.bench.contenders.contender import Prepared
from gdpa.bench.places import flex
from gdpa.bench.places.batches import CHECKED, CPU_SCALE, DENSE, GPU_SCALE, JAGGED, Batch, make_batch
from gdpa.bench.places.cases import CASES, Placed, is_mask
from gdpa.bench.results import FORMAT
from gdpa.bench.timing import QUICK, Effort, Timing

KIND = "positions"
GDPA, FLEX = "gdpa", "flex"
LAYOUTS = (DENSE, JAGGED)
OF_BACKWARD = 2.5  # times the products of the forward


def find(patterns: tuple[str, ...]) -> list[Placed]:
    """The cases that ``patterns`` (names or globs) ask for; all if there are none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CASES):
            raise ValueError(f"no case of --positions is called {pattern!r}; cases: {', '.join(CASES)}")
    return [case for name, case in CASES.items() if not patterns or any(fnmatchcase(name, p) for p in patterns)]


def steps(cases: list[Placed]) -> int:
    return len(LAYOUTS) * (len(cases) + 1)


def run(
    cases: list[Placed], device: torch.device, quick: bool, step: Callable[[str], None] = lambda label: None
) -> dict[str, Any]:
    """Errors case by case, then the times of all cases of a layout in turns."""
    gpu, others = device.type == "cuda", noise.Others()
    scale, dtype = (GPU_SCALE, torch.bfloat16) if gpu else (CPU_SCALE, torch.float32)
    records: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for layout in LAYOUTS:
        batch = make_batch(layout, scale, device, dtype)
        ready: list[tuple[dict[str, Any], Prepared]] = []
        for case in cases:
            step(f"{layout} {case.name}")
            names = {"case": case.name, "layout": layout}
            found = {"contender": GDPA, "flops": flops(case, batch), **errors(case, batch.first(CHECKED))}
            ready.append(({**names, **found}, ours(case, batch)))
            other = flex.prepare(case, batch, is_mask(case)) if gpu and layout == DENSE else None
            if isinstance(other, str):
                skipped.append({**names, "contender": FLEX, "reason": other})
            elif other is not None:
                ready.append(({**names, "contender": FLEX, "flops": flops(case, batch)}, other))
        step(f"{layout}: all in turns")
        records += timed(ready, device, QUICK if quick else Effort())
        del batch, ready
    return {
        "format": FORMAT, "kind": KIND, **machine.describe(device), "dtype": str(dtype).removeprefix("torch."),
        "scale": asdict(scale), "checked": CHECKED, "cases": {case.name: case.what for case in cases},
        "records": records, "skipped": skipped, "load": others.load(),
    }  # fmt: skip


def tables_of(case: Placed, batch: Batch, dtype: torch.dtype | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """All tables, in ``dtype`` where they are floats, and those of them that are learned."""
    tables = [t.to(dtype or t.dtype) if t.is_floating_point() else t for t in case.tables(batch)]
    learned = [] if case.fixed else [t.requires_grad_() for t in tables if t.is_floating_point()]
    return tables, learned


def ours(case: Placed, batch: Batch, dtype: torch.dtype | None = None, **more: Any) -> Prepared:
    (q, k, v), (tables, learned) = batch.leaves(dtype), tables_of(case, batch, dtype)
    arguments = {"tables": tuple(tables), **case.arguments(batch), **more}
    return Prepared(lambda: batch.attend(q, k, v, case.function, **arguments), (q, k, v, *learned))


def flops(case: Placed, batch: Batch) -> float:
    """Of the forward, of pairs that are visible."""
    return 4.0 * batch.heads * batch.q.shape[-1] * visible(case, batch)


def visible(case: Placed, batch: Batch) -> int:
    """Pairs of one head: the sum over all keys of 1."""
    if not is_mask(case):
        return batch.pairs
    q, k, v = (t[:, :1, ..., :8].float() for t in (batch.q, batch.k, batch.v))
    with torch.no_grad():
        counts = batch.attend(
            q, k, torch.ones_like(v), torch.ones_like, **case.arguments(batch), backend="reference"
        )  # nothing to compile
    return round(float(counts[..., 0].double().sum()))


def errors(case: Placed, batch: Batch) -> dict[str, float]:
    """RMS errors relative to the RMS of float64's result: of the output, and of the worst gradient of q, k and v, and
    of tables."""
    found, exact = (
        results(ours(case, batch, dtype, **more))
        for dtype, more in ((None, {}), (torch.float64, {"backend": "reference"}))
    )
    out, *grads = (
        float((a.double() - b).norm() / b.norm()) if b.norm() > 0 else 0.0 for a, b in zip(found, exact, strict=True)
    )
    assert all(map(math.isfinite, (out, *grads))), f"{case.name}: results are not finite"
    return {"error": out, "error_bwd": max(grads[:3]), **({"error_tables": max(grads[3:])} if grads[3:] else {})}


def results(prepared: Prepared) -> list[Tensor]:
    out = prepared.forward()
    g = torch.Generator().manual_seed(3)
    grad = torch.randn(out.shape, generator=g).to(out.device, torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, prepared.leaves, grad)]


def timed(ready: list[tuple[dict[str, Any], Prepared]], device: torch.device, effort: Effort) -> list[dict[str, Any]]:
    found = turns.time_passes([prepared for _, prepared in ready], device, effort)
    records = []
    for (names, _), timings in zip(ready, found, strict=True):
        if isinstance(timings, torch.OutOfMemoryError):
            raise timings
        records.append({**names, **figures(timings, names["flops"])})
    return records


def figures(timings: dict[str, Timing], flops: float) -> dict[str, float]:
    work = {"fwd": flops, "bwd": OF_BACKWARD * flops, "both": (1 + OF_BACKWARD) * flops}
    found: dict[str, float] = {}
    for which, timing in timings.items():
        found |= {f"{which}_{name}": value for name, value in asdict(timing).items()}
        found[f"{which}_tflops"] = work[which] / timing.median_ms / 1e9
    return found
