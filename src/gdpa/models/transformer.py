"""The baseline that reads the history by a softmax transformer, the candidate being one of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike
from gdpa.data import Batch
from gdpa.models import attending, options
from gdpa.models.base import Model, reset
from gdpa.models.din import candidate_columns
from gdpa.models.dlrm import interaction
from gdpa.models.embedding import ContextTokens, EventTokens, Tables
from gdpa.models.features import Features
from gdpa.models.joining import every, join
from gdpa.nn import MLP, Jagged, SeedPooling, SelfAttention


@dataclass(frozen=True)
class TransformerConfig:
    """Options of :class:`Transformer`.

    Args:
        activation: of all attention: "softmax", or whatever gdpa.attention takes.
        params: where the params of ``activation`` start; each layer has its own.
        dim: the width of embeddings, tokens and events. num_heads divides it.
        depth: transformer layers.
        pooled_tokens: tokens pooled from the sequence by learned seeds.
        longest: the length that sums over a sequence are divided by, if the function is not softmax.
        rotary: the base of rotary positions; None for none.
        num_layers, cross_layers, cross_rank, hidden: of the interaction, as in :class:`DLRM`; the feed-forward layers
            of the transformer have the widths ``hidden`` too.
        backend: forces a backend of gdpa.attention.
    """

    activation: ActivationLike = attending.SOFTMAX
    params: tuple[float, ...] = ()
    dim: int = 32
    num_heads: int = 2
    depth: int = 2
    pooled_tokens: int = 2
    longest: int = 64
    rotary: float | None = 10000.0
    num_layers: int = 2
    cross_layers: int = 1
    cross_rank: int = 16
    hidden: tuple[int, ...] = (64,)
    backend: str | None = None

    def __post_init__(self) -> None:
        options.sizes(self, "dim", "num_heads", "depth", "pooled_tokens", "longest")
        options.sizes(self, "num_layers", "cross_layers", "cross_rank")
        options.above_zero(self, "rotary")
        options.widths(self, "hidden")
        options.heads(self.dim, self.num_heads, self.rotary is not None)
        backends.check_name(self.backend)


class TransformerLayer(nn.Module):
    """S <- S + LayerNorm(MHA(LayerNorm(S)))      S <- S + MLP(LayerNorm(S))."""

    def __init__(self, c: TransformerConfig, factory: dict[str, Any]) -> None:
        super().__init__()
        attention = attending.options(c, 1 / c.longest)
        self.in_norm = nn.LayerNorm(c.dim, **factory)
        self.attention = SelfAttention(c.dim, c.num_heads, rotary=c.rotary, **attention, **factory)
        self.out_norm = nn.LayerNorm(c.dim, **factory)
        self.mlp_norm = nn.LayerNorm(c.dim, **factory)
        self.mlp = MLP([c.dim, *c.hidden, c.dim], **factory)
        attending.start_as_average(self.attention)

    def reset_parameters(self) -> None:
        """As its parts start, attention as an average."""
        reset(self)
        attending.start_as_average(self.attention)

    def forward(self, s: Jagged) -> Jagged:
        update = self.attention(s.with_values(self.in_norm(s.values)))
        values = s.values + self.out_norm(update.values)
        return s.with_values(values + self.mlp(self.mlp_norm(values)))


class Transformer(Model):
    """Self-attention over the events with the candidate among them (as BST, arXiv 1905.06874), then interaction.

        S = [events | candidate], of every sequence      S <- TransformerLayer(S), depth times
        logit = MLP(Interaction([X | S_candidate | pooling(S)]))

    The candidate is the context's ids of the vocabularies that the events have, as if it were one of them.

    >>> log = gdpa.data.SyntheticLog()
    >>> Transformer(Features.of(log))(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = TransformerConfig
    config: TransformerConfig

    def __init__(
        self,
        features: Features,
        config: TransformerConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        if not features.sequences:
            raise ValueError("features has no sequences for the transformer to read; dlrm needs none")
        self.tables = Tables(features, c.dim, factory)
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        self.events = nn.ModuleList(EventTokens(s, c.dim, c.dim, factory) for s in features.sequences)
        self.transformer = nn.ModuleList(TransformerLayer(c, factory) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.dim, **factory)
        self.pool = Pool(c, factory)
        n = self.context.num_tokens + len(features.sequences) + c.pooled_tokens
        self.layers = nn.ModuleList(interaction(n, n, c, factory) for _ in range(c.num_layers))
        self.head = MLP([n * c.dim, *c.hidden, 1], **factory)

    def forward(self, batch: Batch) -> Tensor:
        self.features.check(batch)
        parts = []
        for tokens, s in zip(self.events, self.features.sequences, strict=True):
            candidate = tokens.candidate(batch.sparse, candidate_columns(s, self.features), self.tables)  # type: ignore[operator]
            parts += [tokens(batch.sequences[s.name], self.tables), every(candidate[:, None])]
        rows, starts = join(parts)
        for layer in self.transformer:
            rows = layer(rows)
        rows = rows.with_values(self.norm(rows.values))
        candidates = rows.values.index_select(0, starts[1::2].T.flatten()).unflatten(0, (-1, len(self.events)))
        x = self.context(batch.dense, batch.sparse, self.tables)
        x = torch.cat([x, candidates, self.pool(rows)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1)).squeeze(1)


class Pool(nn.Module):
    """LayerNorm(SeedPooling(S)): (B, pooled_tokens, dim)."""

    def __init__(self, c: Any, factory: dict[str, Any]) -> None:
        super().__init__()
        attention = attending.options(c, 1 / c.longest)
        self.pool = SeedPooling(c.dim, c.num_heads, c.pooled_tokens, **attention, **factory)
        self.norm = nn.LayerNorm(c.dim, **factory)
        attending.start_as_average(self.pool)

    def reset_parameters(self) -> None:
        """As its parts start, attention as an average."""
        reset(self)
        attending.start_as_average(self.pool)

    def forward(self, s: Jagged) -> Tensor:
        return self.norm(self.pool(s))
