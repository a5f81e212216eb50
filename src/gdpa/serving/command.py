"""`gdpa predict` and `gdpa evaluate`: a checkpoint on a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gdpa.train.requirements  # noqa: F401 - first: it says what to install where something is missing
from gdpa.serving import scoring, writing
from gdpa.serving.checkpoints import open_checkpoint
from gdpa.train.data.reader import spare_batch
from gdpa.train.parallel.ranks import Ranks
from gdpa.train.run.evaluate import evaluate as metrics_of


def predict(
    checkpoint: Path, file: Path, out: Path, ids: tuple[str, ...], batch_size: int, overwrite: bool, **options: Any
) -> str:
    """Scores every row of ``file`` into ``out``; a line that says so, and one of what is strange about the file."""
    if out.exists() and out.samefile(file):
        raise ValueError(f"out must not be {str(file)!r}, the file being scored: its other columns would be lost")
    saved = open_checkpoint(checkpoint, **options)
    started = time.perf_counter()
    columns = scoring.id_columns(saved.schema(), ids)
    strange = scoring.Strange(saved.schema())
    scores = scoring.score_file(saved, file, columns, batch_size, strange)
    rows = writing.write(out, columns, scores, overwrite, saved.schema().labels)
    seconds = time.perf_counter() - started
    said = f"{rows} row{'' if rows == 1 else 's'} scored in {seconds:.1f} s ({rows / seconds:.0f} a second): {out}"
    if names := strange.names():
        said += f"\nnote: no value of {', '.join(names)} is known from the training: is it written as it was there?"
    return said


def evaluate(checkpoint: Path, file: Path | None, split: str, batch_size: int, **options: Any) -> str:
    """The metrics on a file, or on the run's own samples, as a line of JSON."""
    saved = open_checkpoint(checkpoint, **options)
    stream = saved.split(split) if file is None else saved.stream(file)
    device = next(saved.model.parameters()).device
    ranks = Ranks(0, 1, None, device)
    found = metrics_of(saved.model, stream, batch_size, ranks, spare_batch(stream), saved.config.dtype)
    return json.dumps(found.to_dict(stream.label_names))
