"""Time and peak memory of forward plus backward over growing lengths, gdpa beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from gdpa.bench import machine, noise
from gdpa.bench.contenders.contender import Contender
from gdpa.bench.contenders.everybody import contenders
from gdpa.bench.kernels import memory
from gdpa.bench.kernels.passes import pass_functions
from gdpa.bench.report.tables import LOOK
from gdpa.bench.timing import QUICK, time_in_turns
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, dense, make_inputs

MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """The problem that grows. ``lengths`` ascend."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    d: int
    lengths: tuple[int, ...]

    def words(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        return f"batch {self.batch}, {self.heads} heads, head dimension {self.d}, {kind} on the {where}"

    def case(self, length: int) -> Case:
        return dense(f"L{length}", self.batch, length, length, heads=self.heads, d=self.d)


def this_machine(quick: bool) -> Setting:
    """A GPU gets a problem that fills it; a CPU one that two cores finish in seconds."""
    if torch.cuda.is_available():
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        return Setting(torch.device("cuda"), torch.bfloat16, 8, 8, 64, lengths[:3] if quick else lengths)
    lengths = (128, 256, 512, 1024, 2048, 4096)
    return Setting(torch.device("cpu"), torch.float32, 1, 2, 64, lengths[2:4] if quick else lengths)


def pair(setting: Setting) -> list[Contender]:
    """The backend that gdpa would choose, and eager PyTorch."""
    everybody = contenders(setting.device, setting.dtype)
    return [everybody[0], next(c for c in everybody if c.name == "eager")]


def steps(setting: Setting) -> int:
    return len(setting.lengths) + len(pair(setting)) * (setting.device.type == "cpu")


def run(setting: Setting, loaded: Loaded, step: Callable[[str], None]) -> dict[str, Any]:
    """{contender: [{length, ms, p20, p80, mib} or {length, why}]} and the machine. At each length the two take turns,
    so that a load that comes and goes meets both."""
    both, others = pair(setting), noise.Others()
    series: dict[str, list[dict[str, Any]]] = {c.name: [] for c in both}
    for length in setting.lengths:
        step(f"length {length}")
        for name, entry in _at_length(setting, both, loaded, length).items():
            series[name].append({"length": length, **entry})
    if setting.device.type == "cpu":
        for contender in both:
            step(f"{contender.name}, memory (in a process of its own)")
            _add_cpu_memory(setting, contender, loaded, [e for e in series[contender.name] if "ms" in e])
    words = {"setting": setting.words(), "function": loaded.name, "load": others.load()}
    return {"kind": "demo", **machine.describe(setting.device), **words, "series": series}


def _at_length(setting: Setting, both: list[Contender], loaded: Loaded, length: int) -> dict[str, dict[str, Any]]:
    case = setting.case(length)
    inputs = make_inputs(case, setting.dtype, setting.device)
    prepared = {c.name: c.prepare(case, inputs, loaded) for c in both}
    able = {name: p for name, p in prepared.items() if not isinstance(p, str)}
    calls = {name: pass_functions(p)["both"] for name, p in able.items()}
    found: dict[str, dict[str, Any]] = {name: {"why": p} for name, p in prepared.items() if isinstance(p, str)}
    for name, timing in time_in_turns(calls, setting.device, QUICK).items():
        found[name] = {"ms": timing.median_ms, "p20_ms": timing.p20_ms, "p80_ms": timing.p80_ms}
        if setting.device.type == "cuda":
            found[name]["mib"] = memory.gpu_peaks(able[name], setting.device, ("both",))["both"] / MIB
    return found


def _add_cpu_memory(setting: Setting, contender: Contender, loaded: Loaded, entries: list[dict[str, Any]]) -> None:
    """One fresh process measures all lengths (memory.py says why a process)."""
    cases = tuple(setting.case(entry["length"]) for entry in entries)
    dtype = str(setting.dtype).removeprefix("torch.")
    peaks = memory.cpu_peaks(memory.Request(cases, contender.name, loaded.spec, loaded.params, dtype, ("both",)))
    for entry, peak in zip(entries, peaks or [], strict=False):
        entry["mib"] = peak["both"] / MIB


def table(document: dict[str, Any]) -> Table:
    """Lengths down, contenders across."""
    shown = Table(title="forward + backward: time, and peak memory beyond q, k, v", **LOOK)
    shown.add_column("length", justify="right")
    for name in document["series"]:
        shown.add_column(f"{name} ms (p20-p80)", justify="right")
        shown.add_column(f"{name} MiB", justify="right")
    shown.add_column("gdpa is", justify="right")
    shown.add_column("gdpa needs", justify="right")
    for row in cells(document):
        shown.add_row(*row)
    return shown


def cells(document: dict[str, Any]) -> list[list[str]]:
    """The rows of the table: length, time and memory of each, and the ratios."""
    found = []
    for ours, eager in _by_length(document):
        ratios = ("", "")
        if "ms" in ours and "ms" in eager:
            ratios = (
                faster(ours, eager),
                noise.than(eager["mib"] / ours["mib"], "less", "more") if ours.get("mib") and "mib" in eager else "-",
            )
        found.append([f"{ours['length']:,}", *_cells(ours), *_cells(eager), *ratios])
    return found


def _by_length(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ours, eager = document["series"].values()
    return list(zip(ours, eager, strict=True))


def _cells(entry: dict[str, Any]) -> tuple[str, str]:
    if "ms" not in entry:
        return "does not fit", "-"
    return (
        f"{_ms(entry['ms'])} ({_ms(entry['p20_ms'])}-{_ms(entry['p80_ms'])})",
        f"{entry['mib']:,.1f}" if "mib" in entry else "-",
    )


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def last_of_both(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The longest length that both could do: ours, eager."""
    both = [(o, e) for o, e in _by_length(document) if "mib" in o and "mib" in e]
    return both[-1] if both else None


def faster(ours: dict[str, Any], eager: dict[str, Any]) -> str:
    """1.8x faster, 1.2x slower or within the noise."""
    return noise.speed(_record(ours), _record(eager))


def _record(entry: dict[str, Any]) -> dict[str, float]:
    return {"median_ms": entry["ms"], "p20_ms": entry["p20_ms"], "p80_ms": entry["p80_ms"]}


def doubts(document: dict[str, Any]) -> list[str]:
    """Warnings: a busy machine, and lengths at which the spread exceeds the difference."""
    found = []
    if noise.busy(document):
        found.append(f"Warning: {noise.load_words(document)}.")
    both = [(o, e) for o, e in _by_length(document) if "ms" in o and "ms" in e]
    close = [f"{o['length']:,}" for o, e in both if noise.uncertain(_record(o), _record(e))]
    if close:
        found.append(
            f"Warning: the spread of times from p20 to p80 exceeds the difference at length {', '.join(close)}."
        )
    return found


def verdict(document: dict[str, Any]) -> str:
    """The longest length that both could do, and up to where gdpa is slower, in a sentence or two."""
    both = last_of_both(document)
    if both is None:
        return "Only one of the two ran here."
    ours, eager = both
    mine, theirs = (f"{_ms(entry['ms'])} ms and {entry['mib']:,.0f} MiB" for entry in (ours, eager))
    less = ours["mib"] / eager["mib"]
    slower = [o["length"] for o, e in _by_length(document) if "ms" in o and "ms" in e and "slower" in faster(o, e)]
    below = f" Up to length {slower[-1]:,} gdpa is slower." if slower and slower[-1] < ours["length"] else ""
    return (
        f"At length {ours['length']:,}: {mine}, eager PyTorch {theirs}: {faster(ours, eager)}, with {less:.0%} of the "
        f"memory.{below}"
    )
