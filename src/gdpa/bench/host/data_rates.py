"""`gdpa bench --data`: rows per second from files to batches, for CSV and Parquet, and how memory grows on the way.

The table is made here: a label, a user, a number, two ids and a history of 50 events with one or two ids each.
Times are those of a second pass, in which worker processes are running and lookup tables are made; the better of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from gdpa.bench import machine, noise
from gdpa.bench.results import FORMAT
from gdpa.commands.folding import show_table
from gdpa.data import Categorical, History, Numeric, Schema, TableLog, Vocabularies, batches

KIND = "data"
EVENTS = 50
BATCH = 512
ITEMS, GROUPS = 50_000, 300
SHUFFLE = 50_000
ROWS, FEW_ROWS = 200_000, 20_000
MEMORY = "memory: of the process that reads, after a tenth of a pass / the most after that / at its end"


def schema(columns: int) -> Schema:
    """With one or two ids of each event."""
    ids = (Categorical("hist_items", "item"), Categorical("hist_kinds", "kind"))[:columns]
    return Schema(
        "label", "user", (Numeric("price"),), (Categorical("item"), Categorical("kind")),
        (History("history", ids, EVENTS),),
    )  # fmt: skip


def make_csv(path: Path, rows: int, seed: int = 0) -> None:
    with path.open("w") as file:
        file.write("label,user,price,item,kind,hist_items,hist_kinds\n")
        for first in range(0, rows, 10_000):
            items = _items(min(10_000, rows - first), seed + first)
            for row, own in enumerate(items.tolist(), first):
                kinds = [item % GROUPS for item in own]
                past = ("^".join(map(str, own[1:])), "^".join(map(str, kinds[1:])))
                file.write(f"{row % 2},{row % 1000},{row / 7:.4f},{own[0]},{kinds[0]},{past[0]},{past[1]}\n")


def make_parquet(path: Path, rows: int, seed: int = 0) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for first in range(0, rows, 10_000):
        items = _items(min(10_000, rows - first), seed + first)
        row, offsets = np.arange(first, first + len(items)), pa.array(np.arange(len(items) + 1) * EVENTS, pa.int32())
        past = [pa.array(np.ascontiguousarray(values[:, 1:]).ravel()) for values in (items, items % GROUPS)]
        table = pa.table({
            "label": row % 2, "user": row % 1000, "price": row / 7, "item": items[:, 0], "kind": items[:, 0] % GROUPS,
            "hist_items": pa.ListArray.from_arrays(offsets, past[0]),
            "hist_kinds": pa.ListArray.from_arrays(offsets, past[1]),
        })  # fmt: skip
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def _items(rows: int, seed: int) -> np.ndarray:
    """(rows, 1 + EVENTS): a few items are much of the log, as everywhere, and the numbers of items tell nothing."""
    return np.random.default_rng(seed).zipf(1.2, size=(rows, 1 + EVENTS)) * 7919 % ITEMS


def sources(globs: Sequence[str] = ()) -> tuple[str, ...]:
    """Those that one of ``globs`` means; all, if there are none."""
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in MAKERS):
            raise ValueError(f"no data source is called {glob!r}; data sources: {', '.join(MAKERS)}")
    return tuple(name for name in MAKERS if not globs or any(fnmatchcase(name, glob) for glob in globs))


def steps(names: Sequence[str]) -> int:
    return len(names) * (1 + len(IDS) * len(WORKERS))


def run(rows: int, names: Sequence[str], step: Callable[[str], None] = lambda label: None) -> dict[str, Any]:
    """Measure these sources; the document to store."""
    known = Vocabularies({"item": _numbered(ITEMS), "kind": _numbered(GROUPS)})
    records, skipped, others = [], [], noise.Others()
    with TemporaryDirectory(prefix="gdpa-bench-") as folder:
        for kind in names:
            if kind == "parquet" and find_spec("pyarrow") is None:
                skipped.append({"source": kind, "reason": "pyarrow is not installed"})
                continue
            step(f"writing {rows:,} rows of {kind}")
            path = Path(folder) / f"log.{kind}"
            MAKERS[kind](path, rows)
            for columns in IDS:
                for workers in WORKERS:
                    step(f"{kind}, {columns} ids an event, {workers} workers")
                    found = measure(path, rows, schema(columns), known, workers)
                    records.append({"source": kind, "ids": columns, "workers": workers, **found,
                                    "bytes": path.stat().st_size})  # fmt: skip
            path.unlink()
    about = {"rows": rows, "events": EVENTS, "batch_size": BATCH, "shuffle": SHUFFLE,
             "load": others.load()}  # fmt: skip
    return {"format": FORMAT, "kind": KIND, **machine.describe(torch.device("cpu")), **about, "records": records,
            "skipped": skipped}  # fmt: skip


MAKERS = {"csv": make_csv, "parquet": make_parquet}
IDS, WORKERS = (1, 2), (0, 1, 2)


def _numbered(count: int) -> dict[str, int]:
    return {str(i): i + 2 for i in range(count)}


def measure(path: Path, rows: int, schema: Schema, known: Vocabularies, workers: int) -> dict[str, Any]:
    """rows_per_s, and of the memory in use in the last pass resident_mb: after a tenth of it, the most after that, and
    at its end; growth_mb is how much more it is at the end than after the tenth."""
    log = TableLog(path, schema, known, shuffle=SHUFFLE, workers=workers)
    rates, held = [], [0.0]
    for epoch in range(3):
        log.set_epoch(epoch)
        started, count, held = time.perf_counter(), 0, []
        for batch in batches(log, BATCH):
            count += len(batch)
            if count >= rows // 10:
                held.append(_resident_mb())
        rates.append(count / (time.perf_counter() - started))
    log.close()
    resident = {"tenth": held[0], "most": max(held), "end": held[-1]}
    return {"rows_per_s": max(rates[1:]), "resident_mb": resident, "growth_mb": resident["end"] - resident["tenth"]}


def _resident_mb() -> float:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
    except OSError:
        return 0.0


def show(console: Any, document: dict[str, Any]) -> None:
    """On the terminal."""
    from rich.table import Table

    events = f"{document['rows']:,} rows, histories of {document['events']}, batches of {document['batch_size']}"
    table = Table("source", "MB", "ids an event", "workers", "rows/s", "memory grew", "memory, MB", title=events,
                  title_justify="left", caption=MEMORY, caption_justify="left")  # fmt: skip
    for record in document["records"]:
        resident = record.get("resident_mb")  # earlier results have none
        table.add_row(
            record["source"], f"{record['bytes'] / 1e6:,.0f}", str(record["ids"]), str(record["workers"]),
            f"{record['rows_per_s']:,.0f}", f"{round(record['growth_mb'])} MB",
            "-" if resident is None else " / ".join(f"{resident[when]:,.0f}" for when in ("tenth", "most", "end")),
        )  # fmt: skip
    show_table(console, table, 4)
    if noise.busy(document):
        console.print(f"Warning: {noise.load_words(document)}", style="yellow", markup=False)
    for entry in document["skipped"]:
        console.print(f"{entry['source']}: {entry['reason']}", style="dim", markup=False)
