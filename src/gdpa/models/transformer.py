"""The baseline that reads the history with a softmax transformer, in which the candidate is one of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike
from gdpa.data import Inputs
from gdpa.models import attending, options
from gdpa.models.base import Model, Users, make_head, reset
from gdpa.models.din import candidate_columns, without_candidate
from gdpa.models.dlrm import interaction
from gdpa.models.embedding import ContextTokens, EventTokens, Tables
from gdpa.models.features import Features
from gdpa.models.joining import every, join
from gdpa.nn import MLP, Jagged, SeedPooling, SelfAttention


@dataclass(frozen=True)
class TransformerConfig:
    """Options of :class:`Transformer`.

    Args:
        both_ways: whether the events see the candidate. Without (one way), the events see each other only, and the
            candidate reads them: the history is read without the candidate then, once for all of them
            (score_candidates).
        activation: of all attention: "softmax", or whatever gdpa.attention takes.
        params: where the params of ``activation`` start; each layer has its own.
        normalize: "sum" or "abs" of a row's weights, which outputs are divided by (docs/rowsums.md); not of softmax.
        dim: the width of embeddings, tokens and events. num_heads divides it.
        depth: transformer layers.
        pooled_tokens: tokens pooled from the sequence by learned seeds.
        longest: the length that sums over a sequence are divided by, if the function is not softmax.
        rotary: the base of rotary positions; None for none.
        num_layers, cross_layers, cross_rank, hidden: of the interaction, as in :class:`DLRM`; the feed-forward layers
            of the transformer have the widths ``hidden`` too.
        backend: forces a backend of gdpa.attention.
    """

    both_ways: bool = True
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
    normalize: str | None = None

    def __post_init__(self) -> None:
        options.flags(self, "both_ways")
        options.sizes(self, "dim", "num_heads", "depth", "pooled_tokens", "longest")
        options.sizes(self, "num_layers", "cross_layers", "cross_rank")
        options.above_zero(self, "rotary")
        options.widths(self, "hidden")
        options.heads(self.dim, self.num_heads, self.rotary is not None)
        backends.check_name(self.backend)


class TransformerLayer(nn.Module):
    """S <- S + LayerNorm(MHA(LayerNorm(S)))      S <- S + MLP(LayerNorm(S)).

    Rows C see those of S, and not each other: C <- C + LayerNorm(MHA(LayerNorm(C), LayerNorm(S))), and so on.
    """

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

    def forward(self, s: Jagged, c: Jagged | None = None) -> tuple[Jagged, Jagged | None]:
        """S after the layer, and C, if there is one."""
        normed = s.with_values(self.in_norm(s.values))
        if c is not None:
            c = self._finish(c, self.attention.read(c.with_values(self.in_norm(c.values)), normed))
        return self._finish(s, self.attention(normed)), c

    def _finish(self, s: Jagged, update: Jagged) -> Jagged:
        values = s.values + self.out_norm(update.values)
        return s.with_values(values + self.mlp(self.mlp_norm(values)))


class Transformer(Model):
    """Self-attention over the events with the candidate among them (as BST, arXiv 1905.06874), then interaction.

        S = [events | candidate], of every sequence      S <- TransformerLayer(S), depth times
        logit = MLP(Interaction([X | S_candidate | pooling(S)]))
        one way:  S = events      C = candidate          S, C <- TransformerLayer(S, C)
        logit = MLP(Interaction([X | C | pooling(S)]))

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
        self.head = make_head(features, [n * c.dim, *c.hidden], factory)

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        return self._score(batch, None)

    def without_candidate(self) -> tuple[str, ...]:
        return without_candidate(self.features)

    def _needs_candidates(self) -> str | None:
        return "its events see the candidate (both_ways=False would not let them)" if self.config.both_ways else None

    def _score(self, batch: Inputs, users: Users | None) -> Tensor:
        looked = self.tables(batch)
        candidates, events = [], []
        for tokens, s in zip(self.events, self.features.sequences, strict=True):
            columns = candidate_columns(s, self.features)
            candidates.append(tokens.candidate(batch.sparse, columns, looked))  # type: ignore[operator]
            events.append(self._run(tokens, batch.sequences[s.name], looked))
        read = self._read_together if self.config.both_ways else self._read_apart
        rows, c = read(events, candidates, users)
        pooled = self.pool(rows)
        x = torch.cat([self.context(batch.dense, looked), c, pooled if users is None else users.spread(pooled)], dim=1)
        for layer in self.layers:
            x = self._run(layer, x)
        return self.head(x.flatten(1)).squeeze(1)

    def _read_together(self, events: list[Jagged], candidates: list[Tensor], users: Any) -> tuple[Jagged, Tensor]:
        """All rows, and those of the candidates (B, sequences, dim) among them; ``candidates`` (B, dim) of each."""
        parts = [part for e, c in zip(events, candidates, strict=True) for part in (e, every(c[:, None]))]
        rows, starts = join(parts)
        for layer in self.transformer:
            rows, _ = self._run(layer, rows)
        rows = rows.with_values(self.norm(rows.values))
        places = torch.stack(starts[1::2].unbind(0), dim=1)  # not transposed: see joining._beside
        return rows, rows.values.index_select(0, places.flatten()).unflatten(0, (-1, len(events)))

    def _read_apart(self, events: list[Jagged], candidates: list[Tensor], users: Users | None) -> tuple[Jagged, Tensor]:
        """The rows of the events, and the candidates (N, sequences, dim), which are queries to them."""
        rows, _ = join(events)
        c = every(torch.stack(candidates, dim=1))
        if users is not None:
            c = Jagged.from_lengths(c.values, users.counts * len(events))
        for layer in self.transformer:
            rows, c = self._run(layer, rows, c)
        return rows.with_values(self.norm(rows.values)), self.norm(c.values).unflatten(0, (-1, len(events)))


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
