"""The useful work of a training step: what torch's counter finds in the jagged model, for every contender alike.

Padding earns nothing, and neither do pairs outside a window. The count runs on the meta device, on which nothing is
computed and nothing is stored; since there are no lengths to read there either, they are given to the formulas here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gdpa.bench.cases import kept_pairs
from gdpa.bench.model_cases import ModelCase, make_batch, make_model
from gdpa.spec import Loaded


def step_flops(case: ModelCase, function: Loaded) -> list[int]:
    """Operations of a forward and a backward on each batch of ``case``."""
    model = make_model(case.model, case.scale, function, "meta")
    found = []
    for seed, drawn in enumerate(case.draws()):
        batch = make_batch(case, drawn, seed).to("meta")
        with FlopCounterMode(display=False, custom_mapping=_formulas(drawn)) as counter:
            F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        found.append(counter.get_total_flops())
        model.zero_grad()
    return found


def _formulas(drawn: tuple[int, ...]) -> dict[Any, Any]:
    """Of gdpa's operators, for sequences of these lengths: two products forward, five backward."""
    memo: dict[Any, int] = {}

    def pairs(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, *args: Any) -> int:
        """Summed over sequences and heads."""
        left, right = args[4:6]  # behind params, activations and two scales
        side_q, side_k = _lengths(q, cu_q, drawn), _lengths(k, cu_k, drawn)
        key = (side_q, side_k, left, right)
        if key not in memo:
            count = Counter(zip(side_q, side_k, strict=True))
            memo[key] = sum(n * kept_pairs(i, j, left, right) for (i, j), n in count.items())
        return q.shape[1] * memo[key]

    def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
        return 2 * pairs(q, k, *args) * (q.shape[3] + v.shape[3])

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
        return 2 * pairs(q, k, *args) * (3 * q.shape[3] + 2 * v.shape[3])

    forward._get_raw = backward._get_raw = True  # type: ignore[attr-defined]
    return {torch.ops.gdpa.attention: forward, torch.ops.gdpa.attention_backward: backward}


def _lengths(x: Tensor, cu: Tensor | None, drawn: tuple[int, ...]) -> tuple[int, ...]:
    """Of each sequence: all the same without offsets; else those drawn, and the rows that a model puts before them."""
    if cu is None:
        return (x.shape[2],) * len(drawn)
    front, rest = divmod(x.shape[2] - sum(drawn), len(drawn))
    assert rest == 0, "every sequence has as many more rows"
    return tuple(n + front for n in drawn)
