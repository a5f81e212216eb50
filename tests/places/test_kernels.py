"""What only kernels can get wrong: reads outside of tables, poison in what others own, compilation anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa import masks
from gdpa.functions.activation import resolve_one
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from support import FULL, GPU, INTERPRET, Target, f32, targets

kernels = pytest.mark.parametrize("target", targets(f32, backends=("triton",)))
every = pytest.mark.parametrize("target", targets(f32, backends=("cpu", "triton")))


def attend(target: Target, fn: Any, table: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv, dtable of two packed sequences of 7 and 20 rows."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(27, 2, 8, generator=rng).to(target.device).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 7, 27], device=target.device)
    table = table.to(target.device).requires_grad_()
    out = gdpa.attention_varlen(q, k, v, cu, cu, fn, tables=(table,), backend=target.backend, **kwargs)
    return tuple(t.cpu() for t in (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v, table))))


def by_distance(s, t, *, q_idx, kv_idx):
    return F.silu(s + t[q_idx - kv_idx + 12])


@kernels
def test_indices_out_of_range_read_zero_and_write_nothing(target: Target) -> None:
    """The table lies between sentinels: nothing of them is seen, and its gradient is that of a longer one."""
    memory = torch.full((2000,), 1e30)
    memory[1000:1020] = torch.linspace(-1, 1, 20)
    longer = torch.zeros(64)
    longer[:20] = memory[1000:1020]

    def fn(s, t, *, q_idx, kv_idx):  # 20 rows give -7 to 31; the first seven wrap around
        return F.silu(s + t[torch.where(q_idx - kv_idx + 12 < 0, 63, q_idx - kv_idx + 12)])

    got = attend(target, fn, memory[1000:1020])
    want = attend(target, fn, longer)
    for a, b in zip(got[:4], want[:4], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got[4], want[4][:20])


@kernels
def test_checked_indices(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDPA_CHECK", "1")
    with pytest.raises(IndexError, match=r"out of range for dimension 0 of tables\[0\], whose shape is \(20,\)"):
        attend(target, by_distance, torch.zeros(20))
    attend(target, by_distance, torch.zeros(20), window=(7, 7))


NO_BAND = masks.causal() | gdpa.Mask(lambda kv_idx: kv_idx < 0)  # causal, but told as a mask (see places/bands.py)


@every
def test_poison_of_another_sequence(target: Target) -> None:
    def gated(s, t, *, q_row, kv_row):
        return F.silu(s) * t[q_row] + t[kv_row]

    clean = torch.linspace(-1, 1, 27)
    before, behind = (slice(7), slice(7, None)), (slice(7, None), slice(7))
    ways = ((None, (before, behind)), (NO_BAND, (before, behind)))
    if INTERPRET and not FULL:
        ways = ((None, (before,)), (NO_BAND, (behind,)))
    for mask, places in ways:
        want = attend(target, gated, clean, mask=mask)
        for others, own in places:
            poisoned = clean.clone()
            poisoned[others] = torch.nan
            for a, b in zip(want, attend(target, gated, poisoned, mask=mask), strict=True):
                assert torch.equal(a[own], b[own])


@every
def test_a_masked_entry_poisons_nothing(target: Target) -> None:
    """The table's NaN is looked up by invisible pairs only: those after the query."""
    table = torch.linspace(-1, 1, 40)
    table[:12] = torch.nan
    for kwargs in ({"causal": True}, {"mask": NO_BAND}):
        out, dq, dk, dv, dtable = attend(target, by_distance, table, **kwargs)
        assert all(t.isfinite().all() for t in (out, dq, dk, dv, dtable))
        assert (dtable[:12] == 0).all()


@pytest.mark.skipif(INTERPRET or not GPU, reason="needs a GPU")
@pytest.mark.triton
def test_new_sizes_compile_nothing() -> None:
    from gdpa.backends.triton.forward import forward_kernel

    target = Target("triton", f32)
    attend(target, by_distance, torch.zeros(33))
    compiled = len(forward_kernel.device_caches[torch.cuda.current_device()][0])
    for size in (34, 48, 1024):
        attend(target, by_distance, torch.zeros(size))
    assert len(forward_kernel.device_caches[torch.cuda.current_device()][0]) == compiled


@pytest.mark.parametrize(
    ("rows", "asks_for_rows", "is_small"), [(1000, True, True), (2**19, False, True), (2**19, True, False)]
)
def test_short_conversions_need_small_positions(rows: int, asks_for_rows: bool, is_small: bool) -> None:
    """Eight batch entries: their rows count only where a function asks for them."""
    pytest.importorskip("triton")
    from gdpa.backends.triton import tables

    def near(s, *, q_idx, kv_idx):
        return s - (q_idx - kv_idx).abs()

    def in_memory(s, *, q_row, kv_row):
        return s - (q_row - kv_row).abs()

    q = torch.empty(8, 1, rows, 8, device="meta")
    problem = make_problem(Operands(q, q, q), (resolve_one(in_memory if asks_for_rows else near, 0),), 1.0, 1.0, Band())
    _, numbers = tables.places(problem, Operands(q, q, q))
    assert (numbers.small is not None) == is_small


@kernels
def test_numbers_beyond_32_bits(target: Target) -> None:
    """Positions are computed in 32 bits, where a number such as 2^31 would be unsigned, or is refused by Triton."""
    q, k, v = torch.randn(3, 1, 1, 20, 8, device=target.device, dtype=target.dtype)
    mask = masks.window(2**31, 2**31) & (lambda q_idx, kv_idx: torch.minimum(q_idx, kv_idx + 3_000_000_000) == q_idx)
    out = gdpa.attention(q, k, v, "silu", mask=mask, backend=target.backend)
    torch.testing.assert_close(out, gdpa.attention(q, k, v, "silu", backend=target.backend))


@every
def test_numbers_beyond_the_dtype_of_a_table(target: Target) -> None:
    """In torch they become numbers of that dtype."""
    rows = torch.arange(-100, 100, 10, dtype=torch.int8, device=target.device)

    def shown(q_idx: Tensor, kv_idx: Tensor, t: Tensor) -> Tensor:
        return (t[q_idx] > 300) & (t[kv_idx] - 200 < t[q_idx] * 3)

    q, k, v = torch.randn(3, 1, 1, 20, 8, device=target.device, dtype=target.dtype)
    out = gdpa.attention(q, k, v, "silu", mask=gdpa.Mask(shown, (rows,)), backend=target.backend)
    i = torch.arange(20, device=target.device)
    want = torch.where(shown(i[:, None], i, rows), F.silu(q @ k.mT * 8**-0.5), 0.0) @ v
    torch.testing.assert_close(out, want)
