"""What a run measures when nothing more is asked for, so that a whole one ends in about eight minutes on an H200.

One function on every case, others where a function's cost shows; what compiles for seconds per case only at the larger
head dimension. The result says what was left out.
"""

from __future__ import annotations

from gdpa.bench.cases import Case

EVERYWHERE = "gelu_tanh"
_FOCUS = ("self-2048", "kv256-q1024", "self-2048-d64")
# FlexAttention's log trick needs a positive function: the one that has it is also shown on jagged sequences.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "gelu": _FOCUS,
    "silu": _FOCUS,
    "relu": _FOCUS,
    "softplus_squared": (*_FOCUS, "jagged-1024"),
}
COMPILED = "eager-compiled"  # torch.compile takes seconds for each case


def functions(case: str, quick: bool) -> tuple[str, ...]:
    """The functions measured on the case of this name."""
    if quick:
        return (EVERYWHERE,)
    return (EVERYWHERE, *(name for name, cases in ELSEWHERE.items() if case in cases))


def left_out(case: Case, contender: str, quick: bool) -> str | None:
    """Why a run that names no contender does without this one; None if it does not."""
    if contender != COMPILED or not (quick or case.d < 128):
        return None
    where = "with --quick" if quick else "at this head dimension"
    return f"left out {where}, since it compiles for seconds; --backend {contender} asks for it"
