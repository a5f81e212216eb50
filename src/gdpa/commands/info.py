"""`gdpa info`: versions, devices, backends and functions of this machine."""

from __future__ import annotations

import torch
from rich.table import Table

from gdpa import backends
from gdpa.backends import tuning
from gdpa.bench import machine
from gdpa.bench.contenders.everybody import why_not
from gdpa.bench.report.documents import formula
from gdpa.bench.report.tables import LOOK, cpu
from gdpa.functions.builtin import BUILTINS

GIB = 2**30
# What some commands use if it is there, by any of the names under which it is distributed.
EXTRAS = {
    "pyarrow": ("pyarrow",),
    "torchrec": ("torchrec", "torchrec-cpu"),
    "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def versions_table() -> Table:
    shown = Table("", "version", title="versions", **LOOK, show_header=False)
    for name, version in machine.versions().items():
        if version is not None or name == "triton":
            shown.add_row(name, version or "not installed")
    for name, packages in EXTRAS.items():
        found = next((v for v in map(machine.package_version, packages) if v is not None), None)
        shown.add_row(name, found or "not installed")
    return shown


def devices() -> list[torch.device]:
    return [*(torch.device("cuda", i) for i in range(torch.cuda.device_count())), torch.device("cpu")]


def devices_table() -> Table:
    shown = Table("device", "name", "capability", "memory", title="devices", **LOOK)
    for device in devices():
        if device.type == "cuda":
            gpu = torch.cuda.get_device_properties(device)
            size = f"{gpu.total_memory / GIB:.0f} GiB, {gpu.multi_processor_count} multiprocessors"
            shown.add_row(str(device), gpu.name, f"{gpu.major}.{gpu.minor}", size)
        else:
            total, free = machine.cpu_memory()
            name = cpu({"cpu": machine.cpu_name(), "threads": torch.get_num_threads()})
            shown.add_row(
                "cpu", name, torch.backends.cpu.get_cpu_capability(), f"{total / GIB:.0f} GiB, {free / GIB:.0f} free"
            )
    return shown


def backends_table() -> Table:
    """Who runs where, in which dtypes, and otherwise why not."""
    shown = Table("backend", "device", "runs", "why not", title="backends, in order of preference", **LOOK)
    for name in backends.BACKENDS:
        for device in devices():
            reasons = {str(d).removeprefix("torch."): why_not(name, device, d) for d in DTYPES}
            runs = [d for d, reason in reasons.items() if reason is None]
            why = dict.fromkeys(reason for reason in reasons.values() if reason is not None)
            shown.add_row(name, str(device), ", ".join(runs) or "no", "; ".join(why))
    return shown


def functions_table() -> Table:
    shown = Table("activation", "f(s)", title="built-in functions", **LOOK)
    for fn in BUILTINS:
        shown.add_row(fn.__name__, formula(fn))
    return shown


def tuning_lines() -> list[str]:
    """Which configurations the GPU kernels run with: the built-in ones, or those of a file (`gdpa tune`)."""
    gpus = [device for device in devices() if device.type == "cuda"]
    return [f"tuning of {gpu}: {tuning.status(gpu)}" for gpu in gpus] or [f"tuning: {tuning.file_status()}"]
