"""The whole-model benchmark: models x lengths x contenders, measured into one document that is written as JSON."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from gdpa.bench import machine, noise, timing
from gdpa.bench.contenders.contender import in_one_line
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels.measurements import Measurements
from gdpa.bench.models import cases as model_cases
from gdpa.bench.models import contenders as model_contenders
from gdpa.bench.models.cases import ModelCase, Scale
from gdpa.bench.models.contenders import ModelContender
from gdpa.bench.models.floors import Work, floors, step_work
from gdpa.bench.models.flops import step_flops
from gdpa.bench.models.profile import IDLE, profile_steps
from gdpa.bench.models.step import QUICK, StepEffort, Trainer, measure
from gdpa.bench.rates import best, measure_rates
from gdpa.bench.results import FORMAT, product_rate
from gdpa.spec import Loaded

KIND = "model"
FUNCTION = "gelu"
MIB = 2**20


class DeviceLostError(RuntimeError):
    """After some errors a GPU does nothing more for this process."""


@dataclass(frozen=True)
class ModelPlan:
    """What to measure."""

    cases: tuple[ModelCase, ...]
    contenders: tuple[ModelContender, ...]
    function: Loaded
    device: torch.device
    dtype: torch.dtype
    compiled: bool
    effort: StepEffort
    rates_effort: timing.Effort

    def models(self) -> dict[str, list[ModelCase]]:
        """The cases of each model, which share what torch.compile makes of it."""
        found: dict[str, list[ModelCase]] = {}
        for case in self.cases:
            found.setdefault(case.model, []).append(case)
        return found


def make_plan(
    patterns: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    function: Loaded | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    compiled: bool | None = None,
    quick: bool = False,
    scale: Scale | None = None,
) -> ModelPlan:
    """A plan with the defaults of this machine: its GPU in bfloat16, compiled, or the CPU in float32, not compiled."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"--model trains in float32 or bfloat16; {dtype} would need the loss to be scaled")
    scale = scale or (model_cases.FULL_SCALE if on_gpu else model_cases.CPU_SCALE)
    if quick and not patterns:
        patterns = ("*-uniform",)
    return ModelPlan(
        tuple(model_cases.find(patterns, scale)),
        tuple(model_contenders.find(only)),
        function or benchmark_function(FUNCTION),
        device,
        dtype,
        on_gpu if compiled is None else compiled,
        QUICK if quick else StepEffort(),
        timing.QUICK if quick else timing.Effort(),
    )


def steps(plan: ModelPlan) -> int:
    return len(plan.cases) * len(plan.contenders) + 4  # three readings of the rates, and the count of the work


def run(
    plan: ModelPlan,
    step: Callable[[str], None] = lambda label: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure everything; ``step`` is told what comes next, ``keep`` is given the document after every contender."""
    return _Run(plan, step, keep).all()


class _Run:
    """A run under way."""

    def __init__(self, plan: ModelPlan, step: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
        self.plan, self.step, self.keep = plan, step, keep
        self.began, self.others = time.monotonic(), noise.Others()
        self.records: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []

    def all(self) -> dict[str, Any]:
        self.step("counting the work of a step")
        self.flops = {case.name: fmean(step_flops(case, self.plan.function)) for case in self.plan.cases}
        self.work: dict[str, list[Work]] = {}
        self.readings = Measurements(head(self.plan, self.flops), self.plan.dtype.itemsize, ())
        self.read_rates("start")
        on_gpu = self.plan.device.type == "cuda"
        self.held = torch.cuda.memory_allocated(self.plan.device) if on_gpu else 0  # by what clears caches, for one
        jobs = [(cases, c) for cases in self.plan.models().values() for c in self.plan.contenders]
        for i, (cases, contender) in enumerate(jobs):
            if i == len(jobs) // 2:
                self.read_rates("middle")
            self.contend(cases, contender)
        self.read_rates("end")
        # Last, for it makes models of fake tensors, and what is timed is not to find any trace of those.
        self.work = {case.name: step_work(case, self.plan.function, self.plan.dtype) for case in self.plan.cases}
        return self.document()

    def contend(self, cases: list[ModelCase], contender: ModelContender) -> None:
        """One contender on the cases of one model."""
        trainer: Trainer | None = None
        for case in cases:
            self.step(f"{case.name} {contender.name}")
            try:
                if trainer is None:
                    trainer = self.make_trainer(case, contender)
                found: dict[str, Any] | str = self.measure(case, contender, trainer)
            except torch.OutOfMemoryError:
                found = "out of memory"
            except Exception as e:
                found = reason(e)
            self.add(case, contender, found)
            self.keep(self.document())
            if isinstance(found, str) and not alive(self.plan.device):
                raise DeviceLostError(f"{case.name} {contender.name}: {found}; the GPU does not answer any more")
            self.clear(trainer)
        del trainer
        self.clear(None)

    def make_trainer(self, case: ModelCase, contender: ModelContender) -> Trainer:
        plan = self.plan
        model = contender.make_model(case, plan.function, plan.device)
        return Trainer(model, plan.device, plan.dtype, plan.compiled, contender.kernels)

    def measure(self, case: ModelCase, contender: ModelContender, trainer: Trainer) -> dict[str, Any]:
        """One line of the result."""
        plan, batch = self.plan, case.scale.batch
        inputs = contender.inputs(case, model_cases.make_batches(case, plan.device))
        trainer.start(inputs)
        found = measure(trainer, len(inputs), plan.effort)
        on_gpu = plan.device.type == "cuda"
        profile = profile_steps(trainer, len(inputs) if on_gpu else 1, plan.device)  # operators are more than kernels
        if on_gpu:
            busy = sum(profile["groups_ms"].values())
            profile["groups_ms"][IDLE] = max(found.timing.median_ms - busy, 0.0)
        return {
            "case": case.name,
            "function": contender.computes(plan.function),
            "backend": contender.name,
            **asdict(found.timing),
            "samples_s": batch / found.timing.median_ms * 1e3,
            "tflops": self.flops[case.name] / found.timing.median_ms / 1e9,
            "peak_mib": None if found.peak is None else (found.peak - self.held) / MIB,
            "loss": found.loss,
            "compile_s": found.compile_s,
            "graphs": found.graphs,
            "profile": profile,
        }

    def clear(self, trainer: Trainer | None) -> None:
        """What the last case left: gradients, averages and torch's cache of memory."""
        if trainer is not None:
            trainer.forget()
        gc.collect()
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, case: ModelCase, contender: ModelContender, found: dict[str, Any] | str) -> None:
        if isinstance(found, str):
            function = contender.computes(self.plan.function)
            self.skipped.append({"case": case.name, "function": function, "backend": contender.name, "why": found})
        else:
            self.records.append(found)

    def read_rates(self, when: str) -> None:
        device = self.plan.device
        self.step(f"{'cuBLAS' if device.type == 'cuda' else 'matrix product'} and copy rates ({when})")
        clocks = machine.clocks() if device.type == "cuda" else None
        self.readings.add_rates(when, measure_rates(device, self.plan.dtype, self.plan.rates_effort), clocks)
        self.clear(None)

    def document(self) -> dict[str, Any]:
        """Everything so far, case by case, with the MFU and the floors that the best rates so far give."""
        document = self.readings.document(time.monotonic() - self.began)
        rate = document["rates"][product_rate(document)]
        order = list(document["cases"])
        records = sorted(self.records, key=lambda r: order.index(r["case"]))
        rates = best([reading for _, reading in self.readings.readings])
        return {
            **document,
            "floors_ms": {name: floors(work, rates) for name, work in self.work.items()},
            "records": [{**r, "mfu": r["tflops"] / rate} for r in records],
            "skipped": self.skipped,
            "load": self.others.load(),
        }


def head(plan: ModelPlan, flops: dict[str, float]) -> dict[str, Any]:
    """What a document says beside its figures."""
    scale = plan.cases[0].scale
    return {
        "format": FORMAT,
        "kind": KIND,
        **machine.describe(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "compiled": plan.compiled,
        "optimizer": "AdamW, fused" if plan.device.type == "cuda" else "AdamW",
        "scale": asdict(scale),
        "models": {name: model_cases.options(name, scale) for name in plan.models()},
        "cases": {case.name: {**model_cases.describe(case), "gflop": flops[case.name] / 1e9} for case in plan.cases},
    }


def reason(error: Exception) -> str:
    """An error in a line. Compilers wrap what went wrong: the innermost has it. Memory may run out inside them too."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return "out of memory"
    return f"failed: {in_one_line(error)}"


def alive(device: torch.device) -> bool:
    """Whether the device still answers."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def failures(document: dict[str, Any]) -> list[str]:
    """Where gdpa itself failed; out of memory is a result, and others may fail as they like."""
    return [
        f"{s['case']} {s['backend']}: {s['why']}"
        for s in document["skipped"]
        if s["backend"].startswith("gdpa") and s["why"].startswith("failed")
    ]
