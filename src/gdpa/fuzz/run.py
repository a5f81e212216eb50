"""Draw, run, judge, until something is wrong, the time is up, or a call does not come back."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import gdpa
from gdpa.errors import UnsupportedProblemError
from gdpa.exactness import results
from gdpa.exactness.draw import Tensors
from gdpa.fuzz import compare, draw, exact
from gdpa.fuzz.compare import Finding
from gdpa.fuzz.draw import Call
from gdpa.fuzz.outcomes import Outcome, Plan, Report, Target
from gdpa.fuzz.report import describe
from gdpa.fuzz.tensors import make_tensors
from gdpa.testing import cases

HANG_STATUS = 3
STDERR = 2  # the file descriptor: whatever sys.stderr has been replaced by cannot be waited for
GRACE_S = 10.0  # for the watchdog that can speak, before the one that can only dump a traceback


# ---- one call --------------------------------------------------------------------------------------------------------
def run_call(call: Call, target: Target) -> Outcome:
    """Forward and backward of one call, and what is wrong with them."""
    x = make_tensors(call, target.device)
    try:
        backend = chosen(call, x, target)
    except UnsupportedProblemError as e:
        return Outcome(call, skipped=str(e).splitlines()[0])
    try:
        got = execute(call, x, target)
        again = execute(call, x, target) if call.repeat else None
        dirty = execute(call, make_tensors(call, target.device, poisoned=True), target) if call.poison else None
        if target.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as e:  # whatever a kernel or its compiler throws: that is what we are looking for
        return Outcome(call, backend, (Finding("crash", f"{type(e).__name__}: {e}\n{traceback.format_exc()}"),))
    truth, rounding = exact.attention(call, x)
    plain, definition = results.plain(call.formula, x), results.definition(call.formula, x)
    verdict = compare.judge(call, got, plain, definition, truth, rounding)
    found = list(verdict.findings)
    if again is not None:
        found += compare.differences(call.case, got, again)
    if dirty is not None and call.poison is not None:
        victim, keeps_order = call.poison[0], call.config.deterministic
        found += compare.leaks(call.case, got, dirty, victim, rounding, keeps_order)
    return Outcome(call, backend, tuple(found), verdict.ratios)


def chosen(call: Call, x: Tensors, target: Target) -> str:
    """The name of the backend that runs the call; raises UnsupportedProblemError."""
    offsets = (x.x.cu_q, x.x.cu_k) if call.case.varlen else ()
    words = gdpa.explain(*x.x.leaves, *offsets, call.f.activation(call.case.heads), **_settings(call, x, target))
    name = words.splitlines()[0].removeprefix("backend: ")
    if name in gdpa.backends.BACKENDS:
        return name
    reasons = [line.strip() for line in words.splitlines() if line.startswith(f"  {target.backend or ''}")]
    raise UnsupportedProblemError(reasons[0] if reasons else words)


def _settings(call: Call, x: Tensors, target: Target) -> dict[str, Any]:
    c = call.config
    hints = {"max_seqlen_q": call.max_q, "max_seqlen_k": call.max_k} if call.case.varlen else {}
    return {
        "params": x.params, "scale": call.scale, "out_scale": call.out_scale, "causal": call.case.causal,
        "window": call.case.window, "backend": target.backend, "tables": x.tables, "sink": x.sink,
        "mask": None if c.masked is None else c.masked.make(*x.mask_tables),
        "normalize": _normalize(call), "return_weights_sum": c.sums != "not returned", **hints, **x.x.used,
    }  # fmt: skip


def _normalize(call: Call) -> str | list[str | None] | None:
    """As the API takes it. The name "softmax" says how it is divided; a list beside it must say the same."""
    found = call.config.normalize
    if isinstance(found, tuple):
        return ["sum" if norm == "softmax" else norm for norm in call.formula.norms]
    return None if found == "softmax" else found


def execute(call: Call, x: Tensors, target: Target) -> results.Results:
    """gdpa's results, by rows. What it allocates has held NaN before: an element that is never written shows."""
    with deterministic(call.config.deterministic):
        poison_allocator(x)
        activation = call.f.activation(call.case.heads)
        out = cases.call(call.case, x.x, activation, **_settings(call, x, target))
        poison_allocator(x)
        return results.gathered(call.case, x, out)


def poison_allocator(x: Tensors) -> None:
    """Allocate what the call will allocate, fill it with NaN and free it, for the allocator to hand out again."""
    sizes = [x.do.shape, x.do.shape[:-1], *(t.shape for t in (*x.x.leaves, *x.tables))]
    blocks = [torch.full(size, torch.nan, dtype=x.do.dtype, device=x.do.device) for size in sizes]
    blocks += [torch.full(size, torch.nan, dtype=torch.float32, device=x.do.device) for size in sizes]
    del blocks


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


# ---- many calls ------------------------------------------------------------------------------------------------------
def fuzz(
    plan: Plan,
    tick: Callable[[float, str], None] = lambda share, label: None,
    failed: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Run calls; ``tick`` is told how far it is, from 0 to 1, ``failed`` each failure at once. Ends at the first one
    unless the plan keeps going."""
    report, start = Report(), time.monotonic()
    while (share := plan.progress(report.calls, time.monotonic() - start)) < 1:
        seed = plan.seed + report.calls
        tick(share, f"seed {seed}, {len(report.failures)} failures")
        report.add(watched(draw.draw(seed, plan.target.space), plan))
        if report.failures and report.failures[-1].call.seed == seed:
            failed(report.failures[-1])
            report.lost = device_state(plan.target.device)
            if report.lost or not plan.keep_going:
                break
    return report


def device_state(device: torch.device) -> str | None:
    """None if the device still answers: after an illegal access nothing runs on it until the process ends."""
    if device.type == "cuda":
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError as e:
            return f"this process has lost the device: {e}"
    return None


def watched(call: Call, plan: Plan) -> Outcome:
    """``run_call``, or the end of the process if it takes longer than the limit.

    A timer says which call it was. Where that thread cannot run, because the call holds Python's lock, a traceback is
    all there is: so the call runs in code whose file name is the command that repeats it.
    """
    repeat = plan.target.command(call.seed)
    timer = threading.Timer(plan.limit_s, _give_up, (call, plan))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(plan.limit_s + GRACE_S, exit=True, file=STDERR)
    try:
        scope: dict[str, object] = {"run": lambda: run_call(call, plan.target)}
        exec(compile("outcome = run()", f"<{repeat}>", "exec"), scope)
        outcome = scope["outcome"]
        assert isinstance(outcome, Outcome)
        return outcome
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _give_up(call: Call, plan: Plan) -> None:
    """From another thread: say which call it is, where it stands, and end. sys.exit() would wait for it."""
    repeat = f"{plan.target.command(call.seed)} --limit {plan.limit_s:g}"
    os.write(STDERR, f"HANG: no result after {plan.limit_s:g} s\n{describe(call)}\nreproduce: {repeat}\n".encode())
    faulthandler.dump_traceback(file=STDERR)
    os._exit(HANG_STATUS)
