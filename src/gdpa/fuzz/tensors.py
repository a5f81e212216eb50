"""The tensors of a drawn call, as they lie in memory: everything around them is NaN, so that reading it shows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from gdpa.exactness.draw import Tensors, shape_scores
from gdpa.exactness.layout import Shape, batches, operand_shapes, output_shape, used_rows
from gdpa.fuzz.draw import Call
from gdpa.fuzz.placed import Draw
from gdpa.testing.cases import Case, Inputs, offsets


def make_tensors(call: Call, device: torch.device, poisoned: bool = False) -> Tensors:
    """The same data at every call. ``poisoned``: with one sequence filled with NaN or inf, as call.poison says."""
    rng = torch.Generator(device=device).manual_seed(call.seed)
    dtype = getattr(torch, call.config.dtype)
    shapes = (*operand_shapes(call.case), output_shape(call.case))
    q, k, v, do = (torch.randn(shape, generator=rng, device=device) for shape in shapes)
    shape_scores(q, k, call.scores, call.true_scale)
    q, k, v, do = (t.to(dtype) for t in (q, k, v + call.v_mean, do))
    params = _params(call, rng, device)
    for name, t, style in zip(("dq", "dk", "dv", "out"), (q, k, v, do), (*call.config.styles, ""), strict=True):
        if style != "expanded":  # its first row may stand for all
            _poison_unused(call.case, name, t)
    if "fused" in call.config.styles:
        q, k, v = _fused(call, q, k, v)
    else:
        q, k, v = (_place(call, t, style) for t, style in zip((q, k, v), call.config.styles, strict=True))
    do = _place_gradient(call, do)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    x = Tensors(Inputs(leaves[0], leaves[1], leaves[2], *_where(call, device)), do, params)
    x = _with_more(call, x, rng)
    if poisoned:
        _poison(call, x)
    return x


def _where(call: Call, device: torch.device) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """cu_seqlens and seqused."""
    case, used = call.case, call.config.used
    kind = torch.int64 if call.config.long_offsets else torch.int32
    return (
        offsets(case.rooms_q, device, kind) if case.packed_q else None,
        offsets(case.rooms_k, device, kind) if case.packed_k else None,
        torch.tensor(case.len_q, dtype=kind, device=device) if used[0] else None,
        torch.tensor(case.len_k, dtype=kind, device=device) if used[1] else None,
    )


def axes(case: Case, t: Tensor) -> tuple[int, int]:
    """(axis of heads, axis of rows) of a tensor of the API."""
    return (1, 2) if not case.varlen else (t.dim() - 2, t.dim() - 3)


def sequence(t: Tensor, b: int, rooms: tuple[int, ...]) -> Tensor:
    """The rows of sequence ``b`` of a tensor of the API, as a view."""
    return t[sum(rooms[:b]) : sum(rooms[: b + 1])] if t.dim() == 3 else t[b]


def _params(call: Call, rng: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    shape = (call.case.heads,) if call.config.per_head_params else ()
    drawn = [p * (0.8 + 0.4 * torch.rand(shape, generator=rng, device=device)) for p in call.f.params]
    return tuple(p.requires_grad_() for p in drawn)


# ---- tables, sinks, and gradients of row sums ------------------------------------------------------------------------
def _with_more(call: Call, x: Tensors, rng: torch.Generator) -> Tensors:
    """With what masks, functions of positions and row sums are given."""
    c = call.config
    draw = Draw(call.case, rng, torch.int64 if c.long_offsets else torch.int32)
    makers = (c.f.tables, None if c.masked is None else c.masked.tables)
    tables, of_mask = (tuple(_place_table(call, t) for t in ((make and make(draw)) or ())) for make in makers)
    x = replace(x, tables=tables, mask_tables=of_mask, sink=_sink(call, rng), dsums=_dsums(call, rng))
    _poison_unread(call, x)
    for t in tables:
        t.requires_grad_(t.is_floating_point() and c.learned)
    return x


def _sink(call: Call, rng: torch.Generator) -> float | Tensor:
    """Not close to 0, and of the size of a few weights."""
    kind = call.config.sink
    if kind == "none":
        return 0.0
    drawn = 0.25 + 1.5 * torch.rand((call.case.heads,) if kind == "per head" else (), generator=rng, device=rng.device)
    return drawn.item() if kind == "number" else drawn.requires_grad_()


def _dsums(call: Call, rng: torch.Generator) -> Tensor | None:
    """In the shape that the API returns, with NaN in rows of no sequence."""
    if call.config.sums != "differentiated":
        return None
    found = torch.randn(output_shape(call.case)[:-1], generator=rng, device=rng.device)
    _poison_unused(call.case, "sums", found)
    return found


def _place_table(call: Call, values: Tensor) -> Tensor:
    """Amid NaN, or numbers that lead far away as an index; with gaps of them where operands are not aligned."""
    values = values.to(getattr(torch, call.config.table_dtype)) if values.is_floating_point() else values
    step = 1 if call.config.aligned else 2
    beyond = torch.nan if values.is_floating_point() else torch.iinfo(values.dtype).max
    shape = (*values.shape[:-1], step * values.shape[-1])
    n = math.prod(shape)
    base = torch.full((n + 3 + 64,), beyond, dtype=values.dtype, device=values.device)
    view = base[3 : 3 + n].view(shape)[..., ::step]
    return view.copy_(values)


@torch.no_grad()
def _poison_unread(call: Call, x: Tensors) -> None:
    """NaN in entries that no visible pair reads: they must not reach anything, and have a gradient of 0."""
    formula, floats = call.formula, {i: t for i, t in enumerate(x.tables) if t.is_floating_point()}
    if not floats:
        return
    read = {i: torch.zeros(t.numel(), dtype=torch.bool, device=t.device) for i, t in floats.items()}
    for part in batches(call.case):
        batch = formula.batch(part, x)
        scores = torch.zeros(torch.broadcast_shapes(batch.keep.shape, (1, call.case.heads, 1, 1)), device=x.do.device)
        params = [p.detach().expand(call.case.heads) for p in x.params]
        for found in formula.derivatives(scores, params, x.tables, batch).reads:
            read[found.table][found.at[batch.keep.expand_as(scores)]] = True
    for i, t in floats.items():
        t.masked_fill_(~read[i].view_as(t), torch.nan)


# ---- memory ----------------------------------------------------------------------------------------------------------
def _block(like: Tensor, shape: Shape, shift: int) -> Tensor:
    """A tensor of NaN that starts ``shift`` elements into its storage, and does not reach its end."""
    n = math.prod(shape)
    return torch.full((n + shift + 64,), torch.nan, dtype=like.dtype, device=like.device)[shift : shift + n].view(shape)


def _place(call: Call, values: Tensor, style: str) -> Tensor:
    """``values`` in the memory layout called ``style``."""
    heads, rows = axes(call.case, values)
    if style == "expanded":  # strides of 0
        axis = heads if values.shape[heads] > 1 else 0
        one = values.narrow(axis, 0, min(1, values.shape[axis]))
        return _place(call, one, "contiguous").expand_as(values)
    shape, index = list(values.shape), [slice(None)] * values.dim()
    if style == "sliced":
        index[heads] = slice(1, 1 + shape[heads])
        shape[heads] += 3
    elif style == "padded":  # 16 bytes are at most 8 elements
        before, after = (8, 8) if call.config.aligned else (3, 2)
        index[-1] = slice(before, before + shape[-1])
        shape[-1] += before + after
    elif style == "strided":
        index[rows] = slice(0, 2 * shape[rows], 2)
        shape[rows] *= 2
    order = list(range(values.dim()))
    if style == "transposed":
        order[heads], order[rows] = rows, heads
    base = _block(values, tuple(shape[i] for i in order), call.shift)
    view = base.permute(order)[tuple(index)]  # a swap is its own inverse
    view.copy_(values)
    return view


def _fused(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one projection: (..., rows, Hq + Hk + Hk, D) in memory."""
    heads, rows = axes(call.case, q)
    together = _place(call, torch.cat([q, k, v], dim=heads), "transposed" if heads < rows else "contiguous")
    parts = together.split([q.shape[heads], k.shape[heads], v.shape[heads]], dim=heads)
    return parts[0], parts[1], parts[2]


def _place_gradient(call: Call, do: Tensor) -> Tensor:
    style = call.config.grad_style
    if style == "scalar":  # what a sum() leaves behind
        return do.new_ones(()).expand_as(do)
    if style == "per row":
        heads, _ = axes(call.case, do)
        return do.narrow(heads, 0, 1).narrow(-1, 0, 1).contiguous().expand_as(do)
    return _place(call, do, style)


def _poison_unused(case: Case, name: str, t: Tensor) -> None:
    """NaN in the rows that no sequence uses of an operand or gradient, which has the rows of the result ``name``."""
    if case.slots_q is None and case.slots_k is None and case.spare == (0, 0):
        return
    rows = t if name == "sums" or t.dim() == 3 else t.flatten(0, 1)
    unused = torch.ones(len(rows), dtype=torch.bool, device=t.device)
    unused[used_rows(case, name, t.device)] = False
    rows[unused] = torch.nan


@torch.no_grad()
def _poison(call: Call, x: Tensors) -> None:
    """Fill what belongs to one sequence alone."""
    assert call.poison is not None
    case, (victim, kind) = call.case, call.poison
    value = {"nan": torch.nan, "inf": torch.inf}[kind]
    sides = [(x.x.k, case.rooms_k), (x.x.v, case.rooms_k)]
    if not case.shared:
        sides.append((x.x.q, case.rooms_q))
    if call.config.grad_style not in ("scalar", "per row"):
        sides.append((x.do, case.rooms_q))
    if x.dsums is not None:
        sides.append((x.dsums[..., None], case.rooms_q))
    for t, rooms in sides:
        sequence(t, victim, rooms).fill_(value)
