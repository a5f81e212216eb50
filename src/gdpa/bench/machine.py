"""What was measured on: devices, versions, clocks, date and commit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gdpa


def describe(device: torch.device) -> dict[str, Any]:
    """The head of a result file."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """gdpa, Python, torch with its CUDA or ROCm, and Triton."""
    return {
        "gdpa": gdpa.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": package_version("triton") or package_version("pytorch-triton-rocm"),
    }


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the source tree, "-dirty" if it has changes; GDPA_COMMIT where there is no git."""
    told = os.environ.get("GDPA_COMMIT")
    root = Path(__file__).parents[3]
    if told or shutil.which("git") is None or not (root / ".git").exists():
        return told
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}-dirty" if head and changed else head


def clocks() -> dict[str, float] | None:
    """SM and memory clocks (MHz), power draw and limit (W) and temperature (C) of the GPU, as nvidia-smi reads them."""
    if shutil.which("nvidia-smi") is None:
        return None
    fields = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    line = _output(query)
    numbers = [re.sub(r"[^\d.]", "", part) for part in (line or "").split(",")]
    return {f: float(n) for f, n in zip(fields, numbers, strict=False) if n} or None


def cpu_name() -> str:
    """The processor's model, as the system names it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def cpu_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine's memory."""
    try:
        text = Path("/proc/meminfo").read_text()
        total, free = (re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("MemTotal", "MemAvailable"))
        if total and free:
            return int(total.group(1)) * 1024, int(free.group(1)) * 1024
    except OSError:
        pass  # not Linux
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total_bytes, total_bytes // 2


def free_memory(device: torch.device) -> int:
    """Bytes a tensor on ``device`` could take, counting what torch's own cache holds."""
    if device.type != "cuda":
        return cpu_memory()[1]
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _output(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
