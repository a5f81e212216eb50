"""The code of a problem as one constant of a kernel: Triton's caches know its functions by their source."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no compiled kernels", allow_module_level=True)

import triton
import triton.language as tl

from fake_gpu import fake_hopper
from gdpa.backends.triton.code import Code
from gdpa.backends.triton.launching import bind
from gdpa.functions.emit import compiled

TEXT = "@triton.jit\ndef f(x):\n    return inner(x)\n\n\n@triton.jit\ndef inner(x):\n    return x * {}\n"
NUMBERS = count()


class Owner:
    """Of emitted code."""


OWNER = Owner()


@dataclass(frozen=True, repr=False)
class OneFunction(Code):
    F: Any
    GAIN: float = 1.0


@triton.jit
def apply_kernel(p, CODE: tl.constexpr):
    tl.store(p, CODE.F(tl.load(p)) * CODE.GAIN)


def function(factor: float) -> Any:
    """A function of its own: all of them have the same name, and call another of the same name."""
    return compiled(OWNER, f"<code {next(NUMBERS)}>", TEXT.format(factor))["f"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with fake_hopper():
        yield
    forget()


def forget() -> None:
    """As if in another process."""
    apply_kernel.device_caches.clear()


def launch(code: Code) -> Any:
    return apply_kernel[(1,)](torch.zeros(1), CODE=code, num_warps=1, enable_fp_fusion=True)


def test_a_key_is_that_of_the_sources() -> None:
    two, again, three = (OneFunction(function(factor)) for factor in (2.0, 2.0, 3.0))
    assert (two.cache_key, repr(two)) == (again.cache_key, repr(again))
    others = [two, three, OneFunction(two.F, 2.0), OneFunction(two.F, 1), OneFunction(None)]
    assert len({code.cache_key for code in others}) == len({repr(code) for code in others}) == len(others)


def test_equal_code_is_compiled_once_and_other_code_again() -> None:
    two, again, three = (OneFunction(function(factor)) for factor in (2.0, 2.0, 3.0))
    first = launch(two)
    assert launch(OneFunction(two.F)) is first
    assert launch(again) is first
    others = [first, launch(three), launch(OneFunction(two.F, 4.0))]
    for kernel, factors in zip(others, ("2", "3", "24"), strict=True):
        assert [n for n in "234" if f"{n}.000000e+00" in kernel.asm["ttir"]] == list(factors)
    forget()
    assert [launch(code).hash for code in (again, three, OneFunction(two.F, 4.0))] == [kernel.hash for kernel in others]
    assert len({kernel.hash for kernel in others}) == 3


def test_edited_code_is_compiled_again() -> None:
    code = OneFunction(function(2.0))
    first = launch(code)
    code.F._unsafe_update_src("def f(x):\n    return x + 7.0\n")
    second = launch(code)
    assert second.hash != first.hash
    assert "7.000000e+00" in second.asm["ttir"]


def test_kernels_are_bound_and_launched_by_their_code() -> None:
    holder: dict[Any, Any] = {}
    two, three = function(2.0), function(3.0)
    options: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}
    bounds = [bind(holder, apply_kernel, CODE=OneFunction(f), **options) for f in (two, two, three)]
    assert bounds[0] is bounds[1] is not bounds[2]
    x = torch.zeros(1)
    for bound in bounds:
        bound((1,), x)
    assert bounds[0].compiled(0, (x,)).hash != bounds[2].compiled(0, (x,)).hash
