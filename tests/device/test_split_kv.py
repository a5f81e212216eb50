"""Sums over parts of the keys, added up in their order."""

from __future__ import annotations

import pytest
import torch

from gdpa.testing.cases import dense, make_inputs
from support import GPU, INTERPRET, operands, problem_of

if not (INTERPRET or GPU):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from gdpa.backends.hopper.split_kv import add_parts, empty_parts

pytestmark = pytest.mark.triton
DEVICE = "cpu" if INTERPRET else "cuda"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("shape", "parts"), [((1, 2, 37, 64), 3), ((3, 2, 5, 40), 2)])
def test_parts_are_added_up_in_order(shape, parts, transposed):
    b, h, length, d = shape
    out = torch.full((b, length, h, d), torch.nan, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    out = out if transposed else out.contiguous()
    sums = empty_parts(out, parts)
    sums.copy_(torch.randn(sums.shape, generator=torch.Generator().manual_seed(0)))
    case = dense("shape", b, length, length, heads=h, d=d)
    problem = problem_of(case, operands(case, make_inputs(case, torch.float16, DEVICE)), "relu")
    add_parts(problem, None, sums, out)
    expected = torch.zeros(shape, device=DEVICE)
    for part in sums.unflatten(0, (parts, b)):
        expected += part
    assert torch.equal(out, expected.half())
