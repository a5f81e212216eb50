"""PyTorch's own attention of packed rows: the softmax that people have for jagged batches without another package."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdpa.bench.contenders.contender import Prepared, native_pieces, tried
from gdpa.bench.contenders.packing import packed_offsets, packed_rows
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs

MODULE = "torch.nn.attention.varlen"
DEVICE = "cuda"  # the only one that it has kernels for
LARGEST_HEAD = 256


@dataclass(frozen=True)
class TorchVarlen:
    """varlen_attn, a flash attention. Its band is aligned as gdpa's, and queries without keys are zero, too."""

    name: str = "torch-varlen"
    function: str | None = "softmax"

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        reason = why_not(case, x)
        if reason is not None:
            return reason
        from torch.nn.attention.varlen import varlen_attn

        chosen = options(case, inspect.signature(varlen_attn).parameters)
        if isinstance(chosen, str):
            return chosen
        cu_q, cu_k = packed_offsets(case, x)
        longest = (max(case.len_q), max(case.len_k))

        def forward() -> Tensor:
            out = varlen_attn(*packed_rows(case, x), cu_q, cu_k, *longest, **chosen)
            assert isinstance(out, Tensor)  # more only comes with return_aux
            return out

        return tried(Prepared(forward, x.leaves, native_pieces(case, x)), "PyTorch")


def why_not(case: Case, x: Inputs) -> str | None:
    """Why no varlen_attn takes the case here; None if one may."""
    if not case.varlen:
        return "varlen_attn is for packed rows; F.scaled_dot_product_attention takes dense tensors"
    if importlib.util.find_spec(MODULE) is None:
        return f"torch {torch.__version__} has no {MODULE}, which came with 2.10"
    if x.q.device.type != DEVICE:
        return f"varlen_attn has no kernel for a {x.q.device.type.upper()}"
    if case.dv not in (None, case.d):
        return f"varlen_attn needs values as wide as keys, here {case.dv} beside {case.d}"
    if case.d % 8 or case.d > LARGEST_HEAD:
        return f"varlen_attn takes head dimensions that are multiples of 8, up to {LARGEST_HEAD}, here {case.d}"
    return None


def options(case: Case, parameters: Container[str]) -> dict[str, Any] | str:
    """The case's band and heads in a release's words (its ``parameters``), or why it has none for them.

    torch 2.10 has is_causal, later ones window_size, where -1 is unbounded and (-1, 0), as a tuple, means causal;
    enable_gqa came with 2.12.
    """
    found: dict[str, Any] = {}
    if "window_size" in parameters:
        left, right = (-1 if side is None else side for side in case.band)
        found["window_size"] = (left, right)
    elif case.band == (None, 0):
        found["is_causal"] = True
    elif case.band != (None, None):
        return f"varlen_attn of torch {torch.__version__} has no window"
    if case.heads_k not in (None, case.heads):
        if "enable_gqa" not in parameters:
            return f"varlen_attn of torch {torch.__version__} has no grouped heads"
        found["enable_gqa"] = True
    return found
