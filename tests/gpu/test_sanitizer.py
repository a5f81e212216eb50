"""compute-sanitizer finds nothing wrong in Hopper's kernels: no access outside, no race in shared memory.

Racecheck does report the bytes through which Triton's own warp_specialize tells each warp what to run: the compiler
writes and reads them between barriers that the tool does not follow. They belong to the line of the kernel's definition
or of that call (or of the ``if`` it stands under), where no buffer of ours is touched. Nor does it follow barriers in
shared memory (mbarrier): what producers tell the other warps (messages.py, backward/items.py) is written by the
thread that then arrives at one, and read behind it. Hazards elsewhere are ours.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hopper

SCRIPT = Path(__file__).with_name("sanitized.py")


def report(tool: str) -> str:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    done = subprocess.run([sanitizer, "--tool", tool, sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert "finished" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_memcheck() -> None:
    assert "ERROR SUMMARY: 0 errors" in report("memcheck")


def test_racecheck() -> None:
    said = report("racecheck")
    elsewhere = set(re.findall(r"in (\w+\.py):(\d+)", said)) - dispatch_lines()
    assert not elsewhere, f"{sorted(elsewhere)}\n{said[:4000]}"


def dispatch_lines() -> set[tuple[str, str]]:
    """(file, line) of each kernel's definition and of its warp_specialize, and of what is told of steps and items."""
    from gdpa.backends.hopper.backward import items, kernel, steps
    from gdpa.backends.hopper.forward import kernel as forward

    lines = set()
    for module in (steps, items):
        for number, line in enumerate(inspect.getsource(module).splitlines(), 1):
            if ".store(" in line or ".load(" in line:
                lines.add((Path(str(module.__file__)).name, str(number)))
    for module in (forward, kernel):
        source = inspect.getsource(module).splitlines()
        for number, line in enumerate(source, 1):
            if re.match(r"def \w+_kernel\(", line) or "gl.warp_specialize(" in line:
                lines.add((Path(str(module.__file__)).name, str(number)))
                if source[number - 2].strip().startswith("if "):
                    lines.add((Path(str(module.__file__)).name, str(number - 1)))
    return lines
