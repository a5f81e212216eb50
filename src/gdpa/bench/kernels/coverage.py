"""What a run measures when nothing more is asked for, so that a whole one takes about 40 minutes on an H200.

One function on every case, others where a function's cost shows; every layout, and what compiles for seconds per case,
on a few cases. The result says what was left out.
"""

from __future__ import annotations

from gdpa.bench.contenders.everybody import EXACT
from gdpa.bench.contenders.everybody import precisions as offered
from gdpa.bench.contenders.layouts import available, native
from gdpa.testing.cases import Case

EVERYWHERE = "gelu_tanh"
_FOCUS = ("self-2048", "kv256-q1024", "self-2048-d64")
# FlexAttention's log trick needs a positive function.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "gelu": _FOCUS,
    "silu": _FOCUS,
    "relu": _FOCUS,
    "softplus_squared": (*_FOCUS, "jagged-1024"),
}
# torch.compile takes seconds for each case: these are enough to see where its contenders stand.
COMPILED = ("eager-compiled", "flex-log")
COMPILED_CASES = ("self-512", "self-2048", "uniform-1024", "jagged-1024", "kv256-q1024", "causal-2048")


# Elsewhere every case is in the layout of its own: dense ones are (B, H, L, D), others packed with max_seqlen.
LAYOUT_CASES = ("self-256", "self-512", "self-2048", "kv256-q1024", "jagged-1024")


def layouts(case: Case, quick: bool, all_of_them: bool) -> tuple[str, ...]:
    """The layouts measured on a case; ``all_of_them``: for the backend that gdpa prefers and the first function."""
    return available(case) if all_of_them and case.name in LAYOUT_CASES and not quick else (native(case),)


def precisions(quick: bool, all_of_them: bool) -> tuple[str, ...]:
    """The precisions of gdpa measured; ``all_of_them``: for the backend that gdpa prefers, in a case's own layout."""
    return offered() if all_of_them and not quick else (EXACT,)


def functions(case: str, quick: bool) -> tuple[str, ...]:
    """The functions measured on the case of this name."""
    if quick:
        return (EVERYWHERE,)
    return (EVERYWHERE, *(name for name, cases in ELSEWHERE.items() if case in cases))


def left_out(case: Case, contender: str, quick: bool) -> str | None:
    """Why a run that names no contender does without this one; None if it does not."""
    if contender == "flex-log" and case.varlen:
        return (
            "left out: FlexAttention of torch 2.11 fails on it with an illegal access, which would end the run; "
            "--backend flex-log asks for it"
        )
    if contender not in COMPILED or (case.name in COMPILED_CASES and not quick):
        return None
    return f"left out {'with --quick' if quick else 'on this case'}, since it compiles for seconds; " + (
        f"--backend {contender} asks for it"
    )
