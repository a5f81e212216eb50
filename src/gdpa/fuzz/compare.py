"""What is wrong with a result: one rule for whole tensors, one for every element, and bits that must not change.

The first is that of `gdpa check`: at most 2 times (gradients: 3 times) the error of plain PyTorch in the same
precision, relative to the largest value. Beside a long sequence, whose values are large, it would not see a short one
that is plainly wrong. So no element may be further off than a few times what the definition's own roundings explain
(exact.Rounding); and what no pair reaches is exactly zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.bench.cases import Case
from gdpa.check import limit
from gdpa.fuzz.exact import Results, Span, spans

# Roundings add up to 2 standard deviations as exact.Rounding counts them. The largest of 10^7 normal numbers is at 5.
TIMES_ROUNDING = 4.0


@dataclass(frozen=True)
class Finding:
    """Something wrong: with which output, what, and at which element."""

    output: str
    what: str
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """Findings, and for every output its error in units of what is allowed."""

    findings: tuple[Finding, ...]
    ratios: dict[str, float]


def judge(case: Case, got: Results, plain: Results, exact: Results, rounding: Results) -> Verdict:
    findings, ratios = [], {}
    for name, want in exact.items():
        if got[name].shape != want.shape:
            findings.append(Finding(name, f"shape {tuple(got[name].shape)} instead of {tuple(want.shape)}"))
        elif want.numel():
            ratios[name], found = _judge_one(case, name, got[name].double(), plain[name].double(), want, rounding[name])
            findings += found
    return Verdict(tuple(findings), ratios)


def _judge_one(
    case: Case, name: str, got: Tensor, plain: Tensor, want: Tensor, rounding: Tensor
) -> tuple[float, list[Finding]]:
    """Error divided by what is allowed, under the stricter of the two rules, and a finding if that exceeds 1."""
    error = (got - want).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    theirs = float((plain - want).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    largest = max(float(want.abs().max()), 1e-300)
    allowed = limit(name, theirs / largest, case.pairs) * largest
    by_tensor = (error - rounding).clamp_min(0) / max(allowed, 1e-300)
    by_element = torch.where(error == 0, 0.0, error / (TIMES_ROUNDING * rounding))  # x / 0 is inf: must be 0, is not
    ratio = torch.maximum(*(t.masked_fill(t.isnan(), 0.0) for t in (by_tensor, by_element)))  # NaN: inf / inf
    worst = int(ratio.argmax())
    if float(ratio.flatten()[worst]) <= 1:
        return float(ratio.max()), []
    rule = "than plain PyTorch allows" if float(by_tensor.flatten()[worst]) > 1 else "than roundings explain"
    values = [float(t.flatten()[worst]) for t in (got, want, error, TIMES_ROUNDING * rounding)]
    what = (
        f"{values[0]:.6g} instead of {values[1]:.6g}: an error of {values[2]:.3g} is more {rule} "
        f"({int((ratio > 1).sum())} of {ratio.numel()} elements)\n"
        f"    relative to the largest value {largest:.3g}: gdpa {float(error.max()) / largest:.3g}, "
        f"PyTorch {theirs / largest:.3g}, allowed {allowed / largest:.3g}; roundings of this element {values[3]:.3g}"
    )
    return float(ratio.max()), [Finding(name, what, place(case, name, want, worst))]


def place(case: Case, name: str, t: Tensor, flat: int) -> str:
    """Which element that is, in words."""
    if name == "dparams":
        return f"entry {flat}"
    _, heads, d = t.shape
    row, head, column = flat // (heads * d), flat // d % heads, flat % d
    side = "k" if name in ("dk", "dv") else "q"
    rows = [rows_of(span, name) for span in spans(case)]
    if name == "dq" and case.shared:
        rows = rows[:1]
    b = next(b for b, span in enumerate(rows) if row in span)
    lengths = case.len_k if side == "k" else case.len_q
    at = "shared queries" if name == "dq" and case.shared else f"sequence {b}"
    return f"{at}, head {head}, row {row - rows[b].start} of {lengths[b]}, column {column}"


def rows_of(span: Span, name: str) -> range:
    """The rows that a sequence has in the output or gradient called ``name``."""
    start = {"out": span.out, "dq": span.q}.get(name, span.k)
    return range(start, start + (span.len_k if name in ("dk", "dv") else span.len_q))


def leaks(case: Case, clean: Results, dirty: Results, victim: int, rounding: Results, exact_dq: bool) -> list[Finding]:
    """What a disturbed sequence changed in the others. Shared queries and params sum over all sequences, so there it
    must show; dq may be added up in any order unless the mode is deterministic."""
    found = []
    for name in ("out", "dq", "dk", "dv"):
        if name == "dq" and case.shared:
            continue
        changed = ~same_bits(clean[name], dirty[name])
        if name == "dq" and not exact_dq:
            difference = (clean[name].double() - dirty[name].double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            changed = difference > TIMES_ROUNDING * rounding[name]
        mine = rows_of(spans(case)[victim], name)
        changed[mine.start : mine.stop] = False
        if bool(changed.any()):
            worst = int(changed.flatten().int().argmax())
            before, after = (float(r[name].flatten()[worst]) for r in (clean, dirty))
            what = f"sequence {victim} was filled with NaN or inf, and {before:.6g} became {after:.6g}"
            found.append(
                Finding(name, f"{what} ({int(changed.sum())} elements)", place(case, name, clean[name], worst))
            )
    return found


def differences(case: Case, first: Results, second: Results) -> list[Finding]:
    """What a second run in deterministic mode gave differently."""
    found = []
    for name, before in first.items():
        changed = ~same_bits(before, second[name])
        if bool(changed.any()):
            worst = int(changed.flatten().int().argmax())
            values = [float(t.flatten()[worst]) for t in (before, second[name])]
            what = f"deterministic, but a second run gave {values[1]:.9g} after {values[0]:.9g}"
            found.append(Finding(name, f"{what} ({int(changed.sum())} elements)", place(case, name, before, worst)))
    return found


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Element by element: NaN equals itself, and -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(kind) == b.contiguous().view(kind)
