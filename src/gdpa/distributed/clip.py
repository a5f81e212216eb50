"""Gradient clipping over parameters of which some are DTensors, on one mesh or several, and some plain tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a module after ``parallelize``: torch's own refuses to mix DTensors and plain
    tensors. Scales the gradients in place and returns their norm before, a plain tensor, the same on all ranks.

    Plain parameters count once: outside of data parallelism they are the same on all ranks.
    """
    of_meshes: dict[Any, list[Tensor]] = defaultdict(list)
    for p in [parameters] if isinstance(parameters, Tensor) else parameters:
        if p.grad is not None:
            of_meshes[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    if not of_meshes:
        return torch.tensor(0.0)
    norms = [get_total_norm([p.grad for p in ps if p.grad is not None], norm_type) for ps in of_meshes.values()]
    plain = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    total = get_total_norm(plain, norm_type, error_if_nonfinite)
    for ps in of_meshes.values():
        clip_grads_with_norm_(ps, max_norm, total)
    return total
