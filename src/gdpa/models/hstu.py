"""HSTU as a baseline: context, events and candidate in one sequence, read by its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa import nn as gnn
from gdpa.api import ActivationLike
from gdpa.data import Inputs, PackedEvents
from gdpa.models import attending, options
from gdpa.models.base import Model, make_head
from gdpa.models.din import candidate_columns, without_candidate
from gdpa.models.dlrm import interaction
from gdpa.models.embedding import ContextTokens, EventTokens, Looked, Tables
from gdpa.models.features import Features
from gdpa.models.joining import every, join
from gdpa.nn import Jagged


@dataclass(frozen=True)
class HSTUConfig:
    """Options of :class:`HSTU`.

    Args:
        activation: of all attention: "silu" as published, or whatever gdpa.attention takes.
        params: where the params of ``activation`` start; each layer has its own.
        normalize: "sum" or "abs" of a row's weights, which outputs are divided by (docs/rowsums.md); not of softmax.
        dim: the width of embeddings, tokens and events. num_heads divides it.
        depth: HSTU layers.
        longest: the length that sums over a sequence are divided by (softmax's are not), and from which on positions
            share a bias.
        time_buckets: of the bias by time, if the events of all sequences have an age; None for none.
        time_unit: what ages are counted in, in their own unit: 1e-4 of a day is 8.6 seconds.
        max_attn_len: how far back a row sees; None for no bound.
        num_layers, cross_layers, cross_rank, hidden: of the interaction, as in :class:`DLRM`.
        backend: forces a backend of gdpa.attention.
    """

    activation: ActivationLike = "silu"
    params: tuple[float, ...] = ()
    dim: int = 32
    num_heads: int = 2
    depth: int = 2
    longest: int = 64
    time_buckets: int | None = 64
    time_unit: float = 1e-4
    max_attn_len: int | None = None
    num_layers: int = 2
    cross_layers: int = 1
    cross_rank: int = 16
    hidden: tuple[int, ...] = (64,)
    backend: str | None = None
    normalize: str | None = None

    def __post_init__(self) -> None:
        options.sizes(self, "dim", "num_heads", "depth", "longest", "num_layers", "cross_layers", "cross_rank")
        options.above_zero(self, "time_unit")
        for name in ("time_buckets", "max_attn_len"):
            if getattr(self, name) is not None:
                options.sizes(self, name)
        options.widths(self, "hidden")
        options.heads(self.dim, self.num_heads, rotary=False)
        backends.check_name(self.backend)


class HSTU(Model):
    """Generative recommenders' encoder (arXiv 2402.17152) as a click model: :class:`gdpa.nn.HSTU`, then interaction.

        S = [context tokens | events of every sequence | candidates]      S <- HSTU(S), depth times
        logit = MLP(Interaction([X | LayerNorm(S_candidates)]))

    The context's tokens are HSTU's contexts, which see all events; the candidates, one per sequence of events, are its
    targets, which see everything but each other. Times are those of the events, and now for the others.

    >>> log = gdpa.data.SyntheticLog()
    >>> HSTU(Features.of(log))(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = HSTUConfig
    config: HSTUConfig

    def __init__(
        self,
        features: Features,
        config: HSTUConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        if not features.sequences:
            raise ValueError("features has no sequences for HSTU to read; dlrm needs none")
        self.tables = Tables(features, c.dim, factory)
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        self.events = nn.ModuleList(EventTokens(s, c.dim, c.dim, factory) for s in features.sequences)
        self.timed = c.time_buckets is not None and all("age" in s.values for s in features.sequences)
        self.encoder = nn.ModuleList(
            gnn.HSTU(
                c.dim, c.num_heads, c.longest, attending.own(c.activation), params=c.params, backend=c.backend,
                normalize=c.normalize, next_time=False, time_buckets=c.time_buckets if self.timed else None,
                max_attn_len=c.max_attn_len,
                context_len=self.context.num_tokens, **factory,
            )
            for _ in range(c.depth)
        )  # fmt: skip
        self.norm = nn.LayerNorm(c.dim, **factory)
        n = self.context.num_tokens + len(features.sequences)
        self.layers = nn.ModuleList(interaction(n, n, c, factory) for _ in range(c.num_layers))
        self.head = make_head(features, [n * c.dim, *c.hidden], factory)

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        looked = self.tables(batch)
        x = self.context(batch.dense, looked)
        rows, starts = self._rows(batch, x, looked)
        times, targets = self._times(batch, starts, rows), torch.full_like(starts[0], len(self.events))
        for layer in self.encoder:
            rows = self._run(layer, rows, times=times, num_targets=targets)
        places = starts[-1][:, None] + torch.arange(len(self.events), device=starts.device)
        candidates = self.norm(rows.values.index_select(0, places.flatten())).unflatten(0, places.shape)
        x = torch.cat([x, candidates], dim=1)
        for layer in self.layers:
            x = self._run(layer, x)
        return self.head(x.flatten(1)).squeeze(1)

    def without_candidate(self) -> tuple[str, ...]:
        return without_candidate(self.features)

    def _needs_candidates(self) -> str | None:
        return "a candidate is a row of its user's sequence"

    def _rows(self, batch: Inputs, x: Tensor, looked: Looked) -> tuple[Jagged, Tensor]:
        """One sequence per sample, and where its parts begin: context, sequences of events, candidates."""
        events, candidates = [], []
        for tokens, s in zip(self.events, self.features.sequences, strict=True):
            events.append(self._run(tokens, batch.sequences[s.name], looked))
            columns = candidate_columns(s, self.features)
            candidates.append(tokens.candidate(batch.sparse, columns, looked))  # type: ignore[operator]
        return join([every(x), *events, every(torch.stack(candidates, dim=1))])

    def _times(self, batch: Inputs, starts: Tensor, rows: Jagged) -> Tensor | None:
        """-age of the events in units of time, 0 for the others."""
        if not self.timed:
            return None
        times = torch.zeros(rows.values.shape[0], dtype=torch.int64, device=starts.device)
        for s, start in zip(self.features.sequences, starts[1:-1].unbind(0), strict=True):
            events: PackedEvents = batch.sequences[s.name]
            age = events.values[:, s.values.index("age")].double().clamp_min(0) / self.config.time_unit
            of = Jagged(events.values, events.cu_seqlens)
            # Rows of no sequence (see Jagged) come last in ``rows`` too, where no time is ever read.
            starts_of = torch.cat([start, start.new_full((1,), rows.values.shape[0] - 1)])[of.sequence_ids()]
            places = (starts_of + of.positions()).clamp(max=rows.values.shape[0] - 1)
            times = times.index_copy(0, places, -age.round().long())
        return times
