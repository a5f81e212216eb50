"""The useful work of a training step: what torch's counter finds in the jagged model, for every contender alike.

Padding earns nothing, and neither do pairs outside a window. The count runs on the meta device, on which nothing is
computed and nothing is stored; since there are no lengths to read there either, they are given to the formulas here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gdpa import ops
from gdpa.bench.models.cases import ModelCase, make_batch, make_model
from gdpa.spec import Loaded
from gdpa.testing.cases import kept_pairs


def step_flops(case: ModelCase, function: Loaded) -> list[int]:
    """Operations of a forward and a backward on each batch of ``case``."""
    model = make_model(case.model, case.scale, function, "meta")
    found = []
    for seed, drawn in enumerate(case.draws()):
        batch = make_batch(case, drawn, seed).to("meta")
        with FlopCounterMode(display=False, custom_mapping=formulas(drawn)) as counter:
            F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        found.append(counter.get_total_flops())
        model.zero_grad()
    return found


def formulas(drawn: tuple[int, ...]) -> dict[Any, Any]:
    """Of gdpa's operators, for sequences of these lengths: two products forward, five backward."""
    memo: dict[Any, int] = {}

    def work(args: Sequence[Any], of_qk: int, of_v: int) -> int:
        """So many products over the width of q and k, and over that of v."""
        x, settings = ops.records(args)
        side_q, side_k = _lengths(x.q, x.cu_q, drawn), _lengths(x.k, x.cu_k, drawn)
        key = (side_q, side_k, settings.left, settings.right)
        if key not in memo:
            count = Counter(zip(side_q, side_k, strict=True))
            memo[key] = sum(n * kept_pairs(i, j, settings.left, settings.right) for (i, j), n in count.items())
        return 2 * x.q.shape[1] * memo[key] * (of_qk * x.q.shape[3] + of_v * x.v.shape[3])

    found = {
        torch.ops.gdpa.attention: lambda *args, **kwargs: work(args, 1, 1),
        torch.ops.gdpa.attention_backward: lambda grad, *args, **kwargs: work(args, 3, 2),
        torch.ops.gdpa.attention_packed: lambda *args, **kwargs: work(ops.together(*args), 1, 1),
        torch.ops.gdpa.attention_packed_backward: lambda grad, *args, **kwargs: work(ops.together(*args), 3, 2),
    }
    for formula in found.values():
        formula._get_raw = True  # type: ignore[attr-defined]
    return found


def _lengths(x: Tensor, cu: Tensor | None, drawn: tuple[int, ...]) -> tuple[int, ...]:
    """Of each sequence: all the same without offsets; else those drawn, and the rows that a model puts before them."""
    if cu is None:
        return (x.shape[2],) * len(drawn)
    front, rest = divmod(x.shape[2] - sum(drawn), len(drawn))
    assert rest == 0, "every sequence has as many more rows"
    return tuple(n + front for n in drawn)
