"""The benchmark: cases x functions x contenders (gdpa in several precisions and layouts) x passes, measured into one
document that is written as JSON."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gdpa.bench import machine, noise, turns
from gdpa.bench.contenders import layouts
from gdpa.bench.contenders.contender import Contender, NoRoom, Prepared
from gdpa.bench.contenders.everybody import FAST, Ours, contenders, precisions
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import accuracy, coverage, memory, suite
from gdpa.bench.kernels.measurements import Measurements, describe_case
from gdpa.bench.kernels.passes import PASSES, flops, results_bytes
from gdpa.bench.rates import measure_rates
from gdpa.bench.results import FORMAT
from gdpa.bench.timing import QUICK, Effort, Timing
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, make_inputs

MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """What to measure. ``functions``, ``layouts`` and ``precisions`` are those asked for on every case; if none are,
    coverage.py says which."""

    cases: tuple[Case, ...]
    functions: tuple[Loaded, ...]
    contenders: tuple[Contender, ...]
    device: torch.device
    dtype: torch.dtype
    effort: Effort
    quick: bool = False
    by_name: bool = False  # the contenders were named, so all of them run
    layouts: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()

    def jobs(self) -> list[Job]:
        return [job for case in self.cases for job in self.jobs_of(case)]

    def jobs_of(self, case: Case) -> list[Job]:
        """A contender of softmax runs once, whatever the functions are."""
        functions = self.functions or tuple(map(benchmark_function, coverage.functions(case.name, self.quick)))
        return [
            Job(case, variant, f, contender.function or f.name)
            for contender in self.contenders
            for f in (functions[:1] if contender.function else functions)
            for variant in self.variants(case, contender, f is functions[0])
        ]

    def variants(self, case: Case, contender: Contender, first_function: bool) -> list[Contender]:
        """gdpa's backends in every precision and layout that is asked for; others as they are."""
        if not isinstance(contender, Ours):
            return [contender]
        preferred = contender is next(c for c in self.contenders if isinstance(c, Ours))
        own = layouts.native(case)
        chosen = self.layouts or coverage.layouts(case, self.quick, preferred and first_function)
        return [
            replace(contender, layout=layout, precision=precision)
            for layout in chosen
            for precision in self.precisions or coverage.precisions(self.quick, preferred and layout == own)
        ]


@dataclass(frozen=True)
class Job:
    """One contender on one case; ``computes`` is the name of the function it really computes."""

    case: Case
    contender: Contender
    function: Loaded
    computes: str

    @property
    def precision(self) -> str | None:
        """None for those who have no choice."""
        return self.contender.precision if isinstance(self.contender, Ours) else None

    @property
    def layout(self) -> str:
        own = layouts.native(self.case)
        return self.contender.layout or own if isinstance(self.contender, Ours) else own

    @property
    def names(self) -> dict[str, str | None]:
        """What a record or a refusal begins with."""
        return {
            "case": self.case.name,
            "function": self.computes,
            "backend": self.contender.name,
            "precision": self.precision,
            "layout": self.layout,
        }

    def __str__(self) -> str:
        return " ".join(name for name in self.names.values() if name)


@dataclass
class OnCase:
    """A case's inputs, which every contender is given, and what is known of their errors so far."""

    inputs: Inputs
    truth: accuracy.Truth
    errors: dict[tuple[str, str, str], accuracy.Errors] = field(default_factory=dict)

    def same_as_exact(self, job: Job, found: accuracy.Errors) -> bool:
        """Whether a fast job does what the exact one did before it; an exact one is remembered."""
        key = (job.computes, job.contender.name, job.layout)
        if job.precision == FAST:
            return key in self.errors and accuracy.same(found, self.errors[key])
        self.errors[key] = found
        return False


def make_plan(
    patterns: tuple[str, ...] = (),
    functions: tuple[Loaded, ...] = (),
    only: tuple[str, ...] = (),
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    quick: bool = False,
    chosen_layouts: tuple[str, ...] = (),
    chosen_precisions: tuple[str, ...] = (),
) -> Plan:
    """A plan with the defaults of this machine: its GPU in bfloat16 if it has one, else the CPU in float32."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cpu = device.type == "cpu"
    dtype = dtype or (torch.float32 if on_cpu else torch.bfloat16)
    patterns = patterns or (suite.QUICK_NAMES if quick else tuple(suite.names(on_cpu)))
    cases = suite.find(patterns, suite.CPU_SCALE if on_cpu else suite.FULL_SCALE)
    found = tuple(contenders(device, dtype, only))
    for what, given, known in (
        ("layout", chosen_layouts, layouts.LAYOUTS),
        ("precision", chosen_precisions, precisions()),
    ):
        for name in given:
            if name not in known:
                raise ValueError(f"{what} {name!r} is unknown here; known: {', '.join(known)}")
    return Plan(
        tuple(cases), functions, found, device, dtype, QUICK if quick else Effort(), quick, bool(only),
        chosen_layouts, chosen_precisions,
    )  # fmt: skip


def run(
    plan: Plan,
    step: Callable[[str], None] = lambda label: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure everything; ``step`` is told what comes next, ``steps(plan)`` times in all.

    Errors and memory are measured job by job, times of all jobs of a case in turns. ``keep`` is given the document
    after every case, so that a run that is cut short has not been in vain.
    """
    started, done, others = time.monotonic(), 0, noise.Others()
    found = Measurements(head(plan), plan.dtype.itemsize, plan.cases)

    def document() -> dict[str, Any]:
        return {**found.document(time.monotonic() - started), "load": others.load()}

    def read_rates(when: str) -> None:
        step(f"{'cuBLAS' if plan.device.type == 'cuda' else 'matrix product'} and copy rates ({when})")
        clocks = machine.clocks() if plan.device.type == "cuda" else None
        found.add_rates(when, measure_rates(plan.device, plan.dtype, plan.effort), clocks)

    def record_times(waiting: list[Ready]) -> None:
        for job, result in timed(waiting, plan):
            found.add(job.names, result)
        keep(document())

    read_rates("start")
    half = len(plan.jobs()) / 2
    with garbage_collected() as collect:
        for case in plan.cases:
            inputs = make_inputs(case, plan.dtype, plan.device)  # once: every contender gets the same tensors
            on_case = OnCase(inputs, accuracy.Truth(case, inputs))
            if done >= half and len(found.readings) == 1:
                read_rates("middle")
            waiting: list[Ready] = []
            try:
                for job in plan.jobs_of(case):
                    step(str(job))
                    ready = prepare(job, plan, on_case)
                    if (
                        isinstance(ready, NoRoom | torch.OutOfMemoryError) and waiting
                    ):  # there may be without the others
                        record_times(waiting)
                        ready = prepare(job, plan, on_case)
                    if isinstance(ready, Ready):
                        waiting.append(ready)
                    else:
                        found.add(job.names, ready if isinstance(ready, str) else out_of_memory(ready))
                    del ready  # ``waiting`` alone holds its tensors
                    done += 1
            except Exception:
                with suppress(Exception):  # what was ready before still counts, if the device answers
                    record_times(waiting)
                raise
            step(f"{case.name}: times, in turns")
            record_times(waiting)
            del inputs, on_case
            collect()
    if len(found.readings) == 1:
        read_rates("middle")
    read_rates("end")
    return document()


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
    return len(plan.jobs()) + len(plan.cases) + 3


def head(plan: Plan) -> dict[str, Any]:
    """What a document says beside its figures."""
    return {
        "format": FORMAT,
        **machine.describe(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "cases": {case.name: describe_case(case) for case in plan.cases},
    }


@dataclass(frozen=True)
class Ready:
    """A job that is ready to be timed; None where nobody can tell."""

    job: Job
    prepared: Prepared
    peaks: memory.Peaks | None
    errors: accuracy.Errors | None


def prepare(job: Job, plan: Plan, on_case: OnCase) -> Ready | str | torch.OutOfMemoryError:
    """The job with its errors and its memory, or why it is not to be timed."""
    reason = None if plan.by_name else coverage.left_out(job.case, job.contender.name, plan.quick)
    if reason is not None:
        return reason
    try:
        found: Ready | str | torch.OutOfMemoryError = _prepared(job, plan, on_case)
    except torch.OutOfMemoryError as e:
        found = e.with_traceback(None)  # whose frames hold tensors
    if plan.device.type == "cuda":
        torch.cuda.empty_cache()  # here, where nothing holds the contender's tensors any more
    return found


def _prepared(job: Job, plan: Plan, on_case: OnCase) -> Ready | str:
    prepared = job.contender.prepare(job.case, on_case.inputs, job.function)
    if isinstance(prepared, str):
        return prepared
    errors = accuracy.errors(prepared, on_case.truth, job.computes, job.function)
    if errors is not None:
        if not all(map(math.isfinite, errors.values())):
            return f"its results are wrong: relative RMS errors {errors}"
        if on_case.same_as_exact(job, errors) and not plan.precisions:
            return "it has the same errors as exact, so it is the same code (--precision fast runs it nevertheless)"
    return Ready(job, prepared, peak_memory(job, plan, prepared), errors)


def timed(waiting: list[Ready], plan: Plan) -> Iterator[tuple[Job, list[dict[str, Any]] | str]]:
    """The records of every job of ``waiting``, which is emptied; one without room beside the others is tried alone."""
    found = turns.time_passes([ready.prepared for ready in waiting], plan.device, plan.effort)
    several, alone = len(waiting) > 1, []
    for ready, timings in zip(waiting, found, strict=True):
        if not isinstance(timings, torch.OutOfMemoryError):
            yield ready.job, [record(ready, plan, which, timings[which]) for which in PASSES]
        elif several:
            alone.append(ready)
        else:
            yield ready.job, out_of_memory(timings)
    waiting.clear()
    for ready in alone:
        yield from timed([ready], plan)


def out_of_memory(error: torch.OutOfMemoryError) -> str:
    return f"out of memory: {str(error).splitlines()[0]}"


def peak_memory(job: Job, plan: Plan, prepared: Prepared) -> memory.Peaks | None:
    if plan.device.type == "cuda":
        return memory.gpu_peaks(prepared, plan.device)
    dtype = str(plan.dtype).removeprefix("torch.")
    request = memory.Request(
        (job.case,), job.contender.name, job.function.spec, job.function.params, dtype,
        precision=job.precision, layout=job.layout,
    )  # fmt: skip
    answers = memory.cpu_peaks(request)
    return answers[0] if answers else None


def record(found: Ready, plan: Plan, which: str, timing: Timing) -> dict[str, Any]:
    """One line of the result. ``extra_mib`` is the peak less what the pass must leave behind."""
    job, peak = found.job, found.peaks[which] if found.peaks else None
    needed = results_bytes(job.case, which, plan.dtype.itemsize)
    return {
        **job.names,
        "pass": which,
        **asdict(timing),
        "tflops": flops(job.case, which) / timing.median_ms / 1e9,
        "floor_fraction": None,  # known when the last rates have been read
        "peak_mib": None if peak is None else peak / MIB,
        "extra_mib": None if peak is None else max(peak - needed, 0) / MIB,
        **accuracy.of_pass(found.errors, which),
    }
