"""What is wrong with a result: one rule for whole tensors, one for every element, and bits that must not change.

The first is that of `gdpa check`: the accuracy contract in 16 bits, 2 times (gradients: 3 times) the error of plain
PyTorch, relative to the largest value, in float32. Beside a long sequence, whose values are large, it would not see a
short one that is plainly wrong. So no element may be further off than a few times what the definition's own roundings
explain (exact.Rounding); and what no pair reaches is exactly zero. Beside row sums, that is all that is asked of a few
gradients of params, tables and sinks in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gdpa.commands.verification import limit
from gdpa.exactness import rules
from gdpa.exactness.layout import spans
from gdpa.exactness.results import Results, Truth
from gdpa.fuzz.draw import Call
from gdpa.testing.cases import Case

# Roundings add up to 2 standard deviations as exact.Rounding counts them. The largest of 10^7 normal numbers is at 5.
TIMES_ROUNDING = 4.0
FEW_SUMS = 64  # of which an RMS is luck


@dataclass(frozen=True)
class Finding:
    """Something wrong: with which output, what, and at which element."""

    output: str
    what: str
    where: str = ""


@dataclass(frozen=True)
class Verdict:
    """Findings, and numbers to keep the worst of: by (kind, output). Kinds are those of KINDS."""

    findings: tuple[Finding, ...]
    ratios: dict[tuple[str, str], float]


KINDS = {
    "allowed": "largest error / what is allowed",
    "definition": "rms error / the definition's",
    "plain": "rms error / plain PyTorch's",
}


def judge(call: Call, got: Results, plain: Results, definition: Results, truth: Truth, rounding: Results) -> Verdict:
    """By both rules."""
    findings: list[Finding] = []
    ratios: dict[tuple[str, str], float] = {}
    for name, want in truth.values.items():
        if got[name].shape != want.shape:
            findings.append(Finding(name, f"shape {tuple(got[name].shape)} instead of {tuple(want.shape)}"))
            return Verdict(tuple(findings), ratios)
        if want.numel():
            by_plain = call.config.dtype == "float32" and name != "sums"  # of which roundings say enough
            theirs = plain[name].double() if by_plain else None
            ratio, found = _judge_elements(call.case, name, got[name].double(), theirs, want, rounding[name])
            ratios["allowed", name] = ratio
            findings += found
    if call.config.dtype != "float32" and call.independent:
        values = {n: t for n, t in truth.values.items() if n != "sums" and not _is_luck(call, t, rounding[n])}
        asked = truth._replace(values=values)
        for c in rules.compare(call.scores, [got], [asked], [definition], [plain], few_terms=True):
            if call.scores.near:
                ratios["definition", c.name] = c.to_definition
            ratios["plain", c.name] = c.to_plain
            findings += [Finding(c.name, text.partition(": ")[2]) for text in c.problems]
    return Verdict(tuple(findings), ratios)


def _is_luck(call: Call, exact: Tensor, rounding: Tensor) -> bool:
    """Whether a result beside row sums is judged by what roundings explain alone. Gradients carry the errors of outputs
    that were rounded to 16 bits. Where rows have a single key they are nothing else, as exact ones are 0; and of few
    sums over all pairs the ratio of two errors is luck."""
    few = exact.dim() == 1 and exact.numel() < FEW_SUMS
    return call.config.normalize is not None and (few or bool((exact.abs() <= rounding).all()))


def _judge_elements(
    case: Case, name: str, got: Tensor, plain: Tensor | None, want: Tensor, rounding: Tensor
) -> tuple[float, list[Finding]]:
    """The largest error divided by what is allowed, and a finding if that exceeds 1. ``plain``: what gives a limit for
    the whole tensor too, in float32."""
    error = torch.where(got == want, 0.0, got - want).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    ratio = torch.where(error == 0, 0.0, error / (TIMES_ROUNDING * rounding))  # x / 0 is inf: must be 0, is not
    rule, more = "than roundings explain", ""
    if plain is not None:
        largest = max(float(want.abs().max()), 1e-300)
        theirs = float((plain - want).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max()) / largest
        allowed = limit(name, theirs, case.pairs) * largest
        by_tensor = (error - rounding).clamp_min(0) / max(allowed, 1e-300)
        if float(by_tensor.nan_to_num(nan=0.0).max()) > 1:
            rule = "than plain PyTorch allows"
        ratio = torch.maximum(*(t.masked_fill(t.isnan(), 0.0) for t in (ratio, by_tensor)))  # NaN: inf / inf
        more = (
            f"\n    relative to the largest value {largest:.3g}: gdpa {float(error.max()) / largest:.3g}, "
            f"PyTorch {theirs:.3g}, allowed {allowed / largest:.3g}"
        )
    ratio = ratio.masked_fill(ratio.isnan(), 0.0)
    worst = int(ratio.argmax())
    if float(ratio.flatten()[worst]) <= 1:
        return float(ratio.max()), []
    values = [float(t.flatten()[worst]) for t in (got, want, error, TIMES_ROUNDING * rounding)]
    what = (
        f"{values[0]:.6g} instead of {values[1]:.6g}: an error of {values[2]:.3g} is more {rule} "
        f"({int((ratio > 1).sum())} of {ratio.numel()} elements); roundings of this element {values[3]:.3g}{more}"
    )
    return float(ratio.max()), [Finding(name, what, place(case, name, want, worst))]


def place(case: Case, name: str, t: Tensor, flat: int) -> str:
    """Which element that is, in words."""
    if t.dim() == 1:
        return f"entry {flat}"
    _, heads, d = t.shape
    row, head, column = flat // (heads * d), flat // d % heads, flat % d
    side = "k" if name in ("dk", "dv") else "q"
    rows = [span.rows(name) for span in spans(case)]
    if name == "dq" and case.shared:
        rows = rows[:1]
    b = next((b for b, span in enumerate(rows) if row in span), None)
    if b is None:
        return f"row {row}, of no sequence, head {head}, column {column}"
    lengths = case.len_k if side == "k" else case.len_q
    at = "shared queries" if name == "dq" and case.shared else f"sequence {b}"
    return f"{at}, head {head}, row {row - rows[b].start} of {lengths[b]}, column {column}"


def leaks(case: Case, clean: Results, dirty: Results, victim: int, rounding: Results, exact_dq: bool) -> list[Finding]:
    """What a disturbed sequence changed in the others. Shared queries and params sum over all sequences, so there it
    must show; dq may be added up in any order unless the mode is deterministic."""
    found = []
    for name in ("out", "sums", "dq", "dk", "dv"):
        if name not in clean or (name == "dq" and case.shared):
            continue
        changed = ~same_bits(clean[name], dirty[name])
        if name == "dq" and not exact_dq:
            difference = (clean[name].double() - dirty[name].double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
            changed = difference > TIMES_ROUNDING * rounding[name]
        mine = spans(case)[victim].rows(name)
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
