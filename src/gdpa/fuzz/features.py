"""What is worth counting about a call."""

from __future__ import annotations

from collections.abc import Iterator

from gdpa.fuzz.draw import FAR, Call


def features(call: Call) -> Iterator[tuple[str, str]]:
    """(group, value) of everything worth counting."""
    c, case = call.config, call.case
    yield "layout", c.layout
    yield "dtype", c.dtype
    yield "D, Dv", f"{c.d}" if c.d == c.dv else f"{c.d}/{c.dv}"
    yield "heads", "equal" if c.group == 1 else "MQA" if c.heads_k == 1 else "GQA"
    yield "function", c.function
    yield "lengths", call.pattern
    yield from (("has lengths", name) for name in _special_lengths(call))
    yield from (("unused rows", name) for name in _unused(call))
    yield "band", _band(call)
    yield "mask", c.mask or "none"
    divided = "list" if isinstance(c.normalize, tuple) else c.normalize
    yield "row sums", f"{divided}, sink: {c.sink}" if c.normalize else "none"
    if c.normalize:
        yield "weights_sum", c.sums
    yield "places", _places(call)
    if c.f.tables is not None:
        yield "float tables", c.table_dtype
    for style in dict.fromkeys(c.styles):
        yield "memory", style
    yield "memory", "aligned" if c.aligned else "unaligned"
    yield "do", c.grad_style
    if case.varlen:
        yield "offsets", "int64" if c.long_offsets else "int32"
        yield "max_seqlen", "given" if (call.max_q, call.max_k) != (None, None) else "not given"
    if c.f.params:
        yield "params", "per head" if c.per_head_params else "scalar"
    yield "scores", "centred" if call.scores.mean == 0 else "near" if call.scores.near else "far"
    yield "mean of v", f"{call.v_mean:g}"
    yield "mode", "deterministic" if c.deterministic else "any order"
    yield from (("also", name) for name in _disturbances(call))
    yield "scale", "default" if call.scale is None else "zero" if call.scale == 0 else "given"
    yield "out_scale", "1" if call.out_scale == 1 else "zero" if call.out_scale == 0 else "given"


def _special_lengths(call: Call) -> Iterator[str]:
    both = (*call.case.len_q, *call.case.len_k)
    if not both:
        yield "no sequences"
    elif not any(both):
        yield "all empty"
    elif 0 in both:
        yield "0"
    if 1 in both:
        yield "1"
    if any(n > 1 and (n % 64 in (0, 1, 63)) for n in both):
        yield "64 m - 1, 0, + 1"
    if call.case.pairs == 0 and any(both):
        yield "no pair"


def _unused(call: Call) -> Iterator[str]:
    kinds = ("seqused_q", "seqused_k", "q after the last", "k after the last")
    there = (*call.config.used, *call.case.spare)
    yield from [kind for kind, some in zip(kinds, there, strict=True) if some] or ["none"]


def _band(call: Call) -> str:
    left, right = call.case.band
    if left is None and right is None:
        return "none"
    if call.case.window is None:
        return "causal"
    longest = max((*call.case.len_q, *call.case.len_k), default=0)
    if all(side is None or longest <= side <= FAR for side in (left, right)):
        return "wider than everything"
    kind = "one-sided" if left is None or right is None else "diagonal" if left == right == 0 else "two-sided"
    return f"{kind}, causal" if call.case.causal else kind


def _places(call: Call) -> str:
    f = call.f
    if not f.at:
        return "none"
    if f.tables is None:
        return "positions"
    return "learned tables" if call.config.learned else "tables"


def _disturbances(call: Call) -> Iterator[str]:
    if call.poison:
        yield f"{call.poison[1]} in a neighbour"
    if call.repeat:
        yield "run twice"
