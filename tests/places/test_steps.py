"""Buckets and blocks by floating-point arithmetic begin where PyTorch has them: floor(x / 41) is 1 at 41."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gdpa
from support import Target, f16, f32, f64, skipping_refusals, targets

ROWS, WIDTH = 130, 41  # 41 times float32's 1 / 41 is less than 1, as it is for 47, 55, 61, 82 and others
BUCKETS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": lambda x: torch.floor(x / WIDTH),
    "cast": lambda x: (x / WIDTH).long() * 1.0,
    "compare": lambda x: torch.where(x / WIDTH >= 1, 2.0, 0.5),
    "remainder": lambda x: torch.floor((x / WIDTH) % 1 * 4),
    "rounded": lambda x: torch.div(x, float(WIDTH), rounding_mode="trunc"),
}
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda x: torch.floor(x * 0.7),  # 21 at 30 in float32, less in float64
    "two": lambda x: (x * 0.01 * 100).long() * 1.0,
    "compared": lambda x: torch.where(x * 0.1 * 10 == x, 1.0, 0.0),
}
TABLES = {"integers": torch.arange(5) * WIDTH, "floats": torch.arange(5.0) * WIDTH}


def of_queries(f: Callable[..., Tensor], target: Target, tables: tuple[Tensor, ...] = ()) -> Tensor:
    """What ``f`` says of each query, at scores of 0."""
    q, k, v = (torch.zeros(1, 1, n, 8, dtype=target.dtype, device=target.device) for n in (ROWS, 1, 1))
    tables = tuple(t.to(target.device) for t in tables)
    with skipping_refusals(target):
        return gdpa.attention(q, k, v + 1, f, tables=tables, backend=target.backend)[0, 0, :, 0].cpu()


@pytest.mark.parametrize("name", BUCKETS)
@pytest.mark.parametrize("target", targets(f32, f16))
def test_buckets_begin_at_exact_multiples(name: str, target: Target) -> None:
    bucket, rows = BUCKETS[name], torch.arange(ROWS)
    found = of_queries(lambda s, *, q_idx: s + bucket(q_idx), target)
    torch.testing.assert_close(found, bucket(rows).to(target.dtype), rtol=0, atol=0)
    for table in TABLES.values():
        found = of_queries(lambda s, t, *, q_idx: s + bucket(t[q_idx % 5]), target, (table,))
        torch.testing.assert_close(found, bucket(table[rows % 5]).to(target.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("target", [*targets(f32, f16), *targets(f64, backends=("reference", "cpu"))])
def test_products_of_positions_are_those_of_pytorch(name: str, target: Target) -> None:
    bucket, rows = PRODUCTS[name], torch.arange(ROWS)
    found = of_queries(lambda s, *, q_idx: s + bucket(q_idx), target)
    torch.testing.assert_close(found, bucket(rows).to(target.dtype), rtol=0, atol=0)
    found = of_queries(lambda s, t, *, q_idx: s + bucket(t[q_idx % 5]), target, (TABLES["integers"],))
    torch.testing.assert_close(found, bucket(TABLES["integers"][rows % 5]).to(target.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("target", targets(f32))
def test_blocks_of_a_mask_begin_at_exact_multiples(target: Target) -> None:
    q, k, v = (torch.ones(1, 1, ROWS, 8, dtype=target.dtype, device=target.device) for _ in range(3))
    mask = gdpa.Mask(lambda q_idx, kv_idx: (q_idx / WIDTH).floor() == (kv_idx / WIDTH).floor())
    with skipping_refusals(target):
        found = gdpa.attention(q, k, v, lambda s: 0 * s + 1, mask=mask, backend=target.backend)[0, 0, :, 0]
    blocks = torch.arange(ROWS) // WIDTH
    torch.testing.assert_close(found.cpu(), (blocks[:, None] == blocks).sum(1).to(target.dtype), rtol=0, atol=0)
