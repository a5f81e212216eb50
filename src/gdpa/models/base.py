"""What the models have in common: features, a Config, initialisation; and the interaction of context tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gdpa.data import Inputs
from gdpa.models.features import Features
from gdpa.nn import MLP, CrossNet, DotInteraction, TokenLinear


class Model(nn.Module):
    """From a gdpa.data.Batch to logits (B,), or (B, K) for K labels. ``Config``: a frozen dataclass of options.

    ``recompute``: keep only the inputs of each block of layers for backward, which recomputes the rest: less
    memory, for about a third more time.
    """

    Config: ClassVar[type]
    recompute: bool = False

    def __init__(self, features: Features, config: Any) -> None:
        super().__init__()
        config = self.Config() if config is None else config
        if not isinstance(features, Features):
            raise TypeError(f"features must be a gdpa.models.Features, got {type(features).__name__}")
        if not isinstance(config, self.Config):
            raise TypeError(f"config must be of {type(self).__name__}.Config, got {type(config).__name__}")
        self.features, self.config = features, config

    def forward(self, batch: Inputs) -> Tensor:
        """Logits (B,), or (B, K)."""
        raise NotImplementedError

    def score_candidates(self, batch: Inputs, counts: Tensor) -> Tensor:
        """Logits (N,), or (N, K), of N candidates for U users, reading each user's history once.

        ``batch`` has dense (N, F), sparse (N, S) and bags of every candidate and sequences of U histories; user u has
        the next ``counts[u]`` of the candidates (U,). The result is that of the model itself, called with each history
        repeated for each of its candidates. Only for models that read the history independently of the candidate.
        """
        if (reason := self._needs_candidates()) is not None:
            raise ValueError(f"{type(self).__name__} cannot read a history once for many candidates: {reason}")
        self.features.check(batch, candidates=True)
        return self._score(batch, Users.of_batch(batch, counts))

    def _needs_candidates(self) -> str | None:
        """Why the history cannot be read without knowing the candidate; None if it can."""
        raise NotImplementedError

    def _score(self, batch: Inputs, users: Users | None) -> Tensor:
        """Logits of checked inputs; without ``users`` every row has a history of its own."""
        raise NotImplementedError

    def _run(self, block: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a block gives, with ``recompute`` in mind."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(block, *args, use_reentrant=False, **options)
        return block(*args, **options)

    def reset_parameters(self) -> None:
        """As its parts start."""
        reset(self)

    def ignored(self) -> tuple[str, ...]:
        """Columns of the histories that this model does not read, as "history.column"."""
        return ()

    def without_candidate(self) -> tuple[str, ...]:
        """Histories that a model with a candidate reads without one."""
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


@dataclass(frozen=True, eq=False)
class Users:
    """Whose candidates the rows of a batch are: ``counts`` (U,) of each user, ``of`` (N,) the user of each row."""

    counts: Tensor
    of: Tensor

    @staticmethod
    def of_batch(batch: Inputs, counts: Any) -> Users:
        rows = batch.dense.shape[0]
        if not isinstance(counts, Tensor) or counts.dtype not in (torch.int32, torch.int64) or counts.dim() != 1:
            raise TypeError(f"counts must be a tensor (U,) of int32 or int64, got {counts!r}")
        for name, events in batch.sequences.items():
            if events.cu_seqlens.shape[0] - 1 != counts.shape[0]:
                raise ValueError(
                    f"counts has {counts.shape[0]} users, but sequences[{name!r}] has {events.cu_seqlens.shape[0] - 1} "
                    "histories"
                )
        for name, bags in batch.bags.items():
            if bags.cu_seqlens.shape[0] - 1 != rows:
                raise ValueError(
                    f"bags[{name!r}] must have one bag for each of the {rows} candidates, but has "
                    f"{bags.cu_seqlens.shape[0] - 1}"
                )
        if counts.device.type == "cpu" and ((counts < 0).any() or int(counts.sum()) != rows):
            raise ValueError(
                f"counts must not be negative and must add up to the {rows} rows of dense and sparse: they begin with "
                f"{counts[:8].tolist()} and add up to {int(counts.sum())}"
            )
        users = torch.arange(counts.shape[0], device=counts.device)
        return Users(counts, torch.repeat_interleave(users, counts, output_size=rows))

    def spread(self, x: Tensor) -> Tensor:
        """What each candidate gets of what there is for each user: (U, ...) -> (N, ...)."""
        return x.index_select(0, self.of)


class LearnedTokens(nn.Module):
    """Learned tokens in place of a summary of the context, the same for all: (n, num_tokens, dim)."""

    def __init__(self, num_tokens: int, dim: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(num_tokens, dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, half as large as a normalised token, as a gate leaves it."""
        nn.init.normal_(self.tokens, std=0.5)

    def forward(self, n: int) -> Tensor:
        return self.tokens.repeat(n, 1, 1)  # not expanded: to flatten that would hold exported programs to n != 1


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
