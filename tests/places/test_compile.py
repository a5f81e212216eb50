"""Numbers that functions and masks read, and tables, in code that torch.compile makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gdpa
from gdpa import masks

Q, K, V = torch.randn(3, 2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
REACH = [2]
COUNTS = torch.tensor([4, 6])


def near(q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() < REACH[0]


def near_by_table(q_idx: Tensor, kv_idx: Tensor, table: Tensor, *, q_len: Tensor) -> Tensor:
    return (table[q_idx] - table[kv_idx]).abs() < REACH[0] * q_len / 9


@pytest.mark.parametrize(
    "make",
    [
        lambda: near,
        lambda: gdpa.Mask(near_by_table, (torch.arange(9),)),
    ],
    ids=["function", "tables"],
)
def test_new_numbers_in_a_mask_are_seen_by_compiled_code(make: Callable[[], Any]) -> None:
    torch._dynamo.reset()

    def attend(q: Tensor) -> Tensor:
        return gdpa.attention(q, K, V, mask=make())

    fast = torch.compile(attend, fullgraph=True, backend="eager")
    for REACH[0] in (2, 4):
        torch.testing.assert_close(fast(Q), attend(Q))


@pytest.mark.parametrize("mask", [near, gdpa.Mask(near_by_table, (torch.arange(9),))], ids=["function", "made before"])
def test_a_mask_of_numbers_that_compiled_code_changes(mask: Any) -> None:
    """It is refused where it is traced while Dynamo holds the change back; a Mask is what it was when it was made."""
    torch._dynamo.reset()

    def attend(q: Tensor) -> Tensor:
        REACH[0] = 5
        return gdpa.attention(q, K, V, mask=mask)

    REACH[0] = 2
    fast = torch.compile(attend, fullgraph=True, backend="eager")
    if isinstance(mask, gdpa.Mask):
        torch.testing.assert_close(fast(Q), attend(Q))
        return
    with pytest.raises(Exception, match="the mask reads what the code being compiled makes or changes itself"):
        fast(Q)


def test_bounds_of_masks_may_be_arguments_of_compiled_code() -> None:
    """Dynamo leaves a number open once it has changed, and cannot have such a one in a closure."""
    torch._dynamo.reset()

    def attend(q: Tensor, n: int) -> Tensor:
        mask = masks.window(n, None) & masks.targets(COUNTS, group=n)
        return gdpa.attention(q, K, V, mask=mask)

    fast = torch.compile(attend, fullgraph=True, backend="eager")
    for n in (2, 3):
        torch.testing.assert_close(fast(Q, n), attend(Q, n))


def test_tables_in_code_that_nothing_is_removed_from() -> None:
    """backend="eager" also runs the call that is there for guards: its stand-ins fit any index."""
    torch._dynamo.reset()

    def attend(q: Tensor, bias: Tensor, buckets: Tensor) -> Tensor:
        return gdpa.attention(
            q, K, V, lambda s, t, i, *, h, q_idx, kv_idx: F.silu(s + t[h, i[q_idx - kv_idx]]), tables=(bias, buckets)
        )

    fast = torch.compile(attend, fullgraph=True, backend="eager")
    tables = torch.randn(2, 5), torch.arange(17) % 5
    torch.testing.assert_close(fast(Q, *tables), attend(Q, *tables))
