"""From a Graph to Triton source, and from the source to JIT functions.

For each Activation, dtype and target three functions are emitted:

    load_params(p_params, stride, h)   the params of head h, as a tuple of scalars
    forward(s, params)                 p
    backward(s, params)                p, dp/ds, dp/dparam...

and for "sm90" two more, ``forward_packed`` and ``backward_packed``, which return p rounded to the data's dtype, from
one block of PTX where the function has such a form (see ptx.py). Guarded code leaves the rounding to the kernel, and
has ``forward_careful`` beside it, the same without a vote. Functions with params also have

    products(s, dp, ds_scale, params, skips)  p and ds, both rounded, and terms of the params' gradients; if it
                                              ``skips`` these scores, whose s and dp are 0, all of that may be 0
    gains(params)                             what the sums of these terms are to be multiplied by

A constant factor of f is left out of them and handed back: ``factor`` of the forward functions, ``backward_factor`` of
the others. It belongs to ``out_scale``.
"""

from __future__ import annotations

import importlib
import linecache
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import dedent
from typing import Any

import torch

from gdpa.functions import stored
from gdpa.functions.accuracy.precision import choose_level, keeps_rounding
from gdpa.functions.emission.guarded import Guard, choose_guard, choose_guard_of_sums
from gdpa.functions.emission.ptx import (
    GUARDED_LANES,
    PACK,
    Block,
    assemble,
    assemble_guarded,
    fused_products,
)
from gdpa.functions.emission.source import (
    body_lines,
    function_text,
    packed_functions,
    products_functions,
    rounded_lines,
    usual_functions,
)
from gdpa.functions.graph import Graph, Ref, vanishes_at_zero
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.passes.expand import expand
from gdpa.functions.passes.fold import factor_of, fold
from gdpa.functions.passes.products import split_products
from gdpa.functions.passes.regroup import regroup
from gdpa.functions.passes.simplify import value_of
from gdpa.functions.passes.stretch import UNITS, Stretch, best_units, composed, split_stretch
from gdpa.functions.places.emit import columns_source, function, placed_source, shifted_source
from gdpa.functions.places.learned.source import learn_shifted_source, learn_source
from gdpa.functions.places.pairs import blocks_of_pairs
from gdpa.functions.places.terms.bias import bias_source
from gdpa.functions.places.terms.source import voted_source
from gdpa.functions.traced import Shift, TracedFunction

# What device code is made for: kernels of these data on these machines.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TARGETS = ("sm90", "cuda", "hip", "interpret")


@dataclass(frozen=True)
class Emitted:
    """The source of one function for one dtype and target, and the factors of f that it leaves to ``out_scale``."""

    name: str
    source: str
    factor: float
    backward_factor: float
    level: str  # of the value (see precision.py)
    packed_level: str  # of the value in ``forward_packed``: the same, or "guarded" (see guarded.py)
    backward_level: str  # of the value with its derivatives
    zero_at_zero: bool  # p is exactly 0 at 0, however it is computed
    long_operations: tuple[str, ...]  # those that need many registers
    short_value: bool  # the value is one block of PTX,
    short_backward: bool = False  # and so is the value with its derivatives,
    backward_operations: int = 0  # of so many instructions
    units: float = 1.0  # of sums that wait for a vote (see places/terms)
    bias: bool = False  # there is code for the terms of a shift alone (see places/terms/bias.py)


@kept_with_activation
def emit(
    act: TracedFunction, dtype: torch.dtype, target: str, scale: float = 1.0, of_leaves: bool = False
) -> Emitted:  # fmt: skip
    """Triton source for ``act`` of ``scale * s``; PTX shortcuts only on NVIDIA targets, and only for 16-bit data. If it
    is ``of_leaves``, some of its params differ from score to score: see ``_placed``."""
    if act.placed is not None:
        return _placed(act, dtype, target, scale)
    if act.triton is not None:
        if scale != 1.0:
            raise ValueError(
                f"hand-written code of {act.name!r} takes scaled scores, so scale={scale} cannot be folded"
            )
        return _handwritten(act, dtype, target)
    file = stored.file_of(("emitted", act.name, act.key, dtype, target, scale))
    known = stored.read(file)
    if known is not None:
        return Emitted(**{**known, "long_operations": tuple(known["long_operations"])})
    made = _emitted(act, dtype, target, scale, of_leaves)
    stored.write(file, asdict(made))
    return made


def _emitted(act: TracedFunction, dtype: torch.dtype, target: str, scale: float, of_leaves: bool) -> Emitted:
    codes = _codes(act, dtype, target, scale, of_leaves)
    alone, joint = codes.alone, codes.joint
    block, stretch, units = _forward_block(codes, dtype, scale)
    packed_level = codes.level if block is None or not block.votes else "guarded"
    names = ("p", "ds", *(f"dparam{i}" for i in range(act.n_params)))
    bodies = body_lines(alone, codes.level, names[:1]), body_lines(joint, codes.backward_level, names)
    kinds = {"": codes.level, "packed ": packed_level, "backward ": codes.backward_level}
    shown = ", ".join(f"{which}{one}" for which, one in kinds.items() if not which or one != codes.level)
    source = usual_functions(act, shown, (codes.factor, codes.backward_factor), *bodies, target)
    short_backward = False
    if target == "sm90" and dtype in PACK:
        backward = assemble(joint, codes.backward_level, dtype)
        short_backward = backward is not None
        source += packed_functions(act, dtype, block, backward, stretch, scale / units)
        if act.n_params and not of_leaves:
            source += _backward_with_params(act, codes, dtype, scale, short_backward)
        if packed_level == "guarded":
            careful = assemble(alone, codes.level, dtype)
            source += function_text("forward_careful", rounded_lines(act, dtype, careful))
    return Emitted(
        act.name, source, codes.factor, codes.backward_factor, codes.level, packed_level, codes.backward_level,
        zero_at_zero=vanishes_at_zero(alone) and vanishes_at_zero(codes.cheap), long_operations=_long_operations(joint),
        short_value=block is not None, short_backward=short_backward,
        backward_operations=sum(n.op != "input" for n in joint.nodes) - len(fused_products(joint)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Codes:
    """The graphs of a function's code, folded: of the value (``alone``), of a cheaper one where there is a guard, and
    of the value with its derivatives; with their levels, and the factors of f that they leave out."""

    level: str
    backward_level: str
    factor: float
    backward_factor: float
    alone: Graph
    joint: Graph
    guard: Guard | None
    cheap: Graph
    stretch: Stretch | None  # what the guard's vote is about, if not the scores (see passes/stretch.py),
    outers: tuple[Graph, ...]  # and the functions of that, by the two codes


def _codes(act: TracedFunction, dtype: torch.dtype, target: str, scale: float, of_leaves: bool) -> _Codes:
    # A sum of scores and leaves may lie anywhere, so its function is as accurate as the whole must be.
    whole = act.part_of or act
    level, backward_level = (choose_level(whole, dtype, target, derivatives) for derivatives in (False, True))
    guard = (choose_guard if act.part_of is None else choose_guard_of_sums)(act, dtype, target)
    value = value_of(act.joint)
    alone, joint = expand(value, level), expand(act.joint, backward_level)
    cheap = expand(value, guard.cheap) if guard else alone
    stretch = split_stretch(value) if guard and act.part_of is None else None
    n_params = whole.n_params  # what else a part takes differs from score to score
    outers = tuple(expand(stretch.outer, one) for one in (level, guard.cheap)) if guard and stretch else ()
    factor, backward_factor = _factors(act, cheap, joint, dtype, scale, n_params)
    if stretch is not None and not of_leaves:
        factor = _stretched_factor(act, stretch, outers[1], factor, dtype, scale)
    alone, cheap, joint = (
        fold(graph, scale, c, n_params) for graph, c in ((alone, factor), (cheap, factor), (joint, backward_factor))
    )
    return _Codes(level, backward_level, factor, backward_factor, alone, joint, guard, cheap, stretch, outers)


def _forward_block(codes: _Codes, dtype: torch.dtype, scale: float) -> tuple[Block | None, Stretch | None, float]:
    """The value as one block of PTX, what it takes instead of scores, and in which units."""
    guard, stretch, units = codes.guard, codes.stretch, scale
    both: Sequence[Graph] = (codes.alone, codes.cheap)
    if guard is not None:
        if stretch is not None:
            # The factor of the scores takes in whatever constant the cheap code would begin with.
            rest = codes.factor / scale**stretch.power  # which is of the scores as they come
            alike = int(stretch.power == 0)  # whether the second input is the same for all scores
            units = scale if stretch.factor is None else best_units(codes.outers[1], rest, scale, alike)
            both = [composed(fold(outer, units, rest, alike), stretch) for outer in codes.outers]
        stretched = stretch is not None and stretch.factor is not None
        threshold = guard.threshold / units
        block = assemble_guarded(both[1], guard.cheap, both[0], codes.level, threshold, dtype, stretched)
        if block is not None:
            return block, stretch, units
    return assemble(codes.alone, codes.level, dtype), None, units


def _backward_with_params(act: TracedFunction, codes: _Codes, dtype: torch.dtype, scale: float, short: bool) -> str:
    derivatives = regroup(expand(act.joint, codes.backward_level))
    split = split_products(derivatives, scale, codes.backward_factor, dtype == torch.float16)
    return products_functions(act, dtype, codes.backward_level, split if short else None)


def _placed(act: TracedFunction, dtype: torch.dtype, target: str, scale: float) -> Emitted:
    """The code of the function of scores and leaves, and around it that of the leaves."""
    assert act.placed is not None
    program, learned, shift = act.placed.program, act.placed.learned, act.placed.shift
    columns = program if target == "sm90" else None
    if shift is not None and scale == 1.0:
        return _of_shifted(act, shift, dtype, target)
    inner = emit(act.placed.inner, dtype, target, scale, of_leaves=True)
    source = inner.source + placed_source(act.name, inner.name, act.n_params, program, learned, columns)
    if target == "sm90":
        source += columns_source(act.name, program)
    if learned:
        source += learn_source(act.name, act.n_params, program, learned)
    return replace(inner, name=act.name, source=source, zero_at_zero=False, short_value=False)


def _of_shifted(act: TracedFunction, shift: Shift, dtype: torch.dtype, target: str) -> Emitted:
    """The same for a function of a sum of the score and leaves."""
    assert act.placed is not None
    outer, n = emit(shift.outer, dtype, target), shift.joint.n_inputs - 1
    grads = [f"dleaf{i}" for i in range(n)]
    body = body_lines(shift.joint, "accurate", ("u", "du", *grads))
    unpack = [f"param{i} = leaves[{i}]" for i in range(n)]  # inputs after the first are called so
    sums = function(f"{act.name}_shift(s, leaves)", [*unpack, *body, f"return {', '.join(['u', *grads])}"])
    program, learned = act.placed.program, act.placed.learned
    columns = program if target == "sm90" else None
    blocks = blocks_of_pairs(program, value_of(shift.joint)) if target == "sm90" else None
    hoppers, bias, units = "", "", 1.0
    if target == "sm90":
        hoppers, units = voted_source(act.name, shift, program, dtype, blocks, body_lines)
        bias = bias_source(act.name, shift, program, body_lines)
        hoppers += columns_source(act.name, program) + bias
    source = outer.source + sums + shifted_source(act.name, outer.name, program, learned, blocks, columns) + hoppers
    if learned:
        source += learn_source(act.name, 0, program, learned)
    if learned and target == "sm90":
        constant = {i for i in learned if not isinstance(shift.joint.outputs[2 + i], Ref)}
        source += learn_shifted_source(act.name, program, learned, constant)
    return replace(
        outer, name=act.name, source=source, zero_at_zero=False, short_value=False, units=units, bias=bias != ""
    )


def _factors(
    act: TracedFunction, alone: Graph, joint: Graph, dtype: torch.dtype, scale: float, n_params: int
) -> tuple[float, float]:
    """What each of the two leaves to ``out_scale``: of both constant factors the one that makes its code shorter."""
    if dtype == torch.float16:  # f = c g must not overflow as g does, so there the factor stays
        return 1.0, 1.0

    def best(graph: Graph) -> float:
        return min(candidates, key=lambda c: len(fold(graph, scale, c, n_params).nodes))

    found = [factor_of(graph, scale, n_params) for graph in (alone, joint)]
    candidates = [*(c for c in found if keeps_rounding(act, dtype, c, scale)), 1.0]
    return best(alone), best(joint)


def _stretched_factor(
    act: TracedFunction, stretch: Stretch, outer: Graph, factor: float, dtype: torch.dtype, scale: float
) -> float:  # fmt: skip
    """The same for ``outer`` of stretched scores, which may be in any units: ``factor`` or one of its own."""
    if dtype == torch.float16 or stretch.factor is None:
        return factor
    power, alike = scale**stretch.power, int(stretch.power == 0)
    found = [factor_of(outer, units, alike) * power for units in UNITS]
    candidates = [factor, 1.0, *(c for c in dict.fromkeys(found) if keeps_rounding(act, dtype, c, scale))]

    def length(c: float) -> int:
        return min(len(fold(outer, units, c / power, alike).nodes) for units in (*UNITS, scale))

    return min(candidates, key=length)


# Library routines of a hundred instructions and more, most of them with a table or float64 inside: on a whole tile of
# scores 8 to 115 KB of spilled registers, and minutes of the assembler's time.
LONG = {"sin", "cos", "tan", "asin", "acos", "atan2", "fmod", "remainder"}


def _long_operations(graph: Graph) -> tuple[str, ...]:
    wide = {"float64"} if any(n.dtype == torch.float64 for n in graph.nodes) else set()
    return tuple(sorted(wide | {n.op for n in graph.nodes} & LONG))


def _handwritten(act: TracedFunction, dtype: torch.dtype, target: str) -> Emitted:
    value, both = (dedent(code).strip().splitlines() for code in (act.triton.forward, act.triton.backward))
    source = usual_functions(act, "hand-written", (1.0, 1.0), value, both, "any")
    if target == "sm90" and dtype in PACK:
        source += packed_functions(act, dtype, None, None)
        source += products_functions(act, dtype, "accurate", None) if act.n_params else ""
    level = "hand-written"
    return Emitted(
        act.name, source, 1.0, 1.0, level, level, level, zero_at_zero=False, long_operations=(), short_value=False
    )


@dataclass(frozen=True)
class JitFunctions:
    """The emitted functions, compiled by Triton when a kernel that takes them as constexpr is."""

    load_params: Any
    forward: Any
    backward: Any
    packed_forward: Any | None  # for Hopper
    packed_scores: int  # a thread must hold so many to use it; more than 1: it is guarded
    careful_forward: Any | None  # the same without a vote
    packed_backward: Any | None
    products: Any | None  # the same with params,
    gains: Any | None
    factor: float
    backward_factor: float
    zero_at_zero: bool
    learn: Any | None = None  # adds to the gradients of tables
    shift: Any | None = None  # of a function of a sum of the score and leaves: that sum,
    shift_for_vote: Any | None = None  # the same for guarded code, of unscaled scores and in these units
    units: float = 1.0
    learn_shifted: Any | None = None  # ``learn`` for it
    columns: Any | None = None  # what Hopper's kernels look up for a tile's columns
    bias_of_queries: Any | None = None  # of the shift's terms, if none belongs to both: those of queries,
    bias_of_keys: Any | None = None  # and all others


@kept_with_activation
def jit_functions(act: TracedFunction, dtype: torch.dtype, target: str, scale: float = 1.0) -> JitFunctions:
    """JIT functions of ``act``: made once, so that kernels specialised on them are found again.

    With a ``scale`` they take the unscaled scores: p = f(scale * s), and the derivative is by s.
    """
    emitted = emit(act, dtype, target, scale)
    scope = compiled(act, f"<gdpa {emitted.name} {act.key} {dtype} {target} {scale}>", emitted.source)
    forward, backward = scope[f"{emitted.name}_forward"], scope[f"{emitted.name}_backward"]
    return JitFunctions(
        scope["load_params"], forward, backward, scope.get("forward_packed"),
        GUARDED_LANES if emitted.packed_level == "guarded" else 1,
        scope.get("forward_careful", scope.get("forward_packed")), scope.get("backward_packed"),
        scope.get("products"), scope.get("gains"),
        emitted.factor, emitted.backward_factor, emitted.zero_at_zero, scope.get(f"{emitted.name}_learn"),
        scope.get(f"{emitted.name}_shifted"), scope.get(f"{emitted.name}_shifted_for_vote"), emitted.units,
        scope.get(f"{emitted.name}_learn_shifted"), scope.get(f"{emitted.name}_columns"),
        scope.get(f"{emitted.name}_bias_of_queries"), scope.get(f"{emitted.name}_bias_of_keys"),
    )  # fmt: skip


def compiled(owner: Any, filename: str, source: str) -> dict[str, Any]:
    """The JIT functions of ``source`` by name, for as long as ``owner`` lives."""
    import triton
    import triton.language as tl

    from gdpa.device.sources import read_quickly

    with read_quickly():
        from gdpa.device import maths, places
    # Triton reads a function's source through inspect, which finds it here; no file is written.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(owner, linecache.cache.pop, filename, None).atexit = False
    scope: dict[str, Any] = {"triton": triton, "tl": tl, "maths": maths, "places": places}
    if "once." in source:  # for Gluon's kernels alone: other releases of Triton may not have it
        scope["once"] = importlib.import_module("gdpa.device.once")
    scope |= {"__name__": "gdpa.functions.emitted", "__source__": source}  # by which compiled kernels are found again
    exec(compile(source, filename, "exec"), scope)
    return scope
