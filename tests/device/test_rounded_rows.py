"""Float32 sums of whole rows, rounded to where they belong."""

from __future__ import annotations

import pytest
import torch

from support import GPU, INTERPRET

if not (INTERPRET or GPU):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from gdpa.backends.hopper.wide_dq import launch_round_rows
from gdpa.testing.cases import dense, make_inputs
from support import operands, problem_of

pytestmark = pytest.mark.triton
DEVICE = "cpu" if INTERPRET else "cuda"


@pytest.mark.parametrize("layout", ["heads", "rows", "one of three"])
@pytest.mark.parametrize(("batch", "heads", "rows", "d"), [(2, 3, 70, 64), (1, 2, 32, 40), (3, 1, 5, 104)])
def test_every_row_is_rounded_once(batch, heads, rows, d, layout):
    case = dense("", batch, rows, rows, heads=heads, d=d)
    problem = problem_of(case, operands(case, make_inputs(case, torch.float16)), "silu")
    nan = {"fill_value": torch.nan, "dtype": torch.float16, "device": DEVICE}
    around = torch.full((batch, rows, 3, heads, d), **nan)
    dq = {
        "heads": torch.full((batch, heads, rows, d), **nan),
        "rows": torch.full((batch, rows, heads, d), **nan).transpose(1, 2),
        "one of three": around[:, :, 0].transpose(1, 2),
    }[layout]
    wide = torch.randn(dq.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    launch_round_rows(problem, wide, dq, 0.25)
    assert torch.equal(dq, (wide * 0.25).half())
    assert around[:, :, 1:].isnan().all(), "what is beside it is somebody else's"
