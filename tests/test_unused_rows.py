"""Rows in no sequence: behind the last one (a batch of fixed capacity), and behind the used part of a slot.

Nothing reads them, so inputs have NaN there; outputs and gradients have zeros, whatever their memory held before. All
others are those of the same sequences end to end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.testing.cases import offsets
from support import Target, f16, f32, poisoned, targets

HEADS, HEADS_K, D, DV = 2, 1, 8, 16


@dataclass(frozen=True)
class Side:
    """Lengths of sequences, and the rows that each has room for; ``end`` more rows behind all of them."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...] | None = None  # None: as many as are used
    end: int = 0
    dense: int | None = None  # rows of each sequence in a (B, L, H, D)

    @property
    def rows(self) -> int:
        return sum(self.slots or self.lengths) + self.end

    def spread(self, t: Tensor, fill: float) -> Tensor:
        """Rows (T, H, D) of sequences end to end, where this side has them; ``fill`` elsewhere."""
        starts = offsets(self.slots or self.lengths).tolist()
        if self.dense is not None:
            starts = [b * self.dense for b in range(len(self.lengths))]
        rows = self.rows if self.dense is None else len(self.lengths) * self.dense
        out = torch.full((rows, *t.shape[1:]), fill, dtype=t.dtype)
        for start, part in zip(starts, t.split(list(self.lengths)), strict=False):
            out[start : start + len(part)] = part
        return out if self.dense is None else out.view(-1, self.dense, *t.shape[1:])

    def internal(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2) if self.dense is not None else t.transpose(0, 1)[None]

    def where(self, dtype: torch.dtype, device: str) -> tuple[Tensor | None, Tensor | None]:
        """cu_seqlens and seqused."""
        cu = None if self.dense is not None else offsets(self.slots or self.lengths, device, dtype)
        given = self.slots is not None or self.dense is not None
        return cu, torch.tensor(self.lengths, dtype=dtype, device=device) if given else None


FORMS = {
    "end": (Side((5, 0, 17), end=20), Side((9, 4, 3), end=7)),
    "slots": (Side((5, 0, 17), (7, 6, 17)), Side((9, 4, 0), (20, 4, 33))),
    "slots-and-end": (Side((5, 0, 17), (5, 3, 30), end=40), Side((9, 4, 3), (16, 4, 3), end=2)),
    "dense-keys": (Side((5, 2, 17), (8, 2, 20)), Side((9, 0, 3), dense=12)),
    "many-dense-keys": (Side((5, 2, 9), end=3), Side((20, 0, 3), dense=30)),
    "no-sequences": (Side((), end=5), Side((), end=3)),
}
BANDS = {"": Band(), "causal": Band(None, 0)}


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f32,)))
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_each_backend(form: tuple[Side, Side], band: Band, target: Target) -> None:
    q_side, k_side = form
    draw = torch.Generator().manual_seed(0)

    def rows(side: Side, heads: int, d: int) -> Tensor:
        return torch.randn(sum(side.lengths), heads, d, generator=draw).to(target.dtype)

    q, k, v, do = rows(q_side, HEADS, D), rows(k_side, HEADS_K, D), rows(k_side, HEADS_K, DV), rows(q_side, HEADS, DV)
    want = run(q, k, v, do, Side(q_side.lengths), Side(k_side.lengths), band, Target("reference", target.dtype))
    got = run(q, k, v, do, q_side, k_side, band, target)
    for name, side in (("out", q_side), ("dq", q_side), ("dk", k_side), ("dv", k_side)):
        spread = side.spread(want[name].cpu(), 0.0)
        torch.testing.assert_close(got[name].cpu(), spread, rtol=2e-3, atol=2e-3)
        unused = side.spread(torch.ones_like(want[name].cpu()), 0.0) == 0
        assert not got[name].cpu()[unused].any()


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    q_side: Side,
    k_side: Side,
    band: Band,
    target: Target,
    hint: int | None = None,
) -> dict[str, Tensor]:
    """Output and gradients by a backend, in poisoned memory."""
    device, kind = target.device, torch.int64 if q_side.end else torch.int32
    sides = (q_side, k_side, k_side, q_side)
    q, k, v, do = (side.spread(t, torch.nan).to(device) for side, t in zip(sides, (q, k, v, do), strict=True))
    (cu_q, used_q), (cu_k, used_k) = q_side.where(kind, device), k_side.where(kind, device)
    x = Operands(
        q_side.internal(q), k_side.internal(k), k_side.internal(v), cu_q, cu_k, None, used_q, used_k
    )  # fmt: skip
    problem = make_problem(x, (from_name("sigmoid"),), 0.3, 0.5, band, hint, hint)
    out, dq, dk, dv = (poisoned(*t.shape, like=t) for t in (do, q, k, v))
    backend = backends.get(target.backend)
    assert backend.supports(problem) is None
    backend.forward(problem, x, q_side.internal(out))
    gradients = q_side.internal(dq), k_side.internal(dk), k_side.internal(dv)
    backend.backward(problem, x, q_side.internal(do), *gradients, None)
    first = {"dq": dq.clone(), "dk": dk, "dv": dv}
    if band.unbounded:  # once is enough
        return {"out": out, **first}
    torch.use_deterministic_algorithms(True)
    dq.fill_(torch.nan)
    backend.backward(problem, x, q_side.internal(do), q_side.internal(dq), *gradients[1:], None)
    torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(dq, first["dq"], rtol=1e-2, atol=1e-3)
    return {"out": out, **first}


@pytest.mark.parametrize("target", targets(f32, f16, interpret=(f32,)))
def test_a_hint_that_is_too_small_changes_nothing(target: Target) -> None:
    """One that no check has seen: sequences of one tile, of several, and of none, though 1 key is promised."""
    q_side, k_side = Side((5, 3, 17), end=2), Side((20, 0, 5), end=1)
    draw = torch.Generator().manual_seed(0)
    shapes = ((q_side, D), (k_side, D), (k_side, DV), (q_side, DV))
    x = [torch.randn(sum(s.lengths), HEADS, d, generator=draw).to(target.dtype) for s, d in shapes]
    want, *others = (run(*x, q_side, k_side, Band(), target, hint) for hint in (None, 1, 100))
    for got in others:
        for name, t in want.items():
            torch.testing.assert_close(got[name], t, rtol=1e-2 if target.dtype == f16 else 1e-5, atol=1e-3)


# ---- by the API ------------------------------------------------------------------------------------------------------
CU = offsets((4, 0, 6))
USED = torch.tensor([3, 0, 2])


def attend(q: Tensor, k: Tensor, backend: str | None, **kwargs: object) -> list[Tensor]:
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    out = gdpa.attention_varlen(q, k, k, CU, kwargs.pop("cu_k", CU), "silu", causal=True, backend=backend, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, (q, k), torch.ones_like(out))]


@pytest.mark.parametrize("keys", ["packed", "dense"])
def test_the_reference_agrees_with_the_operator(keys: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    q = torch.randn(15, 2, 4, dtype=torch.float64)
    k = torch.randn(3, 6, 2, 4, dtype=torch.float64) if keys == "dense" else q
    kwargs = {"seqused_k": USED, "cu_k": None} if keys == "dense" else {"seqused_q": USED, "seqused_k": USED}
    got, want = attend(q, k, None, **dict(kwargs)), attend(q, k, "reference", **dict(kwargs))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    out = want[0]
    assert not out[10:].any()
    assert out[:3].any()


def test_functions_per_head_and_queries_shared_by_all() -> None:
    torch.use_deterministic_algorithms(True)
    x = torch.randn(14, 4, 4, dtype=torch.float64)
    q = torch.randn(2, 4, 4, dtype=torch.float64)

    def grads(backend: str | None) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, x[:, :2])]
        kwargs = {"seqused_k": USED, "backend": backend}
        out = gdpa.attention_varlen(leaves[0], leaves[1], leaves[1], None, CU, ["relu", "silu"] * 2, **kwargs)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    for g, w in zip(grads(None), grads("reference"), strict=True):
        torch.testing.assert_close(g, w)


BAD = {
    "type": ({"seqused_k": [1, 2, 3]}, TypeError, r"seqused_k must be a tensor or None, got list"),
    "dtype": ({"seqused_q": USED.float()}, TypeError, r"seqused_q must be int32 or int64, got torch.float32"),
    "shape": ({"seqused_k": CU}, ValueError, r"seqused_k must have one length per sequence, shape \(3,\), got \(4,\)"),
    "device": (
        {"seqused_k": USED.to("meta")},
        ValueError,
        r"seqused_k must be on q's device \(cpu\), but it is on meta",
    ),
    "stride": (
        {"seqused_q": torch.zeros(6).long()[::2]},
        ValueError,
        "seqused_q must be contiguous, but its stride is 2",
    ),
    "negative": ({"seqused_q": USED - 1}, ValueError, r"seqused_q must lie between 0 .* got -1 of 0 for b=1"),
    "too many": ({"seqused_k": USED + 5}, ValueError, r"seqused_k must lie between 0 .* got 8 of 4 for b=0"),
    "shared": ({"seqused_q": USED, "cu_seqlens_q": None}, ValueError, "seqused_q was given without cu_seqlens_q"),
    "bound": ({"seqused_k": USED, "max_seqlen_k": 2}, ValueError, r"max_seqlen_k=2 is less than the longest .*\(3\)"),
}


@pytest.mark.parametrize(("kwargs", "error", "text"), BAD.values(), ids=BAD.keys())
def test_refused(kwargs: dict[str, object], error: type[Exception], text: str) -> None:
    q = torch.randn(10, 2, 4)
    with pytest.raises(error, match=text):
        gdpa.attention_varlen(q, q, q, **{"cu_seqlens_q": CU, "cu_seqlens_k": CU, **kwargs})


def test_a_bound_is_one_on_what_is_used() -> None:
    q = torch.randn(10, 2, 4)
    gdpa.attention_varlen(q, q, q, CU, CU, seqused_k=USED, max_seqlen_k=3)


def test_flops_are_those_of_used_rows() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q = torch.randn(12, 2, 4)
    for kwargs, pairs in (({}, 16 + 36), ({"seqused_k": USED}, 12 + 12), ({"seqused_q": USED}, 12 + 12)):
        with FlopCounterMode(display=False) as counter:
            gdpa.attention_varlen(q, q, q, CU, CU, **kwargs)
        assert counter.get_total_flops() == 2 * 2 * pairs * 8


def test_replaced_operands_keep_used_lengths() -> None:
    """heads.py hands on what it does not slice."""
    q = torch.randn(1, 2, 10, 4)
    x = Operands(q, q, q, CU, CU, None, USED, USED)
    assert replace(x, q=q[:, :1]).used_k is USED
