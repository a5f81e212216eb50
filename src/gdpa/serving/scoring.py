"""The rows of a file and a model's score for each, in the file's order; never more of it in memory than a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from gdpa.data import DataError, Sample, Schema, Vocabularies, collate
from gdpa.data.parse import RowParser
from gdpa.data.rows import Header, Line, fields, read_header, read_lines
from gdpa.serving.checkpoints import Saved
from gdpa.train.step import autocast, check_logits


@dataclass(frozen=True)
class Scores:
    """Of some rows: what their id columns say, (rows, ids), and the logits (rows,) float32, on the CPU."""

    ids: list[tuple[str, ...]]
    logits: Tensor

    def probabilities(self) -> Tensor:
        """(rows,) float64: float32 would be exactly 1 from a logit of 17 on."""
        return torch.sigmoid(self.logits.double())


def id_columns(schema: Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Those asked for, or else the group's."""
    return tuple(names) or (schema.group,)


def score_file(saved: Saved, path: Path, ids: Sequence[str] = (), batch_size: int = 512) -> Iterator[Scores]:
    """The scores of each ``batch_size`` rows in turn. The file needs no label; ``ids`` may be any of its columns."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, not {batch_size}")
    schema = saved.schema()
    columns = id_columns(schema, ids)
    header = read_header(path, tuple(dict.fromkeys([*schema.feature_columns, *columns])))
    return _score(saved, _Rows(path, header, schema, saved.known(), columns), batch_size)


def _score(saved: Saved, rows: _Rows, batch_size: int) -> Iterator[Scores]:
    lines = read_lines(rows.path, rows.header.offset, rows.header.lines)
    device = next(saved.model.parameters()).device
    while held := list(islice(lines, batch_size)):
        parsed = [rows.parse(line) for line in held]
        batch = collate([sample for _, sample in parsed])
        with torch.no_grad(), autocast(device, saved.config.dtype):
            logits = saved.model(batch.to(device))
        check_logits(logits, batch)
        logits = logits.float().cpu()
        if not bool(torch.isfinite(logits).all()):
            first = int((~torch.isfinite(logits)).nonzero()[0])
            raise DataError(f"the prediction is {float(logits[first])}", rows.path, held[first].number)
        yield Scores([ids for ids, _ in parsed], logits)


class _Rows:
    """Lines as samples without labels, and their ids."""

    def __init__(
        self, path: Path, header: Header, schema: Schema, vocabularies: Vocabularies, ids: tuple[str, ...]
    ) -> None:
        self.path, self.header, self.ids = path, header, ids
        self._parser = RowParser(path, header, schema, vocabularies)

    def parse(self, line: Line) -> tuple[tuple[str, ...], Sample]:
        row = fields(self.path, line, self.header)
        return tuple(row[name] for name in self.ids), self._parser.sample(row, line.number)
