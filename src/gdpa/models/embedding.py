"""From ids and numbers to tokens: one table per vocabulary, tokens of the context, rows of the histories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gdpa.data import Inputs, PackedEvents
from gdpa.models.features import Features, SequenceFeatures
from gdpa.nn import MLP, Jagged, LayerNorm, MaskNet
from gdpa.ops import transformed
from gdpa.rowwise import computed, wanted
from gdpa.rowwise import tables as lookups
from gdpa.rowwise.gradients import RowGradients


@dataclass(frozen=True, eq=False)
class Looked:
    """What the tables have for a batch: (B, dim) for each column of Batch.sparse, (T, dim) for each column of a
    sequence's ids that is read, (B, dim) for each bag, the mean of its ids."""

    sparse: Sequence[Tensor]
    events: Mapping[str, Mapping[int, Tensor]]
    bags: Sequence[Tensor] = ()

    def columns(self, name: str) -> list[Tensor]:
        """Those of a sequence, in their order."""
        return list(self.events[name].values())


class Tables(nn.Module):
    """One embedding table per vocabulary that is read, (ids, dim), shared by all columns of that vocabulary.

    Batch -> Looked. Ids outside a table are refused on the CPU; a GPU stops with its own assertion. ``columns``: which
    columns of the sequences' ids are read; all by default. With ``row_gradients`` there are gradients of the rows that
    were read alone: sparse ones, or, where there are kernels for it, what ``gradients`` holds of them; a compiled model
    must then have been told, by ``expect``, which batch comes next.
    """

    row_gradients: bool = False

    def __init__(
        self,
        features: Features,
        dim: int,
        factory: dict[str, Any],
        *,
        columns: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.sparse, self.bags = dim, features.sparse, {bag.name: bag.vocabulary for bag in features.bags}
        self.columns = {
            s.name: {i: s.vocabularies[i] for i in (range(len(s.vocabularies)) if columns is None else columns[s.name])}
            for s in features.sequences
            if columns is None or s.name in columns
        }
        read = {*self.sparse, *(name for held in self.columns.values() for name in held.values())}
        read |= set(self.bags.values())
        self.sizes = {name: size for name, size in features.vocabularies.items() if name in read}
        for name, size in self.sizes.items():
            self.register_parameter(self.parameter_name(name), nn.Parameter(torch.empty(size, dim, **factory)))
        self.numbers = {name: i for i, name in enumerate(self.sizes)}
        self.gradients = RowGradients(list(self.sizes.values()))
        self.expected: list[Tensor | None] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal, of variance 1, or 16 / ids where there are more than 16 ids: items that are rarely seen differ little
        at first, so that the categories that they share with others stand out."""
        for table in self.parameters():
            nn.init.normal_(table, std=min(1.0, 4 / math.sqrt(table.shape[0])))

    def forward(self, batch: Inputs) -> Looked:
        if not self.row_gradients or not torch.is_grad_enabled():
            return self._look_up(batch)
        if not self.by_kernels():
            return self._look_up_outside(batch)
        if not torch.compiler.is_compiling():
            self.expect(batch)
        if self.expected is None:
            raise RuntimeError("a compiled model with row_gradients needs tables.expect(batch) before every batch")
        return self._look_up(batch, self.expected)

    def by_kernels(self) -> bool:
        """Whether there are kernels for these tables, and they are wanted."""
        if not self.sizes or not wanted() or transformed():
            return False
        return all(map(lookups.has_kernel, self.parameters()))

    def expect(self, batch: Inputs) -> None:
        """With ``row_gradients`` and kernels: ``batch`` comes next, under the same autocast. Forward does this itself
        unless it is compiled, where nothing can be made that has a gradient of its own."""
        if self.row_gradients and self.by_kernels():
            dtype, learns = self._of_rows(), [p.requires_grad for p in self.parameters()]
            columns = [(self.numbers[name], ids) for name, ids in self._columns(batch)]
            self.expected = [
                self.gradients.expect(i, ids, self.dim, dtype) if learns[i] else None for i, ids in columns
            ]

    def clear_gradients(self) -> None:
        """Of rows; nothing is expected any more."""
        self.gradients.clear()
        self.expected = None

    def _of_rows(self) -> torch.dtype:
        """Of gradients of rows: the one that autocast computes in, as those of all products."""
        return computed(next(self.parameters())[:0]).dtype

    @torch.compiler.disable
    def _look_up_outside(self, batch: Inputs) -> Looked:
        """torch.compile knows no sparse gradients."""
        return self._look_up(batch)

    def _columns(self, batch: Inputs) -> list[tuple[str, Tensor]]:
        """Every column that is read, and the vocabulary that its ids are of."""
        events = [
            (name, batch.sequences[sequence].ids[:, i])
            for sequence, held in self.columns.items()
            for i, name in held.items()
        ]
        bags = [(name, batch.bags[bag].ids[:, 0]) for bag, name in self.bags.items()]
        sparse = batch.sparse.unbind(1) if self.sparse else ()  # of none, it would be a node that cannot be loaded
        return [*zip(self.sparse, sparse, strict=True), *events, *bags]

    def _look_up(self, batch: Inputs, leaves: Sequence[Tensor | None] | None = None) -> Looked:
        columns = self._columns(batch)
        of_rows = self._of_rows() if leaves is None and torch.is_grad_enabled() and self.by_kernels() else None
        rows = iter(
            self._rows(name, ids, of_rows if i >= len(self.sparse) else None, None if leaves is None else leaves[i])
            for i, (name, ids) in enumerate(columns)
        )
        return Looked(
            [next(rows) for _ in self.sparse],
            {sequence: {i: next(rows) for i in held} for sequence, held in self.columns.items()},
            [mean_of_bags(next(rows), batch.bags[bag]) for bag in self.bags],
        )

    def _rows(self, vocabulary: str, ids: Tensor, of_rows: torch.dtype | None, leaf: Tensor | None) -> Tensor:
        """``of_rows``: of the gradients that a kernel is to add up. Few ids, one of a sample, are not worth sorting."""
        table = self.get_parameter(self.parameter_name(vocabulary))
        try:
            if leaf is not None:
                return lookups.look_up_beside(table, ids, leaf)
            if of_rows is not None:
                return lookups.look_up(table, ids, of_rows)
            if torch.compiler.is_compiling():
                return F.embedding(ids, table)
            return F.embedding(ids, table, sparse=self.row_gradients)
        except IndexError:
            low, high, size = int(ids.min()), int(ids.max()), table.shape[0]
            raise IndexError(
                f"vocabulary {vocabulary!r} has {size} ids, 0 to {size - 1}; the batch has ids from {low} to {high}"
            ) from None

    @staticmethod
    def parameter_name(vocabulary: str) -> str:
        """Of its table; it may hold no dot."""
        return "of_" + vocabulary.replace("%", "%25").replace(".", "%2E")

    def extra_repr(self) -> str:
        return ", ".join([f"dim={self.dim}", *(f"{name}={size}" for name, size in self.sizes.items())])


def mean_of_bags(rows: Tensor, bags: PackedEvents) -> Tensor:
    """(B, dim) of the rows of each bag; zeros of an empty one. Rows of no bag (see Jagged) are left out."""
    of, n = Jagged(rows, bags.cu_seqlens).sequence_ids(), bags.cu_seqlens.shape[0] - 1
    lengths = bags.lengths().clamp_min(1)[:, None].to(rows.dtype)
    return rows.new_zeros(n + 1, rows.shape[1]).index_add(0, of, rows)[:-1] / lengths


class ContextTokens(nn.Module):
    """The context as tokens: one of all dense features by an MLP, one of each sparse feature and of each bag from its
    table.

        X = [MLP(dense) | table(sparse_1) | ... | mean of table(bag_1) | ...]        (B, num_tokens, dim)

    Without any feature there is one learned token.
    """

    def __init__(self, features: Features, dim: int, hidden: tuple[int, ...], factory: dict[str, Any]) -> None:
        super().__init__()
        width, ids = len(features.dense), len(features.sparse) + len(features.bags)
        self.dense = MLP([width, *hidden, dim], **factory) if width else None
        self.constant = nn.Parameter(torch.empty(1, dim, **factory)) if not width and not ids else None
        self.num_tokens = max(1, ids + (width > 0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear and the tables start."""
        if self.dense is not None:
            self.dense.reset_parameters()
        if self.constant is not None:
            nn.init.normal_(self.constant)

    def forward(self, dense: Tensor, looked: Looked) -> Tensor:
        if self.constant is not None:
            return self.constant.repeat(dense.shape[0], 1, 1)  # not expanded: see LearnedTokens
        tokens = [] if self.dense is None else [self.dense(dense.to(_dtype(self.dense)))]
        return torch.stack([*tokens, *looked.sparse, *looked.bags], dim=1)


class EventTokens(nn.Module):
    """The events of one sequence as rows: all their ids and values, merged by MaskNet, beside the sum of embeddings.

        c_j = [table(id_1) | ... | sign(v) log(1 + |v|)]
        s_j = LayerNorm(MaskNet(c_j) + W sum_i table(id_i))             Jagged (T, dim)

    ``table_dim`` is the width of the tables, ``dim`` that of the rows; where they are the same, W is the identity, so
    that events begin in the space of the context's tokens.
    """

    def __init__(self, sequence: SequenceFeatures, table_dim: int, dim: int, factory: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.vocabularies, self.table_dim = sequence.name, sequence.vocabularies, table_dim
        width = len(sequence.vocabularies) * table_dim + len(sequence.values)
        self.merge = MaskNet(width, dim, mask_hidden=[dim], hidden=[dim], **factory)
        widen = self.vocabularies and table_dim != dim
        self.widen = nn.Linear(table_dim, dim, bias=False, **factory) if widen else None
        self.norm = LayerNorm(dim, **factory)

    def forward(self, events: PackedEvents, looked: Looked) -> Jagged:
        return Jagged(self._rows(looked.columns(self.name), events.values), events.cu_seqlens, events.longest)

    def candidate(self, sparse: Tensor, columns: Sequence[int | None], looked: Looked) -> Tensor:
        """The context as if it were an event, (B, dim): ``columns`` has for each id the column of ``sparse`` that holds
        it, or None for zeros; so are the values."""
        missing = torch.zeros(sparse.shape[0], self.table_dim, device=sparse.device, dtype=_dtype(self))
        parts = [missing if c is None else looked.sparse[c] for c in columns]
        width = self.merge.dim - self.table_dim * len(parts)
        return self._rows(parts, missing.new_zeros(sparse.shape[0], width))

    def _rows(self, parts: list[Tensor], values: Tensor) -> Tensor:
        values = values.to(_dtype(self))
        rows = self.merge(computed(torch.cat([*parts, values.sign() * values.abs().log1p()], dim=1)))
        if parts:
            total = torch.stack(parts).sum(0)
            rows = rows + (total if self.widen is None else self.widen(total))
        return self.norm(rows)


def _dtype(module: nn.Module) -> torch.dtype:
    """Data is float32; a model may be float64 or bfloat16."""
    return next(module.parameters()).dtype
