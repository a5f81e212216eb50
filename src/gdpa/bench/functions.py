"""Functions the benchmark knows beside the built-ins."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from gdpa.spec import Loaded, load_function


def softplus_squared(s: Tensor) -> Tensor:
    """softplus(s)^2: stands for a function nobody has tuned a kernel for."""
    return F.softplus(s) ** 2


EXTRA = {"softplus_squared": softplus_squared}


def benchmark_function(spec: str, params: tuple[float, ...] = ()) -> Loaded:
    """A function to benchmark: ``load``'s, or one of EXTRA by its name."""
    return load_function(f"{__name__}:{spec}" if spec in EXTRA else spec).with_params(params)
