"""The error of each built-in's device code against float64, value and derivative, on a dense grid over [-30, 30].

Scores are float32 in every kernel; the dtype of the inputs decides which approximations the code uses. Errors are
taken before the result is rounded to that dtype: max |error| / max(1, |f|).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gdpa.backends import interpreting
from gdpa.bench import machine
from gdpa.functions.activation import activations, from_name
from gdpa.functions.emit import emit

if TYPE_CHECKING:
    from rich.table import Table

GRID = 30.0
POINTS = 1_200_001
INTERPRETED_POINTS = 6_001
# What an error must stay below: the rounding of a number near 1 in 16 bits; for float32 a few units in the last place,
# since there the code is only meant to be accurate.
BOUNDS = {"bfloat16": 2**-9, "float16": 2**-11, "float32": 2**-18}


def measure(step: Callable[[str], None] = lambda label: None) -> dict[str, Any]:
    """Errors of every built-in for every dtype, on the GPU, or on the CPU under TRITON_INTERPRET=1."""
    from gdpa.backends.triton.launch import INTERPRET, target

    device = torch.device("cpu" if INTERPRET else "cuda")
    points, compiled_for = INTERPRETED_POINTS if INTERPRET else POINTS, target(device)
    functions: dict[str, Any] = {}
    for name in activations():
        step(name)
        functions[name] = {dtype: _errors(name, dtype, device, points, compiled_for) for dtype in BOUNDS}
    grid = {"from": -GRID, "to": GRID, "points": points}
    return {
        "kind": "function-errors",
        **machine.describe(device),
        "target": compiled_for,
        "grid": grid,
        "functions": functions,
    }


def _errors(name: str, dtype: str, device: torch.device, points: int, target: str) -> dict[str, Any]:
    from gdpa.bench.kernels.elementwise import apply

    act, kind = from_name(name), getattr(torch, dtype)
    s = torch.linspace(-GRID, GRID, points, dtype=torch.float32, device=device)
    p, again, ds = apply(act, s, kind, target)
    wide = s.double().requires_grad_()
    value = act.eager(wide)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    return {
        "level": emit(act, kind, target).level,
        "value": max(_relative(p, value.detach()), _relative(again, value.detach())),
        "derivative": _relative(ds, slope),
    }


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    error = (found.double() - exact).abs() / exact.abs().clamp_min(1.0)
    return float(error.nan_to_num(nan=torch.inf).max())


def can_measure() -> str | None:
    """Why nothing can be measured here; None if it can."""
    if not interpreting() and not torch.cuda.is_available():
        return "it needs a GPU (or TRITON_INTERPRET=1, which measures the portable code only)"
    if machine.versions()["triton"] is None:
        return "Triton is not installed"
    return None


def failures(document: dict[str, Any]) -> list[str]:
    """What exceeds its bound."""
    return [
        f"{name} {dtype} {what}: {errors[what]:.2e} is above {BOUNDS[dtype]:.2e}"
        for name, by_dtype in document["functions"].items()
        for dtype, errors in by_dtype.items()
        for what in ("value", "derivative")
        if not errors[what] <= BOUNDS[dtype]
    ]


def _header(dtype: str) -> str:
    return f"{dtype} (bound {BOUNDS[dtype]:.1e})"


def _cell(errors: dict[str, Any]) -> str:
    return f"{errors['value']:.1e}, {errors['derivative']:.1e} ({errors['level']})"


def table(document: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(
        title=f"{_where(document)}: error of value, of derivative (maths used)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("function")
    for dtype in BOUNDS:
        shown.add_column(_header(dtype), justify="right")
    for name, by_dtype in document["functions"].items():
        shown.add_row(name, *(_cell(by_dtype[dtype]) for dtype in BOUNDS))
    return shown


def markdown(document: dict[str, Any]) -> str:
    """The table of docs/functions.md."""
    lines = ["| function | " + " | ".join(map(_header, BOUNDS)) + " |", "|---" * (1 + len(BOUNDS)) + "|"]
    for name, by_dtype in document["functions"].items():
        lines.append(f"| `{name}` | " + " | ".join(_cell(by_dtype[dtype]) for dtype in BOUNDS) + " |")
    points = document["grid"]["points"]
    lines += [
        "",
        f"Each cell: error of the value, of the derivative (maths used). {_where(document)}, {points:,} points.",
    ]
    return "\n".join(lines)


def _where(document: dict[str, Any]) -> str:
    where = document["gpu"] or "CPU, Triton's interpreter"
    return f"{where}, Triton {document['versions']['triton']}"
