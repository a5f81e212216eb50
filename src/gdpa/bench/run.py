"""The benchmark: cases x functions x contenders x passes, measured into one document that is written as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gdpa.bench import machine, memory, suite
from gdpa.bench.cases import Case, make_inputs
from gdpa.bench.contenders import Contender, Prepared, contenders
from gdpa.bench.passes import PASSES, floor, flops, pass_functions, results_bytes
from gdpa.bench.rates import Rates, measure_rates, typical
from gdpa.bench.timing import Effort, Timing, time_ms
from gdpa.spec import Loaded

FORMAT = 1
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """What to measure. ``functions`` are those asked for; a contender of softmax runs once per case."""

    cases: tuple[Case, ...]
    functions: tuple[Loaded, ...]
    contenders: tuple[Contender, ...]
    device: torch.device
    dtype: torch.dtype
    effort: Effort

    def jobs(self) -> list[Job]:
        found = []
        for case in self.cases:
            for contender in self.contenders:
                functions = self.functions[:1] if contender.function else self.functions
                found += [Job(case, contender, f, contender.function or f.name) for f in functions]
        return found


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
    effort: Effort | None = None,
) -> Plan:
    """A plan with the defaults of this machine: its GPU in bfloat16 if it has one, else the CPU in float32."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device.type == "cpu"
    dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
    cases = suite.find(patterns or suite.names(on_cpu), suite.CPU_SCALE if on_cpu else suite.FULL_SCALE)
    return Plan(tuple(cases), functions, tuple(contenders(device, dtype, only)), device, dtype, effort or Effort())


def run(plan: Plan, step: Callable[[str], None] = lambda label: None) -> dict[str, Any]:
    """Measure everything; ``step`` is told what comes next, ``steps(plan)`` times in all."""
    jobs = plan.jobs()
    # Readings at the start, in the middle and at the end, so that drift is seen and averaged over.
    readings, records, skipped, clocks = [], [], [], []

    def read_rates() -> None:
        step("cuBLAS and copy rates" if plan.device.type == "cuda" else "matrix product and copy rates")
        readings.append(measure_rates(plan.device, plan.dtype))
        clocks.append(machine.clocks() if plan.device.type == "cuda" else None)

    read_rates()
    for i, job in enumerate(jobs):
        if i == len(jobs) // 2:
            read_rates()
        step(str(job))
        result = measure(job, plan)
        if isinstance(result, str):
            skipped.append(
                {"case": job.case.name, "function": job.computes, "backend": job.contender.name, "why": result}
            )
        else:
            records += result
    read_rates()
    rates = typical(readings)
    for record in records:
        least = floor(suite_case(plan, record["case"]), record["pass"], plan.dtype.itemsize, rates)
        record["floor_fraction"] = least / record["median_ms"]
    return {
        "format": FORMAT,
        **machine.describe(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "clocks": clocks,
        "rates": rates_document(rates, readings, plan.device),
        "cases": {case.name: describe_case(case) for case in plan.cases},
        "records": records,
        "skipped": skipped,
    }


def steps(plan: Plan) -> int:
    return len(plan.jobs()) + 3


def suite_case(plan: Plan, name: str) -> Case:
    return next(case for case in plan.cases if case.name == name)


def measure(job: Job, plan: Plan) -> list[dict[str, Any]] | str:
    """The records of one job, or why there are none."""
    inputs = make_inputs(job.case, plan.dtype, plan.device)
    try:
        prepared = job.contender.prepare(job.case, inputs, job.function)
        if isinstance(prepared, str):
            return prepared
        timings = {which: time_ms(fn, plan.device, plan.effort) for which, fn in pass_functions(prepared).items()}
        peaks = peak_memory(job, plan, prepared)
    except torch.OutOfMemoryError as e:
        return f"out of memory: {str(e).splitlines()[0]}"
    finally:
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
    return [record(job, plan, which, timings[which], peaks[which] if peaks else None) for which in PASSES]


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


def rates_document(rates: Rates, readings: list[Rates], device: torch.device) -> dict[str, Any]:
    """The rates used, and every reading of them. The matrix product is cuBLAS's on a GPU."""
    product = "cublas_tflops" if device.type == "cuda" else "matmul_tflops"

    def show(r: Rates) -> dict[str, float]:
        return {product: r.matmul_tflops, "copy_tb_s": r.copy_tb_s}

    return {**show(rates), "readings": [show(r) for r in readings]}


def describe_case(case: Case) -> dict[str, Any]:
    """What a reader of the numbers needs to know of a case."""
    return {
        "batch": len(case.len_q),
        "heads": case.heads,
        "d": case.d,
        "max_q": max(case.len_q),
        "mean_q": sum(case.len_q) / len(case.len_q),
        "max_k": max(case.len_k),
        "mean_k": sum(case.len_k) / len(case.len_k),
        "band": list(case.band),
        "gflop": {which: flops(case, which) / 1e9 for which in PASSES},
    }


def save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A result file; ValueError if it is not one."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} is not a result of `gdpa bench` (format {FORMAT})")
    return document


def rows(document: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], dict[str, dict[str, Any]]]]:
    """((case, function, backend), {pass: record}) in the order of measurement."""
    grouped: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for r in document["records"]:
        grouped.setdefault((r["case"], r["function"], r["backend"]), {})[r["pass"]] = r
    yield from grouped.items()
