"""`gdpa check`: a person's function on every backend of this machine, against float64.

In 16 bits a result passes by the accuracy contract (gdpa.exactness), on scores of several means and spreads. In float32
its error, max |x - exact| / max |exact|, may be 2 times (values) or 3 times (gradients) that of plain PyTorch.
Functions may be divided by their sum over the row (docs/rowsums.md).

Without a GPU the Triton kernels are checked too, on tiny cases under Triton's interpreter: in a process of its own,
since Triton decides when it is imported. `python -m gdpa.commands.verification` is that process.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gdpa import backends
from gdpa.arguments.normalizing import SOFTMAX
from gdpa.bench.contenders.everybody import why_not
from gdpa.exactness import results, rules
from gdpa.exactness.draw import Scores, Tensors, draw
from gdpa.exactness.results import Formula
from gdpa.functions.activation import Activation
from gdpa.spec import Loaded, load_normalized
from gdpa.testing.cases import Case, dense

if TYPE_CHECKING:
    from rich.table import Table

FACTORS = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0, "dparams": 3.0, "dtables": 3.0, "dsink": 3.0}
DTYPES = ("float32", "bfloat16", "float16")
CHECKED = tuple(name for name in backends.BACKENDS if name != "reference")  # which the others are checked against

CAPTION = (
    "Against float64. 16 bits: rms error divided by that of the definition with its own roundings (ok: at most 1.15)\n"
    "and by plain PyTorch's (ok: at most 1), the worst of several means and spreads of scores. Above a limit is ok\n"
    "if so few numbers are compared that it may be chance, as with dparams; 0.00: a few float32 roundings, or less.\n"
    "float32: max |x - exact| / max |exact| (ok: 2 times PyTorch's for values, 3 for gradients, and a few roundings)."
)
# Centred and wide, and means on either side; beyond [-8, 8] a function need not be defined (require_finite).
SCORES = (Scores(0, 2.5), Scores(-2.5, 1), Scores(2.5, 0.5), Scores(-5, 0.7), Scores(5, 0.7))

CASES = (
    dense("dense", 2, 65, 80, heads=4, d=32, causal=True),
    Case("jagged", (0, 37, 64, 1, 18), (9, 37, 5, 0, 40), heads=4, d=32, packed_q=True, packed_k=True),
)
TINY_CASES = (
    dense("dense", 1, 18, 20, heads=2, d=16, causal=True),
    Case("jagged", (0, 17, 3), (5, 18, 0), heads=2, d=16, packed_q=True, packed_k=True),
)


@dataclass(frozen=True)
class Row:
    """One backend, dtype and case, each number the worst over the scores. By quantity: ``errors`` (ours, PyTorch's),
    and in 16 bits ``ratios`` of RMS errors (to the definition's, to PyTorch's). ``problems``: what fails, in words."""

    backend: str
    dtype: str
    case: str
    errors: dict[str, tuple[float, float]]
    ratios: dict[str, tuple[float, float]]
    problems: list[str]

    @property
    def failed(self) -> list[str]:
        """The quantities that fail. Where PyTorch overflows in this precision, so may we."""
        return list(dict.fromkeys(text.partition(":")[0] for text in self.problems))

    @property
    def overflows(self) -> bool:
        return any(math.isinf(theirs) for _, theirs in self.errors.values())


@dataclass(frozen=True)
class Report:
    """All rows, and what was not run and why."""

    rows: list[Row]
    not_run: dict[str, str]

    @property
    def ok(self) -> bool:
        return bool(self.rows) and not any(row.failed for row in self.rows)

    @property
    def compared(self) -> bool:
        """Whether PyTorch's own results are finite anywhere: what overflows agrees with nothing."""
        return any(math.isfinite(theirs) for row in self.rows for _, theirs in row.errors.values())


def check(
    loaded: Loaded,
    dtypes: tuple[str, ...] = DTYPES,
    interpret: bool = True,
    step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check a function on every backend that runs here, and on Triton's interpreter where there is no GPU."""
    act = loaded.compile()
    require_finite(act, loaded.params)
    report = Report([], {})
    for name in CHECKED:
        if name == "triton" and _starts_interpreter(interpret):
            _add_interpreted(report, loaded, dtypes, step)
            continue
        for dtype in dtypes:
            place = device_for(name, dtype)
            if isinstance(place, str):
                report.not_run[f"{name}, {dtype}"] = place
                continue
            step(f"{name} {dtype}")
            tiny = backends.interpreting() and name == "triton"
            cases, scores = (TINY_CASES, SCORES[:2]) if tiny else (CASES, SCORES)
            report.rows.extend(check_case(case, loaded, act, name, dtype, place, scores) for case in cases)
    return report


def steps(dtypes: tuple[str, ...], interpret: bool) -> int:
    """How many steps ``check`` takes on this machine."""
    by_process = "triton" if _starts_interpreter(interpret) else None
    here = [device_for(name, dtype) for name in CHECKED if name != by_process for dtype in dtypes]
    return sum(isinstance(place, torch.device) for place in here) + (by_process is not None and _has_triton())


def _starts_interpreter(interpret: bool) -> bool:
    return interpret and not torch.cuda.is_available() and not backends.interpreting()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def device_for(backend: str, dtype: str) -> torch.device | str:
    """Where ``backend`` runs: the GPU, else the CPU, else the reason why it does not."""
    on_gpu = torch.cuda.is_available() and not backends.interpreting()
    devices = [torch.device(d) for d in (("cuda", "cpu") if on_gpu else ("cpu",))]
    reasons = {device: why_not(backend, device, getattr(torch, dtype)) for device in devices}
    for device, reason in reasons.items():
        if reason is None:
            return device
    return str(reasons[devices[0]])


def require_finite(act: Activation, params: tuple[float, ...]) -> None:
    """Refuse to compare NaN with NaN: f and its derivatives must be finite where scores are."""
    s = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    values = act.joint.evaluate(s, *(torch.full_like(s, p) for p in params))
    names = ("f(s)", "df/ds", *(f"df/dparam{i}" for i in range(len(params))))
    for name, value in zip(names, values, strict=True):
        bad = s[~value.isfinite()]
        if len(bad):
            raise ValueError(
                f"{name} is inf or NaN at s = {bad[0]:.2f} and {len(bad) - 1} more of {len(s)} points in [-8, 8]; "
                "guard the argument (clamp it, or torch.where before the operation, not after it)"
            )


def check_case(
    case: Case, loaded: Loaded, act: Activation, backend: str, dtype: str, device: torch.device,
    all_scores: tuple[Scores, ...] = SCORES,
) -> Row:  # fmt: skip
    """Errors of one backend, and of eager PyTorch, on one case."""
    kind, formula = getattr(torch, dtype), Formula.of(case, loaded.function, normalize=_rounded_as(loaded))
    call = {"activation": act, "normalize": loaded.normalize, "backend": backend}
    params = [_per_head(p, case, device) for p in loaded.params]
    row = Row(backend, dtype, case.name, {}, {}, [])
    if kind == torch.float32:
        x = draw(case, SCORES[0], kind, device, params=params)
        _judge_float32(row, formula, x, results.ours(formula, x, **call))
        return row
    for i, scores in enumerate(all_scores):
        x = draw(case, scores, kind, device, seed=i, params=params, v_mean=i % 2, do_mean=i % 2 / 2)
        _judge(row, formula, scores, x, results.ours(formula, x, **call))
    return row


def _rounded_as(loaded: Loaded) -> str | None:
    """How the definition divides: of softmax the row's maximum is subtracted before p is rounded."""
    return SOFTMAX if loaded.spec == SOFTMAX else loaded.normalize


def _judge(row: Row, formula: Formula, scores: Scores, x: Tensors, ours: results.Results) -> None:
    """By the contract."""
    for found in rules.measure(formula, scores, [x], lambda _: ours):
        row.problems.extend(found.problems)
        before = row.ratios.get(found.name, (0.0, 0.0))
        row.ratios[found.name] = (max(before[0], found.to_definition if scores.near else 0.0),
                                  max(before[1], found.to_plain))  # fmt: skip
        if found.name not in row.errors or found.to_plain > before[1]:
            row.errors[found.name] = (found.ours.rms, found.plain.rms)


def _judge_float32(row: Row, formula: Formula, x: Tensors, ours: results.Results) -> None:
    """By plain PyTorch's largest error, on centred scores: in a function's tail the rounding of a score decides, which
    is different in every product."""
    exact, plain = results.exact(formula, x).values, results.plain(formula, x)
    for name, want in exact.items():
        if not want.numel():
            continue
        mine, theirs = _error(ours[name], want), _error(plain[name], want)
        allowed = limit(name, theirs, formula.case.pairs)
        if not mine <= allowed:
            row.problems.append(f"{name}: error {mine:.3g}, allowed {allowed:.3g}")
        row.errors[name] = (mine, theirs)


def limit(name: str, theirs: float, pairs: int) -> float:
    """The largest error allowed in float32 where PyTorch's is ``theirs``. Where that is exact by luck, a few roundings
    are still allowed; dparams, dtables and dsink sum over all pairs in float32."""
    slack = math.sqrt(pairs) if name in ("dparams", "dtables", "dsink") else 4.0
    return FACTORS[name] * theirs + slack * torch.finfo(torch.float32).eps


def _per_head(value: float, case: Case, device: torch.device) -> Tensor:
    """A param that differs from head to head: within 10 % of ``value``."""
    return value * torch.linspace(0.9, 1.1, case.heads, device=device)


def _error(found: Tensor, exact: Tensor) -> float:
    """max |found - exact| / max |exact|; infinite where something overflowed."""
    worst = (found.double() - exact).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max()
    return float(worst / exact.abs().max().clamp_min(1e-300))


def _add_interpreted(report: Report, loaded: Loaded, dtypes: tuple[str, ...], step: Callable[[str], None]) -> None:
    """The Triton kernels on the CPU, in a process that has TRITON_INTERPRET set."""
    name = "triton (interpreter)"
    if not _has_triton():
        report.not_run["triton"] = "Triton is not installed"
        return
    step(f"{name}, in a process of its own")
    done = subprocess.run(
        [sys.executable, "-m", "gdpa.commands.verification"],
        input=json.dumps(
            {"spec": loaded.spec, "params": loaded.params, "normalize": loaded.normalize, "dtypes": dtypes}
        ),
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the check under Triton's interpreter failed to run:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    report.rows.extend(Row(**{**row, "backend": name}) for row in answer["rows"])
    report.not_run.update({key.replace("triton", name, 1): why for key, why in answer["not_run"].items()})


def not_run(reasons: dict[str, str]) -> list[str]:
    """A line for each backend and reason, with its dtypes."""
    found: dict[tuple[str, str], list[str]] = {}
    for what, why in reasons.items():
        backend, _, dtype = what.partition(", ")
        found.setdefault((backend, why), []).append(dtype)
    return [f"{backend} {', '.join(dtypes)}".rstrip() + f": {why}" for (backend, why), dtypes in found.items()]


WHICH = ("backend", "dtype", "case", "error of")


def table(report: Report, title: str) -> Table:
    """Two lines per backend, dtype and case: two ratios in 16 bits, our errors and PyTorch's in float32."""
    from rich import box
    from rich.table import Table

    names = [name for name in FACTORS if any(name in row.errors for row in report.rows)]
    shown = Table(title=title, caption=CAPTION, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for name in WHICH:
        shown.add_column(name)
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("verdict")
    previous = None
    for row in report.rows:
        if previous not in (None, (row.backend, row.dtype)):
            shown.add_section()
        previous = (row.backend, row.dtype)
        numbers, labels, form = (
            (row.ratios, ("gdpa / definition", "gdpa / PyTorch"), ".2f") if row.ratios
            else (row.errors, ("gdpa", "PyTorch"), ".1e")
        )  # fmt: skip
        first, second = ([format(numbers[name][i], form) if name in numbers else "" for name in names] for i in (0, 1))
        first = [f"[red]{cell}[/]" if name in row.failed else cell for name, cell in zip(names, first, strict=True)]
        shown.add_row(row.backend, row.dtype, row.case, labels[0], *first, _verdict(row))
        shown.add_row("", "", "", labels[1], *second, style="" if row.ratios else "dim")
    return shown


def _verdict(row: Row) -> str:
    if row.failed:
        return f"[red]FAIL: {', '.join(row.failed)}[/]"
    return "[yellow]ok, overflows as PyTorch does[/]" if row.overflows else "[green]ok[/]"


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    loaded = replace(load_normalized(request["spec"], request["normalize"]), params=tuple(request["params"]))
    report = check(loaded, tuple(request["dtypes"]))
    rows = [asdict(row) for row in report.rows if row.backend == "triton"]
    return {"rows": rows, "not_run": {k: v for k, v in report.not_run.items() if k.startswith("triton")}}


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
