"""`gdpa bench --host`: what a repeated eager call costs the host, in microseconds, beside SDPA and FlexAttention.

The problems are so small that a GPU is done before the host has made the next call, so the time between calls is the
host's. Nothing is waited for inside a measurement. In every round all contenders have their turn, so that a load that
comes and goes meets all of them. Without a GPU the computation is in the time as well: the figures
then only tell that the command runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa.bench import machine, noise
from gdpa.bench.results import FORMAT
from gdpa.bench.timing import summarise
from gdpa.calling import direct

KIND = "host"
CASES = {"b2-h4-l128-d64": (2, 4, 128, 64), "b8-h4-l256-d64": (8, 4, 256, 64)}  # batch, heads, length, head dimension
TINY = {"b1-h1-l16-d8": (1, 1, 16, 8)}  # where there is no GPU
CALLS = 50  # between two looks at the clock; a GPU's queue takes a thousand
ROUNDS = 40
LENGTHS = 61  # different batches of packed sequences, one after the other


@dataclass(frozen=True)
class Prepared:
    """One contender: a call, and the same with gradients."""

    call: Callable[[], Tensor]
    both: Callable[[], Any]


def run(device: torch.device, quick: bool = False, step: Callable[[str], None] = lambda label: None) -> dict[str, Any]:
    """Measure every contender on every case; the document to store."""
    rounds, others = 5 if quick or device.type == "cpu" else ROUNDS, noise.Others()
    cases = cases_on(device)
    records, skipped = [], []
    for case, shape in cases.items():
        ready: dict[str, Prepared] = {}
        for name, prepare in CONTENDERS.items():
            step(f"{case} {name}")
            try:
                ready[name] = prepare(shape, device)
                _repeat(ready[name].call, rounds)
                _repeat(ready[name].both, rounds)
            except Exception as e:  # FlexAttention needs a compiler, which not every machine has
                if name.startswith("gdpa"):
                    raise
                ready.pop(name, None)
                skipped.append({"case": case, "contender": name, "reason": f"{type(e).__name__}: {e}".splitlines()[0]})
        step(f"{case}: all in turn")
        forward = in_turns({name: p.call for name, p in ready.items()}, device, rounds)
        both = in_turns({name: p.both for name, p in ready.items()}, device, rounds)
        for name in ready:
            figures = {**_figures("forward", forward[name]), **_figures("both", both[name])}
            records.append({"case": case, "contender": name, **figures})
    found = {"format": FORMAT, "kind": KIND, **machine.describe(device), "records": records, "skipped": skipped}
    found["parts"] = {case: parts(shape, device, rounds) for case, shape in cases.items()}
    return {**found, "load": others.load()}


def steps(device: torch.device) -> int:
    return len(cases_on(device)) * (len(CONTENDERS) + 1)


def cases_on(device: torch.device) -> dict[str, tuple[int, int, int, int]]:
    return CASES if device.type == "cuda" else TINY


def _repeat(call: Callable[[], Any], rounds: int) -> None:
    """Before a measurement: compile whatever there is to compile."""
    for _ in range(LENGTHS if rounds > 5 else 3):
        call()


def in_turns(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each, round by round; in every round all of them, in an order that changes."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            names = list(calls)
            for name in names[turn % len(names) :] + names[: turn % len(names)] if names else []:
                found[name].append(_per_call(calls[name], device))
    finally:
        gc.enable()
    _wait(device)
    return found


def _per_call(call: Callable[[], Any], device: torch.device) -> float:
    calls = CALLS if device.type == "cuda" else 5
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def _figures(what: str, rounds: list[float]) -> dict[str, float]:
    """The median, and the 20th and 80th percentiles."""
    found = summarise(rounds)
    return {
        f"{what}_us": round(found.median_ms, 1),
        f"{what}_p20_us": round(found.p20_ms, 1),
        f"{what}_p80_us": round(found.p80_ms, 1),
    }


def microseconds(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median over rounds of the time per call, after some that compile whatever there is to compile."""
    _repeat(call, rounds)
    return round(statistics.median(in_turns({"": call}, device, rounds)[""]), 1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- contenders ------------------------------------------------------------------------------------------------------
def _inputs(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]


def _prepared(attend: Callable[..., Tensor], batches: list[tuple[list[Tensor], tuple[Any, ...]]]) -> Prepared:
    """``attend(q, k, v, *others)`` with the next of ``batches`` at every call."""
    made = []
    for inputs, others in batches:
        leaves = [t.detach().requires_grad_() for t in inputs]
        made.append((inputs, leaves, torch.randn_like(attend(*inputs, *others)), others))
    turns = cycle(made)

    def call() -> Tensor:
        inputs, _, _, others = next(turns)
        return attend(*inputs, *others)

    def both() -> tuple[Tensor, ...]:
        _, leaves, grad, others = next(turns)
        return torch.autograd.grad(attend(*leaves, *others), leaves, grad)

    return Prepared(call, both)


def _dense(attend: Callable[..., Tensor]) -> Callable[[tuple[int, ...], torch.device], Prepared]:
    return lambda shape, device: _prepared(attend, [(_inputs(shape, device), ())])


def _varlen(shape: tuple[int, ...], device: torch.device) -> Prepared:
    """As many sequences, of other lengths and another number of rows at every call."""
    batch, heads, length, d = shape
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(LENGTHS):
        ends = torch.randint(1, length + 1, (batch,), generator=generator).cumsum(0)
        cu = torch.cat([ends.new_zeros(1), ends]).int()
        batches.append((_inputs((int(cu[-1]), heads, d), device), (cu.to(device),)))
    return _prepared(lambda q, k, v, cu: gdpa.attention_varlen(q, k, v, cu, cu), batches)


def _lambda(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gdpa.attention(q, k, v, lambda s: torch.relu(s) ** 2)


def _flex(shape: tuple[int, ...], device: torch.device) -> Prepared:
    from torch.nn.attention.flex_attention import flex_attention

    if device.type != "cuda":
        raise ValueError("FlexAttention is only measured on a GPU: compiling it takes most of a minute")

    compiled = torch.compile(flex_attention, fullgraph=True)
    return _dense(lambda q, k, v: compiled(q, k, v, score_mod=_soft_cap))(shape, device)


def _soft_cap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


CONTENDERS: dict[str, Callable[[tuple[int, ...], torch.device], Prepared]] = {
    "gdpa": _dense(gdpa.attention),
    "gdpa-lambda": _dense(_lambda),
    "gdpa-varlen": _varlen,
    "gdpa-softmax": _dense(lambda q, k, v: gdpa.attention(q, k, v, "softmax")),
    "sdpa": _dense(F.scaled_dot_product_attention),
    "flex": _flex,
}


# ---- parts -----------------------------------------------------------------------------------------------------------
def parts(shape: tuple[int, ...], device: torch.device, rounds: int) -> dict[str, float]:
    """Where the time of gdpa's forward goes: ``checks`` (is anybody watching, what are the arguments), ``plan`` (the
    function, the key and the look-up), ``buffers`` (views, the output), ``launch`` (all that the backend does), and
    ``dispatch``, what autograd adds where a gradient is wanted."""
    q, k, v = _inputs(shape, device)
    one, two, three = (t.detach().requires_grad_() for t in (q, k, v))
    gdpa.attention(q, k, v)
    with mock.patch.object(direct, "run", return_value=q) as run:
        gdpa.attention(q, k, v)
    plan = run.call_args.args[0]
    x = plan.operands(plan.problem, (q, k, v), None, None, None, None, None, (), None)
    out = gdpa.attention(q, k, v)
    quick, rows = plan.quick_passes(plan.fixed).forward, plan.fixed

    def run_backend() -> None:
        if quick is None or not quick(*rows, *plan.layout.addresses(q, k, v), out, *[None] * 7, ()):
            plan.backend.forward(plan.problem, x, out)

    def checks() -> None:
        direct.nobody_watches()
        plan.layout.marks(q, k, v)

    def call() -> None:
        gdpa.attention(q, k, v)

    whole = microseconds(call, device, rounds)
    launch = microseconds(run_backend, device, rounds)
    checked = microseconds(checks, device, rounds)
    with mock.patch.object(direct, "run", _stub):
        before = microseconds(call, device, rounds)
    recorded = microseconds(lambda: gdpa.attention(one, two, three), device, rounds)
    found_parts = {
        "checks": checked, "plan": before - checked, "buffers": whole - before - launch, "launch": launch,
        "dispatch": recorded - whole,
    }  # fmt: skip
    return {name: round(us, 1) for name, us in found_parts.items()}


def _stub(plan: Any, where: Any, q: Tensor, *others: Any) -> Tensor:
    return q


# ---- report ----------------------------------------------------------------------------------------------------------
def markdown(document: dict[str, Any]) -> str:
    """One row per case and contender, and SDPA's time beside it. ~ marks what says nothing, since the spread exceeds
    the difference; results of earlier versions have no spread."""
    sdpa = {r["case"]: r for r in document["records"] if r["contender"] == "sdpa"}
    head = "| case | contender | forward, us | of SDPA's | forward and backward, us | of SDPA's |"
    lines = [head, "|---|---|--:|--:|--:|--:|"]
    for r in document["records"]:
        beside = sdpa.get(r["case"])
        ratios = [_share(r, beside, what) if beside else "" for what in ("forward", "both")]
        times = f"{_time(r, 'forward')} | {ratios[0]} | {_time(r, 'both')} | {ratios[1]}"
        lines.append(f"| {r['case']} | {r['contender']} | {times} |")
    return "\n".join(lines)


def _time(record: dict[str, Any], what: str) -> str:
    """12.3 (11.9–12.8)."""
    median = f"{record[f'{what}_us']:.1f}"
    if f"{what}_p20_us" not in record:
        return median
    return f"{median} ({record[f'{what}_p20_us']:.1f}–{record[f'{what}_p80_us']:.1f})"


def _share(record: dict[str, Any], beside: dict[str, Any], what: str) -> str:
    doubt = "~" if record is not beside and _uncertain(record, beside, what) else ""
    return f"{doubt}{record[f'{what}_us'] / beside[f'{what}_us']:.2f}"


def _uncertain(one: dict[str, Any], other: dict[str, Any], what: str) -> bool:
    if f"{what}_p20_us" not in one or f"{what}_p20_us" not in other:
        return False
    first, second = (
        {"median_ms": r[f"{what}_us"], "p20_ms": r[f"{what}_p20_us"], "p80_ms": r[f"{what}_p80_us"]}
        for r in (one, other)
    )
    return noise.uncertain(first, second)


def doubts(document: dict[str, Any]) -> list[str]:
    """Warnings: a busy machine, and comparisons with SDPA that the spread exceeds."""
    sdpa = {r["case"]: r for r in document["records"] if r["contender"] == "sdpa"}
    found = [f"Warning: {noise.load_words(document)}"] if noise.busy(document) else []
    close = [
        f"{r['case']} {r['contender']}, {name}"
        for r in document["records"]
        for what, name in (("forward", "forward"), ("both", "forward and backward"))
        if r["contender"] != "sdpa" and r["case"] in sdpa and _uncertain(r, sdpa[r["case"]], what)
    ]
    if close:
        found.append(f"Warning: the spread from p20 to p80 exceeds the difference from SDPA: {'; '.join(close)}")
    return found


def parts_markdown(document: dict[str, Any]) -> str:
    names = list(next(iter(document["parts"].values())))
    lines = [f"| case | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for case, found in document["parts"].items():
        lines.append(f"| {case} | {' | '.join(f'{found[name]:.1f}' for name in names)} |")
    return "\n".join(lines)


def show(console: Any, document: dict[str, Any]) -> None:
    """On the terminal."""
    if document["gpu"] is None:
        console.print(
            "without a GPU these times include the computation: they are not the host's alone", style="yellow"
        )
    console.print(markdown(document), markup=False)
    console.print("gdpa's forward by part, us", markup=False)
    console.print(parts_markdown(document), markup=False)
    for line in doubts(document):
        console.print(line, style="yellow", markup=False)
    for entry in document["skipped"]:
        console.print(f"{entry['case']} {entry['contender']}: {entry['reason']}", style="dim", markup=False)
