"""The function of the demonstration. Nobody has written a kernel for it."""

import torch
import torch.nn.functional as F


def soft_threshold(s: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Squared softplus, let through smoothly above a learned threshold."""
    return F.softplus(s) ** 2 * torch.sigmoid(4 * (s - threshold))
