"""The rows of a file and a model's score for each, in the file's order; never more of it in memory than a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gdpa.data import Batch, Schema, Unlabelled, unlabelled
from gdpa.data.vocabulary import FIRST, UNSEEN
from gdpa.serving.checkpoints import Saved
from gdpa.train.run.step import autocast, check_logits


@dataclass(frozen=True)
class Scores:
    """Of some rows: what their id columns say, (rows, ids), and the logits (rows,) float32, on the CPU; (rows, K) of K
    labels. ``table``: the id columns as a table of pyarrow, where the file has types."""

    ids: list[tuple[str, ...]]
    logits: Tensor
    table: Any = None

    def probabilities(self) -> Tensor:
        """As the logits, float64: float32 would be exactly 1 from a logit of 17 on."""
        return torch.sigmoid(self.logits.double())


def id_columns(schema: Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Those asked for, each once, or else the group's."""
    return tuple(dict.fromkeys(names)) or (schema.group,)


class Strange:
    """Whether the values of a column have ids of their own: of one that is written in another way, none has."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.known: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()

    def add(self, batch: Batch) -> None:
        for name, ids in self._columns(batch):
            self.known[name] += int((ids >= FIRST).sum())
            self.unseen[name] += int((ids == UNSEEN).sum())

    def _columns(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        yield from ((c.name, batch.sparse[:, i]) for i, c in enumerate(self.schema.categorical))
        yield from ((bag.name, batch.bags[bag.name].ids[:, 0]) for bag in self.schema.bags)
        for history in self.schema.histories:
            events = batch.sequences[history.name].ids
            yield from ((c.name, events[:, i]) for i, c in enumerate(history.ids))

    def names(self) -> list[str]:
        """The columns of which nothing is known."""
        return [name for name, n in self.unseen.items() if n and not self.known[name]]


def score_file(
    saved: Saved, path: Path, ids: Sequence[str] = (), batch_size: int = 512, strange: Strange | None = None
) -> Iterator[Scores]:
    """The scores of at most ``batch_size`` rows at a time. The file needs no label; ``ids`` may be any of its
    columns. ``strange`` sees all rows."""
    schema = saved.schema()
    return _score(saved, unlabelled(path, schema, saved.known(), id_columns(schema, ids), batch_size), strange)


def _score(saved: Saved, parts: Iterator[Unlabelled], strange: Strange | None) -> Iterator[Scores]:
    device = next(saved.model.parameters()).device
    for rows in parts:
        if strange is not None:
            strange.add(rows.batch)
        with torch.no_grad(), autocast(device, saved.config.dtype):
            logits = saved.model(rows.batch.to(device))
        check_logits(logits, rows.batch)
        logits = logits.float().cpu()
        if not bool(torch.isfinite(logits).all()):
            first = (~torch.isfinite(logits)).nonzero()[0]
            raise rows.error(int(first[0]), f"the prediction is {float(logits[tuple(first)])}")
        yield Scores(rows.ids, logits, rows.table)
