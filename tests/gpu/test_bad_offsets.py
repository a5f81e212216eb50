"""Offsets that nobody checked: kernels may compute nonsense, but never write outside the outputs.

Runs on a GPU, and under Triton's interpreter. The backend is called directly, as the operator would refuse on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import backends
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, make_problem
from gdpa.testing.cases import offsets
from support import GPU, INTERPRET, in_turn, on_each_gpu_backend

DEVICE = "cuda" if GPU and not INTERPRET else "cpu"
HEADS, D, ROWS_Q, ROWS_K = 2, 16, 24, 20
GUARD = 2**16  # elements on either side: several tiles of any kernel
SENTINEL = 12288.0  # a number of every dtype

BAD = {
    "start": [5, 12, 20],
    "negative": [-100, -3, 20],
    "decreasing": [0, 18, 7],
    "past-the-end": [0, 10, 1000],
    "all-past-the-end": [900, 950, 1000],
    "backwards": [20, 10, 0],
    "largest": [0, 2**31 - 1, 2**31 - 1],
    "smallest": [0, -(2**31), 20],
    "overlapping": [0, 20, 0],
    "short": [0, 3, 6],  # allowed: the other rows are in no sequence
}
REFUSED = {name: cu for name, cu in BAD.items() if cu[0] >= 0 and name != "short"}


class Guarded:
    """A tensor with room on both sides that must stay as it is."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        n = torch.Size(shape).numel()
        self.memory = torch.full((n + 2 * GUARD,), SENTINEL, dtype=dtype, device=DEVICE)
        self.tensor = self.memory[GUARD : GUARD + n].view(shape)
        self.tensor.zero_()

    def is_intact(self) -> bool:
        return bool((self.memory[:GUARD] == SENTINEL).all() and (self.memory[-GUARD:] == SENTINEL).all())


def surrounded_by_nan(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values in the middle of NaN, which show up in results if they are read."""
    n = torch.Size(shape).numel()
    memory = torch.full((n + 2 * GUARD,), float("nan"), device=DEVICE, dtype=dtype)
    memory[GUARD : GUARD + n] = torch.randn(n)
    return memory[GUARD : GUARD + n].view(shape)


def packed_view(t: Tensor) -> Tensor:
    """(rows, H, D) as backends see it."""
    return t.transpose(0, 1)[None]


CAUSAL = Band(None, 0)


def run_unchecked(
    cu_q: Tensor, cu_k: Tensor, backend: str, rows_q: int = ROWS_Q, rows_k: int = ROWS_K, band: Band = CAUSAL
) -> None:
    """Forward and backward on tensors with guards, which must stay intact, and on inputs among NaN, never read."""
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    q, k, v, do = (surrounded_by_nan(n, HEADS, D, dtype=dtype) for n in (rows_q, rows_k, rows_k, rows_q))
    x = Operands(*(packed_view(t) for t in (q, k, v)), cu_q, cu_k)
    problem = make_problem(x, (from_name("silu"),), D**-0.5, 1.0, band)
    chosen = backends.get(backend)
    assert chosen.supports(problem) is None
    results = [Guarded(n, HEADS, D, dtype=dtype) for n in (rows_q, rows_q, rows_k, rows_k)]
    out, dq, dk, dv = (packed_view(result.tensor) for result in results)
    chosen.forward(problem, x, out)
    chosen.backward(problem, x, packed_view(do), dq, dk, dv, None)
    for result in results:
        assert result.is_intact()
        assert result.tensor.isfinite().all()


# On which side, whether sums are in a fixed order, and of what type.
SIDES = {
    "q": ("q", False, torch.int32),
    "both-deterministic": ("both", True, torch.int64),
    "k": ("k", False, torch.int64),
    "both": ("both", False, torch.int32),
}


@pytest.mark.triton
@on_each_gpu_backend
@pytest.mark.parametrize(
    ("bad", "way"),
    [(bad, way) for i, bad in enumerate(BAD) for way in (in_turn(tuple(SIDES), i) if INTERPRET else SIDES)],
)
def test_nothing_is_written_outside(bad: str, way: str, backend: str) -> None:
    side, deterministic, dtype = SIDES[way]
    torch.use_deterministic_algorithms(deterministic)
    wrong = torch.tensor(BAD[bad], dtype=dtype, device=DEVICE)
    good_q, good_k = offsets((17, 7), DEVICE, dtype), offsets((3, 17), DEVICE, dtype)
    run_unchecked(wrong if side in ("q", "both") else good_q, wrong if side in ("k", "both") else good_k, backend)


@pytest.mark.triton
@on_each_gpu_backend
def test_rows_of_no_sequence(backend: str) -> None:
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    run_unchecked(none, none, backend)


@pytest.mark.triton
@on_each_gpu_backend
def test_sequences_that_overlap_many_times(backend: str) -> None:
    """More tiles than rows can hold."""
    often = torch.tensor([0, ROWS_K] * (8 if INTERPRET else 40), dtype=torch.int32, device=DEVICE)
    run_unchecked(often, often, backend)


@pytest.mark.hopper
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("rows", [(700, 600), (600, 600), (1500, 600)], ids=str)
@pytest.mark.parametrize("bad", [[0, 300, 5000], [0, 600] * 20, [0, 500, 100, 2000], [600, 150, 0]], ids=str)
def test_tiles_of_keys_do_not_wait_for_ever(bad: list[int], rows: tuple[int, int], deterministic: bool) -> None:
    """Sums of dq go from tile to tile: the list may end in the middle of a sequence, and the same offsets may be cut to
    different lengths of queries and keys."""
    torch.use_deterministic_algorithms(deterministic)
    wrong = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
    run_unchecked(wrong, wrong, "hopper", *rows, Band())
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", REFUSED.values(), ids=REFUSED.keys())
def test_gdpa_check_refuses_them_on_a_gpu(bad: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.tensor(bad, device="cuda")
    q, k = (torch.randn(rows, HEADS, D, device="cuda") for rows in (ROWS_Q, ROWS_K))
    gdpa.attention_varlen(q, k, k, wrong, wrong)  # nonsense, but no harm
    torch.cuda.synchronize()
    monkeypatch.setenv("GDPA_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q must"):
        gdpa.attention_varlen(q, k, k, wrong, wrong)
    good = offsets((17, 7), "cuda")
    with pytest.raises(ValueError, match="cu_seqlens_k must not end"):
        gdpa.attention_varlen(q, k, k, good, torch.tensor([0, 3, 21], device="cuda"))
    gdpa.attention_varlen(q, k, k, good, offsets((3, 17), "cuda"))
    with pytest.raises(ValueError, match=r"max_seqlen_q=16 is less than the longest sequence \(17\)"):
        gdpa.attention_varlen(q, k, k, good, offsets((3, 17), "cuda"), max_seqlen_q=16)
