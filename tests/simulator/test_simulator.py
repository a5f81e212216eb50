"""The simulator finds flaws that are planted in a kernel, and agrees with arithmetic done elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run, not compiled", allow_module_level=True)

import triton
import triton.language as tl

import gdpa
from gdpa.backends import tuning
from simulator import arithmetic, launching
from simulator.launching import simulated_hopper
from simulator.memory import SimulationError
from simulator.products import operand
from simulator.ptx import parse


# ---- flaws -----------------------------------------------------------------------------------------------------------
def without(pattern: str, which: int) -> Callable[[str], str]:
    """PTX without one of the places that match."""

    def changed(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[which]
        return ptx[: found.start()] + ptx[found.end() :]

    return changed


def replaced(pattern: str, by: str) -> Callable[[str], str]:
    return lambda ptx: re.sub(pattern, by, ptx)


ARRIVAL = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
FLAWS = {
    "no fences": replaced(r"fence\.proxy\.async\.shared::cta;", ""),
    "an arrival less": without(ARRIVAL, 0),
    "nobody waits for products": replaced(r"(wgmma\.wait_group\.sync\.aligned) \d", r"\1 9"),
    "nobody waits for copies to memory": replaced(r"cp\.async\.bulk\.wait_group(\.read)? \t\d;", ""),
    "nobody waits for loads": replaced(r"@!complete bra\.uni waitLoop;", ""),
}


@pytest.fixture(autouse=True)
def _own_plans() -> Iterator[None]:
    """They are for a number of processors."""
    tuning.forget()
    yield
    tuning.forget()


def gradients(seed: int) -> list[torch.Tensor]:
    """Of two tiles of keys and five blocks of queries."""
    leaves = [t.requires_grad_() for t in torch.randn(3, 1, 1, 260, 64, generator=torch.Generator().manual_seed(0))]
    given = [t.to(torch.bfloat16) for t in leaves]
    with simulated_hopper(processors=2, seed=seed):
        out = gdpa.attention(*given, "silu", backend="hopper")
        return list(torch.autograd.grad(out, given, torch.ones_like(out)))


@pytest.fixture(scope="module")
def right() -> list[torch.Tensor]:
    return gradients(0)


def differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return not all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(some, others, strict=True))


def test_any_order_of_events_gives_the_same(right: list[torch.Tensor]) -> None:
    assert not differ(gradients(1), right)


@pytest.mark.parametrize("name", FLAWS)
def test_flaws_are_found(name: str, right: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = launching.ptx_of

    def flawed(kernel: str, name_of: str) -> str:
        ptx = plain(kernel, name_of)
        if name_of != "backward_kernel":
            return ptx
        changed = FLAWS[name](ptx)
        assert changed != ptx
        return changed

    monkeypatch.setattr(launching, "ptx_of", flawed)
    launching.coder_of.cache_clear()
    found = ""
    try:
        if differ(gradients(1), right) or differ(gradients(2), right):
            found = "other numbers"
    except SimulationError as error:
        found = str(error)
    finally:
        launching.coder_of.cache_clear()
    assert found == "other numbers" or ".py:" in found  # where it is


@triton.jit
def copy_kernel(p_to, p_of, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(p_to + at, tl.load(p_of + at, mask=at < n, other=7.0), mask=at < 100)


@pytest.mark.parametrize(("n", "room", "why"), [(90, 100, None), (101, 100, "a read"), (100, 99, "a write")])
def test_memory_outside_of_tensors_is_not_touched(n: int, room: int, why: str | None) -> None:
    of, to = torch.arange(100.0), torch.zeros(room)
    with simulated_hopper():
        if why is None:
            copy_kernel[(1,)](to, of, n, BLOCK=128)
            assert torch.equal(to, torch.cat((of[:90], torch.full((10,), 7.0))))
        else:
            with pytest.raises(SimulationError, match=rf"{why} of 4 bytes outside of all tensors.*test_simulator.py:"):
                copy_kernel[(1,)](to, of, n, BLOCK=128)


# ---- parts -----------------------------------------------------------------------------------------------------------
def test_scopes_have_names_of_their_own() -> None:
    kernel = parse(
        """.visible .entry k(
        .param .u64 k_param_0
        )
        .reqntid 32
        {
        .reg .b32 %r<2>;
        { .reg .b32 x; again: mov.b32 x, 1; @x bra again; mov.b32 %r1, x; }
        { .reg .b32 x; again: mov.b32 x, 2; @x bra again; }
        ret;
        }"""
    )
    ones, twos = (ins for block in kernel.blocks for ins in block if ins.op == "mov" and ins.args[0] == "x")
    assert ones.names["x"] != twos.names["x"]
    assert ones.labels["again"] < twos.labels["again"]
    assert twos.names["%r1"] == ones.names["%r1"]


def test_arithmetic() -> None:
    some = np.random.default_rng(0).integers(0, 2**32, 32, np.uint32)
    signed, counts = some.view(np.int32), np.arange(32, dtype=np.uint32) * np.uint32(2)
    one, four = np.full(32, 1, np.uint32), np.full(32, 4, np.uint32)
    numbers = [int(x) for x in signed]
    for got, want in (
        (arithmetic.divided(signed, np.full(32, -7, np.int32)), [-int(n / 7) for n in numbers]),
        (arithmetic.right(signed, counts), [n >> min(2 * i, 31) for i, n in enumerate(numbers)]),
        (arithmetic.left(some, counts), [int(x) << 2 * i & 0xFFFFFFFF for i, x in enumerate(some)]),
        (arithmetic.high(signed, signed[::-1]), [a * b >> 32 for a, b in zip(numbers, numbers[::-1], strict=True)]),
        (arithmetic.field_of(signed, four, one), [-(n >> 4 & 1) for n in numbers]),
        (arithmetic.field_of(some, four * 7, four * 2), [int(x) >> 28 for x in some]),
    ):
        assert got.tolist() == want
    floats = torch.randn(32)
    rounded = arithmetic.to_bfloat16(floats.numpy())
    assert torch.equal(torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16), floats.to(torch.bfloat16))
    two = np.full(5, 2, np.float32)
    terms = np.array([1, 2.0**-23, 2.0**-25, -(2.0**-60), 2.0**-60], np.float32)
    below = np.nextafter(two, np.float32(0))
    assert arithmetic.cut_off(two, terms).tolist() == [3, 2, 2, below[0], 2]


def test_products_find_a_swizzled_operand() -> None:
    """A tile of 64 x 64, as the copy engine leaves it: 16 columns of all rows, and 16 rows of all columns."""
    tile = np.arange(64 * 64).reshape(64, 64)
    memory = np.zeros(64 * 64, int)
    for (row, column), value in np.ndenumerate(tile):
        address = row * 128 + column * 2
        memory[(address ^ (address >> 7 & 7) << 4) // 2] = value
    descriptor = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    first = 1024 >> 4  # shared memory begins there
    assert (memory[operand(descriptor | first + (32 >> 4), 64, 0, 0)] == tile[:, 16:32]).all()
    assert (memory[operand(descriptor | first + (2048 >> 4), 64, 1, 0)] == tile[16:32].T).all()
