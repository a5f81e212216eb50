"""What the models have in common: features, a Config, how they start; and the interaction of context tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa.data import Batch
from gdpa.models.features import Features
from gdpa.nn import MLP, CrossNet, DotInteraction, TokenLinear


class Model(nn.Module):
    """From a gdpa.data.Batch to logits (B,), or (B, K) for K labels. ``Config``: a frozen dataclass of options."""

    Config: ClassVar[type]

    def __init__(self, features: Features, config: Any) -> None:
        super().__init__()
        config = self.Config() if config is None else config
        if not isinstance(features, Features):
            raise TypeError(f"features must be a gdpa.models.Features, got {type(features).__name__}")
        if not isinstance(config, self.Config):
            raise TypeError(f"config must be of {type(self).__name__}.Config, got {type(config).__name__}")
        self.features, self.config = features, config

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,)."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """As its parts start."""
        reset(self)

    def ignored(self) -> tuple[str, ...]:
        """Columns of the histories that this model does not read, as "history.column"."""
        return ()


class Heads(nn.Module):
    """An MLP for each of K labels: (B, width) -> (B, K). Of one label there is the MLP alone, see ``make_head``."""

    def __init__(self, labels: Sequence[str], widths: Sequence[int], factory: dict[str, Any]) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self.mlps = nn.ModuleList(MLP([*widths, 1], **factory) for _ in labels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([mlp(x) for mlp in self.mlps], dim=1)


def make_head(features: Features, widths: Sequence[int], factory: dict[str, Any]) -> nn.Module:
    """The end of a model: (B, widths[0]) -> (B, 1), or (B, K) with an MLP of its own for each of K labels."""
    if len(features.labels) == 1:
        return MLP([*widths, 1], **factory)
    return Heads(features.labels, widths, factory)


def reset(module: nn.Module) -> None:
    """Starts each part anew: by its own reset_parameters, or else part by part."""
    for part in module.children():
        own = getattr(part, "reset_parameters", None)
        if own is None:
            reset(part)
        else:
            own()


class Interaction(nn.Module):
    """One layer of DHEN (arXiv 2203.11014) with two experts, DOT and DCN, over tokens.

        y = LayerNorm(reshape(MLP([dot(x) / sqrt(dim) | cross(flatten(x))])) + W x)     W mixes tokens

    x (B, num_tokens, dim) -> (B, out_tokens, dim).
    """

    def __init__(
        self,
        num_tokens: int,
        out_tokens: int,
        dim: int,
        *,
        cross_layers: int,
        cross_rank: int,
        hidden: Sequence[int],
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.dim = dim
        self.dot = DotInteraction(num_tokens)
        self.cross = CrossNet(num_tokens * dim, cross_layers, rank=cross_rank, **factory)
        self.mlp = MLP([self.dot.out_features + num_tokens * dim, *hidden, out_tokens * dim], **factory)
        self.shortcut = TokenLinear(num_tokens, out_tokens, **factory)
        self.norm = nn.LayerNorm(dim, **factory)

    def forward(self, x: Tensor) -> Tensor:
        experts = torch.cat([self.dot(x) * self.dim**-0.5, self.cross(x.flatten(1))], dim=1)
        return self.norm(self.mlp(experts).unflatten(1, (-1, self.dim)) + self.shortcut(x))
