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
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels.measurements import Measurements
from gdpa.bench.models import cases as model_cases
from gdpa.bench.models import contenders as model_contenders
from gdpa.bench.models.cases import ModelCase, Scale
from gdpa.bench.models.contenders import ModelContender
from gdpa.bench.models.floors import Work, floors, step_work
from gdpa.bench.models.flops import step_flops
from gdpa.bench.models.profile import IDLE
from gdpa.bench.models.step import QUICK, Measured, StepEffort, Trainer
from gdpa.bench.models.turns import TURNS, Entrant
from gdpa.bench.rates import best, measure_rates
from gdpa.bench.results import FORMAT, product_rate
from gdpa.bench.timing import order
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
    return len(plan.cases) * len(plan.contenders) * TURNS + 4  # three readings of the rates, and the count of the work


def run(
    plan: ModelPlan,
    step: Callable[[str], None] = lambda label: None,
    keep: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Measure everything; ``step`` is told what comes next, ``keep`` is given the document after every case."""
    return _Run(plan, step, keep).all()


class _Run:
    """A run under way."""

    def __init__(self, plan: ModelPlan, step: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
        self.plan, self.step, self.keep = plan, step, keep
        self.began, self.others = time.monotonic(), noise.Others()
        self.records: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        self.turns_taken = 0

    def all(self) -> dict[str, Any]:
        self.step("counting the work of a step")
        self.flops = {case.name: fmean(step_flops(case, self.plan.function)) for case in self.plan.cases}
        self.work: dict[str, list[Work]] = {}
        self.readings = Measurements(head(self.plan, self.flops), self.plan.dtype.itemsize, ())
        self.read_rates("start")
        on_gpu = self.plan.device.type == "cuda"
        self.held = torch.cuda.memory_allocated(self.plan.device) if on_gpu else 0  # by what clears caches, for one
        for cases in self.plan.models().values():
            self.contend(cases)
        self.read_rates("end")
        # Last, for it makes models of fake tensors, and what is timed is not to find any trace of those.
        self.work = {case.name: step_work(case, self.plan.function, self.plan.dtype) for case in self.plan.cases}
        return self.document()

    def contend(self, cases: list[ModelCase]) -> None:
        """All contenders on the cases of one model, in turns."""
        entrants = [Entrant(c, self.make_trainer, self.plan.effort) for c in self.plan.contenders]
        for case in cases:
            for entrant in entrants:
                entrant.begin()
            try:
                self.take_turns(case, entrants)
            finally:
                for entrant in entrants:
                    self.add(case, entrant)
                self.keep(self.document())
        del entrants, entrant
        if self.plan.compiled:
            torch.compiler.reset()  # its code holds on to the models
        self.clear()

    def take_turns(self, case: ModelCase, entrants: list[Entrant]) -> None:
        device, batches = self.plan.device, model_cases.make_batches(case, "cpu")
        for turn in range(TURNS):
            if self.turns_taken == len(self.plan.cases) * TURNS // 2:
                self.read_rates("middle")
            self.turns_taken += 1
            for entrant in order(entrants, turn):
                name = f"{case.name} {entrant.contender.name}"
                self.step(f"{name}, turn {turn + 1} of {TURNS}")
                if entrant.failed is not None:
                    continue
                entrant.turn(case, batches, device)
                if entrant.failed is not None and not alive(device):
                    raise DeviceLostError(f"{name}: {entrant.failed}; the GPU no longer responds")
                entrant.rest()
                self.clear()

    def make_trainer(self, case: ModelCase, contender: ModelContender) -> Trainer:
        plan = self.plan
        model = contender.make_model(case, plan.function, plan.device)
        return Trainer(model, plan.device, plan.dtype, plan.compiled, contender.kernels, contender.table_updates)

    def record(self, case: ModelCase, contender: ModelContender, found: Measured, profile: dict[str, Any]) -> Any:
        """One line of the result."""
        groups, median_ms = profile["groups_ms"], found.timing.median_ms
        if self.plan.device.type == "cuda":
            groups = {**groups, IDLE: max(median_ms - sum(groups.values()), 0.0)}
        return {
            "case": case.name,
            "function": contender.computes(self.plan.function),
            "backend": contender.name,
            **asdict(found.timing),
            "turns_ms": found.turns_ms,
            "samples_s": case.scale.batch / median_ms * 1e3,
            "tflops": self.flops[case.name] / median_ms / 1e9,
            "peak_mib": None if found.peak is None else (found.peak - self.held) / MIB,
            "loss": found.loss,
            "compile_s": found.compile_s,
            "graphs": found.graphs,
            "profile": {**profile, "groups_ms": groups},
        }

    def clear(self) -> None:
        """What the last turn left, and torch's cache of memory."""
        gc.collect()
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def add(self, case: ModelCase, entrant: Entrant) -> None:
        contender, found = entrant.contender, entrant.found()
        if isinstance(found, str):
            function = contender.computes(self.plan.function)
            self.skipped.append({"case": case.name, "function": function, "backend": contender.name, "why": found})
        elif found is not None:
            self.records.append(self.record(case, contender, *found))

    def read_rates(self, when: str) -> None:
        device = self.plan.device
        self.step(f"{'cuBLAS' if device.type == 'cuda' else 'matrix product'} and copy rates ({when})")
        clocks = machine.clocks() if device.type == "cuda" else None
        self.readings.add_rates(when, measure_rates(device, self.plan.dtype, self.plan.rates_effort), clocks)
        self.clear()

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
