"""How layers are initialised: projections with Xavier weights and zero biases; and the MLPs between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gdpa.arguments.integers import is_int
from gdpa.rowwise import computed


def positive(name: str, value: Any) -> int:
    """A size given as an argument: an int of at least 1."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def heads_of(dim: int, num_heads: int) -> int:
    """The width of a head, dim / num_heads."""
    if positive("dim", dim) % positive("num_heads", num_heads) != 0:
        raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}")
    return dim // num_heads


def xavier_(linear: nn.Linear, outputs: Sequence[int] | None = None) -> None:
    """Xavier's uniform weights and a zero bias; ``outputs`` are the widths of projections fused into one, each of which
    starts as it would on its own."""
    with torch.no_grad():
        for part in linear.weight.split(list(outputs or [linear.out_features])):
            nn.init.xavier_uniform_(part)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)


def mix(weight: Tensor, x: Tensor) -> Tensor:
    """weight (m, n) times every matrix of x (B, n, C): (B, m, C).

    Not ``weight @ x``, which copies x with its last dimensions transposed, to make one product of all.
    """
    return torch.bmm(computed(weight).expand(x.shape[0], -1, -1), x)


class MLP(nn.Sequential):
    """Linear layers with SiLU between them: widths[0] -> widths[1] -> ... -> widths[-1], the last one linear.

    (..., widths[0]) -> (..., widths[-1]).

    >>> MLP([16, 32, 8])(torch.randn(2, 16)).shape
    torch.Size([2, 8])
    """

    def __init__(self, widths: Sequence[int], *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if len(widths) < 2:
            raise ValueError(f"widths must contain at least the input and the output width, got {list(widths)}")
        for i, width in enumerate(widths):
            positive(f"widths[{i}]", width)
        layers: list[nn.Module] = []
        for i in range(len(widths) - 1):
            layers += [nn.SiLU()] if i else []
            layers.append(nn.Linear(widths[i], widths[i + 1], device=device, dtype=dtype))
        super().__init__(*layers)

    def reset_parameters(self) -> None:
        """As in nn.Linear."""
        for layer in self:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
