"""The sign of a weight in the last bits of its derivative, as the backward of normalize="abs" keeps it: in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from gdpa.backends.hopper import row_sums
from gdpa.backends.hopper.backward import function


class Values(torch.Tensor):
    """With Triton's way to look at the bits."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


class Language(SimpleNamespace):
    int32, float32, constexpr = torch.int32, torch.float32, object
    minimum = staticmethod(lambda a, b, propagate_nan: torch.clamp(a, max=b))  # which keeps NaN
    maximum = staticmethod(lambda a, b, propagate_nan: torch.clamp(a, min=b))

    @staticmethod
    def where(condition: torch.Tensor, a: Any, b: Any) -> Any:
        a, b = (getattr(x, "value", x) for x in (a, b))
        if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
            a = torch.full_like(condition, a, dtype=torch.int32 if isinstance(a, int) else torch.float32)
        return torch.where(condition, a, b).as_subclass(Values)


def in_torch(kernel_function: Any, **names: Any) -> Any:
    """A function of a kernel, as one of tensors."""
    fn = kernel_function.fn
    found = {k: getattr(v, "value", v) if type(v).__name__ == "constexpr" else v for k, v in fn.__globals__.items()}
    return type(fn)(fn.__code__, {**found, "gl": Language, "finished": lambda x: x, **names}, fn.__name__)


tagged, through_sums = in_torch(row_sums.tagged), in_torch(row_sums.through_sums)
times_slope = in_torch(function.times_slope, unless_hidden=in_torch(function.unless_hidden))


@pytest.mark.parametrize("gain", [1.0, -0.5])
def test_dp_less_what_the_row_takes_of_it(gain: float) -> None:
    torch.manual_seed(0)
    e, slope, dp = (torch.randn(64, 64).as_subclass(Values) for _ in range(3))
    delta = torch.randn(1, 64).as_subclass(Values)
    e[::5] = 0.0
    e[1::5] *= 1e-30
    slope[:, ::7] = 0.0
    T = SimpleNamespace(NORM="abs", GAIN=gain, MASKED=False)
    kept = tagged(slope, e, T)
    ds = times_slope(through_sums(dp, delta, kept, T), kept, False, T)
    want = (dp.double() - torch.sign(gain * e.double()) * delta.double()) * slope.double()
    torch.testing.assert_close(torch.Tensor(ds).double(), torch.Tensor(want), rtol=3e-6, atol=1e-6)


def test_infinite_derivatives_do_not_become_nan() -> None:
    T = SimpleNamespace(NORM="abs", GAIN=1.0)
    slope = torch.tensor([torch.inf, -torch.inf] * 3).as_subclass(Values)
    e = torch.tensor([-1.0, -1.0, 0.0, 0.0, 1.0, 1.0]).as_subclass(Values)
    kept = tagged(slope, e, T)
    assert torch.equal(torch.Tensor(kept * 2), torch.Tensor(slope))
    assert tagged(torch.full_like(e, torch.nan), e, T).isnan().all()


def test_other_sums_have_no_tags() -> None:
    slope, e = (torch.randn(8).as_subclass(Values) for _ in range(2))
    for norm in ("sum", "exp"):
        assert tagged(slope, e, SimpleNamespace(NORM=norm, GAIN=1.0)) is slope


def test_hidden_pairs_stay_hidden() -> None:
    """Whatever dp and delta are: no tag makes HIDDEN of an ordinary derivative, not even of one that is NaN."""
    T = SimpleNamespace(NORM="abs", GAIN=1.0, MASKED=True)
    hidden = torch.full((4,), function.HIDDEN.value, dtype=torch.int32).view(torch.float32).as_subclass(Values)
    dp = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]).as_subclass(Values)
    assert (times_slope(through_sums(dp, dp, hidden, T), hidden, True, T) == 0).all()
    for bits in (0x7FFFFFFF, 0x7FC00000, -(2**22)):  # the device's NaN, the host's, and that of another sign
        slope = torch.full((3,), bits, dtype=torch.int32).view(torch.float32).as_subclass(Values)
        kept = tagged(slope, torch.tensor([-1.0, 0.0, 1.0]).as_subclass(Values), T)
        assert times_slope(through_sums(dp[:3], dp[:3], kept, T), kept, True, T).isnan().all()
