"""Operators on rows, apart from attention: each does in one pass over memory what a compiler would do in several.

GDPA_ROWWISE in the environment says where layers on a GPU use them:

    on       everywhere (the default): whole models, compiled, take a tenth less time than with the formulas
    eager    in code that runs as it is written; what torch.compile makes has the formulas, fused with others
    off      nowhere
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # DTensors and other kinds have rules of their own
VARIABLE = "GDPA_ROWWISE"
CHOICES = ("on", "eager", "off")
where = os.environ.get(VARIABLE) or CHOICES[0]
if where not in CHOICES:
    raise ValueError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {where!r}")


def wanted() -> bool:
    """Whether what is being run or traced here is to use them."""
    return where == "on" or (where == "eager" and not torch.compiler.is_compiling())


def computed(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast computes in, if it is on: cast once, where every layer would cast it again."""
    kind = x.device.type  # on the meta device, where work is counted, there is no autocast
    return x.to(torch.get_autocast_dtype(kind)) if not x.is_meta and torch.is_autocast_enabled(kind) else x
