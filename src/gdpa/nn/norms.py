"""nn.LayerNorm with a backward of one pass on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gdpa.ops import transformed
from gdpa.rowwise import norms, wanted


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm of the last dimension, in every way; on a GPU backward is one pass, weights' gradients included.

    With ``beside=True`` it returns x too, for what goes on beside the normalised rows (x + f(norm(x))), which are in
    the dtype of autocast then, as the layer that they go to would have cast them: backward adds both gradients up.

    >>> norm = LayerNorm(16)
    >>> x, normed = norm(torch.randn(2, 16), beside=True)
    """

    def forward(self, x: Tensor, *, beside: bool = False) -> Any:
        if not has_kernel(x, self.weight, self.bias):
            return (x, super().forward(x)) if beside else super().forward(x)
        compute = norms.normed_beside if beside else norms.normed
        return compute(x, self.weight, self.bias, self.eps)


def has_kernel(*tensors: Tensor | None) -> bool:
    """Whether there is a kernel for backward, and somebody who may ask for one."""
    return wanted() and torch.is_grad_enabled() and norms.has_kernel(*tensors) and not transformed()
