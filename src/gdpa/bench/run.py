"""The benchmark: cases x functions x contenders x passes, measured into one document that is written as JSON."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gdpa.bench import coverage, machine, memory, suite
from gdpa.bench.cases import Case, Inputs, make_inputs
from gdpa.bench.contender import Contender, Prepared
from gdpa.bench.contenders import contenders
from gdpa.bench.functions import benchmark_function
from gdpa.bench.measurements import Measurements, describe_case
from gdpa.bench.passes import PASSES, flops, pass_functions, results_bytes
from gdpa.bench.rates import measure_rates
from gdpa.bench.results import FORMAT
from gdpa.bench.timing import QUICK, Effort, Timing, time_ms
from gdpa.spec import Loaded

MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """What to measure. ``functions`` are those asked for on every case; if none are, coverage.py says which."""

    cases: tuple[Case, ...]
    functions: tuple[Loaded, ...]
    contenders: tuple[Contender, ...]
    device: torch.device
    dtype: torch.dtype
    effort: Effort
    quick: bool = False
    by_name: bool = False  # the contenders were named, so all of them run

    def jobs(self) -> list[Job]:
        return [job for case in self.cases for job in self.jobs_of(case)]

    def jobs_of(self, case: Case) -> list[Job]:
        """A contender of softmax runs once, whatever the functions are."""
        functions = self.functions or tuple(map(benchmark_function, coverage.functions(case.name, self.quick)))
        return [
            Job(case, contender, f, contender.function or f.name)
            for contender in self.contenders
            for f in (functions[:1] if contender.function else functions)
        ]


@dataclass(frozen=True)
class Job:
    """One contender on one case; ``computes`` is the name of the function it really computes."""

    case: Case
    contender: Contender
    function: Loaded
    computes: str

    def __str__(self) -> str:
        return f"{self.case.name} {self.computes} {self.contender.name}"


def make_plan(
    patterns: tuple[str, ...] = (),
    functions: tuple[Loaded, ...] = (),
    only: tuple[str, ...] = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
) -> Plan:
    """A plan with the defaults of this machine: its GPU in bfloat16 if it has one, else the CPU in float32."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device.type == "cpu"
    dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
    patterns = patterns or (suite.QUICK_NAMES if quick else tuple(suite.names(on_cpu)))
    cases = suite.find(patterns, suite.CPU_SCALE if on_cpu else suite.FULL_SCALE)
    found = tuple(contenders(device, dtype, only))
    return Plan(tuple(cases), functions, found, device, dtype, QUICK if quick else Effort(), quick, bool(only))


def run(
    plan: Plan,
    step: Callable[[str], None] = lambda label: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure everything; ``step`` is told what comes next, ``steps(plan)`` times in all.

    ``keep`` is given the document after every case, so that a run that is cut short has not been in vain.
    """
    started, done, found = time.monotonic(), 0, Measurements(head(plan), plan.dtype.itemsize, plan.cases)

    def read_rates(when: str) -> None:
        step(f"{'cuBLAS' if plan.device.type == 'cuda' else 'matrix product'} and copy rates ({when})")
        clocks = machine.clocks() if plan.device.type == "cuda" else None
        found.add_rates(when, measure_rates(plan.device, plan.dtype, plan.effort), clocks)

    read_rates("start")
    half = len(plan.jobs()) // 2
    with garbage_collected() as collect:
        for case in plan.cases:
            inputs = make_inputs(case, plan.dtype, plan.device)  # once: every contender gets the same tensors
            for job in plan.jobs_of(case):
                if done == half:
                    read_rates("middle")
                done += 1
                step(str(job))
                found.add(job.case.name, job.computes, job.contender.name, measure(job, plan, inputs))
            del inputs
            collect()
            keep(found.document(time.monotonic() - started))
    read_rates("end")
    return found.document(time.monotonic() - started)


@contextmanager
def garbage_collected() -> Iterator[Callable[[], None]]:
    """Gives a function that collects garbage, and exempts from later collections what is alive then.

    Measuring memory collects before every pass, and 400,000 objects of torch and its compilers cost 0.2 s each time:
    minutes in a whole run.
    """

    def collect() -> None:
        gc.collect()
        gc.freeze()

    collect()
    try:
        yield collect
    finally:
        gc.unfreeze()


def steps(plan: Plan) -> int:
    return len(plan.jobs()) + 3


def head(plan: Plan) -> dict[str, Any]:
    """What a document says beside its figures."""
    return {
        "format": FORMAT,
        **machine.describe(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "cases": {case.name: describe_case(case) for case in plan.cases},
    }


def measure(job: Job, plan: Plan, inputs: Inputs) -> list[dict[str, Any]] | str:
    """The records of one job, or why there are none."""
    reason = None if plan.by_name else coverage.left_out(job.case, job.contender.name, plan.quick)
    if reason is not None:
        return reason
    try:
        found = _timings_and_peaks(job, plan, inputs)
    except torch.OutOfMemoryError as e:
        found = f"out of memory: {str(e).splitlines()[0]}"
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()  # here, where nothing holds the contender's tensors any more
    if isinstance(found, str):
        return found
    timings, peaks = found
    return [record(job, plan, which, timings[which], peaks[which] if peaks else None) for which in PASSES]


def _timings_and_peaks(job: Job, plan: Plan, inputs: Inputs) -> tuple[dict[str, Timing], memory.Peaks | None] | str:
    prepared = job.contender.prepare(job.case, inputs, job.function)
    if isinstance(prepared, str):
        return prepared
    timings = {which: time_ms(fn, plan.device, plan.effort) for which, fn in pass_functions(prepared).items()}
    return timings, peak_memory(job, plan, prepared)


def peak_memory(job: Job, plan: Plan, prepared: Prepared) -> memory.Peaks | None:
    if plan.device.type == "cuda":
        return memory.gpu_peaks(prepared, plan.device)
    dtype = str(plan.dtype).removeprefix("torch.")
    request = memory.Request((job.case,), job.contender.name, job.function.spec, job.function.params, dtype)
    answers = memory.cpu_peaks(request)
    return answers[0] if answers else None


def record(job: Job, plan: Plan, which: str, timing: Timing, peak: int | None) -> dict[str, Any]:
    """One line of the result. ``extra_mib`` is the peak less what the pass must leave behind."""
    needed = results_bytes(job.case, which, plan.dtype.itemsize)
    return {
        "case": job.case.name,
        "function": job.computes,
        "backend": job.contender.name,
        "pass": which,
        **asdict(timing),
        "tflops": flops(job.case, which) / timing.median_ms / 1e9,
        "floor_fraction": None,  # known when the last rates have been read
        "peak_mib": None if peak is None else peak / MIB,
        "extra_mib": None if peak is None else max(peak - needed, 0) / MIB,
    }
