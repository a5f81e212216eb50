"""DIN: the candidate decides how much each event counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa.data import Inputs, PackedEvents
from gdpa.models import options
from gdpa.models.base import Model, make_head
from gdpa.models.embedding import ContextTokens, Looked, Tables
from gdpa.models.features import Features, SequenceFeatures
from gdpa.nn import MLP, Jagged


@dataclass(frozen=True)
class DINConfig:
    """Options of :class:`DIN`.

    Args:
        dim: the width of embeddings and tokens.
        attention_hidden: the hidden widths of the MLP that weighs an event.
        hidden: those of the other MLPs.
    """

    dim: int = 64
    attention_hidden: tuple[int, ...] = (32,)
    hidden: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        options.sizes(self, "dim")
        options.widths(self, "attention_hidden", "hidden")


class TargetAttention(nn.Module):
    """DIN's pooling of one sequence: sum_j MLP([e_j | c | e_j - c | e_j * c]) e_j, without softmax; (B, pairs, dim).

    e_j are the columns of event j whose vocabulary is one of the context's too, c those of the context: the candidate.
    The others cannot be compared with it, and are not read.
    """

    def __init__(
        self, sequence: SequenceFeatures, features: Features, dim: int, hidden: tuple[int, ...], factory: dict[str, Any]
    ) -> None:
        super().__init__()
        columns = zip(sequence.vocabularies, candidate_columns(sequence, features), strict=True)
        self.pairs = [(i, j) for i, (_, j) in enumerate(columns) if j is not None]
        self.name, self.dim = sequence.name, dim
        if not self.pairs:
            raise ValueError(
                f"sequence {sequence.name!r} has ids of {sequence.vocabularies}, none of which is among the sparse "
                f"features {features.sparse}: there is no candidate to compare its events with"
            )
        self.weigh = MLP([4 * dim * len(self.pairs), *hidden, 1], **factory)

    def forward(self, events: PackedEvents, looked: Looked) -> Tensor:
        e = torch.cat([looked.events[self.name][i] for i, _ in self.pairs], dim=1)
        c = torch.cat([looked.sparse[j] for _, j in self.pairs], dim=1)
        of = Jagged(e, events.cu_seqlens).sequence_ids()
        c = F.pad(c, (0, 0, 0, 1))  # a candidate more, for rows of no sequence (see Jagged)
        c_of = c[of]
        weighed = e * self.weigh(torch.cat([e, c_of, e - c_of, e * c_of], dim=1))
        pooled = torch.zeros_like(c).to(weighed.dtype).index_add(0, of, weighed)[:-1]
        return pooled.unflatten(1, (-1, self.dim))


def candidate_columns(sequence: SequenceFeatures, features: Features) -> list[int | None]:
    """For each id of an event the first sparse column of the same vocabulary; None where there is none."""
    return [features.sparse.index(name) if name in features.sparse else None for name in sequence.vocabularies]


def without_candidate(features: Features) -> tuple[str, ...]:
    """Histories none of whose columns the context has, too."""
    return tuple(s.name for s in features.sequences if all(j is None for j in candidate_columns(s, features)))


class DIN(Model):
    """Deep Interest Network (arXiv 1706.06978): each event counts as much as the candidate says.

        u = sum_j MLP([e_j | c | e_j - c | e_j * c]) e_j      logit = MLP([X | u])

    >>> log = gdpa.data.SyntheticLog()
    >>> DIN(Features.of(log))(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = DINConfig
    config: DINConfig

    def __init__(
        self,
        features: Features,
        config: DINConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        read = {
            s.name: [i for i, j in enumerate(candidate_columns(s, features)) if j is not None]
            for s in features.sequences
        }
        self.tables = Tables(features, c.dim, factory, columns=read)
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        self.pools = nn.ModuleList(
            TargetAttention(s, features, c.dim, c.attention_hidden, factory) for s in features.sequences
        )
        n = self.context.num_tokens + sum(map(len, read.values()))
        self.head = make_head(features, [n * c.dim, *c.hidden], factory)

    def ignored(self) -> tuple[str, ...]:
        """Ids that the candidate has none of, and values: they cannot be compared with it."""
        found: list[str] = []
        for s in self.features.sequences:
            columns = zip(s.vocabularies, candidate_columns(s, self.features), strict=True)
            found += [f"{s.name}.{name}" for name, place in columns if place is None]
            found += [f"{s.name}.{name}" for name in s.values]
        return tuple(found)

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        looked = self.tables(batch)
        histories = [batch.sequences[s.name] for s in self.features.sequences]
        pooled = [self._run(pool, events, looked) for pool, events in zip(self.pools, histories, strict=True)]
        x = torch.cat([self.context(batch.dense, looked), *pooled], dim=1)
        return self.head(x.flatten(1)).squeeze(1)

    def _needs_candidates(self) -> str | None:
        return "each candidate weighs every event anew"
