"""What a source is, from a file name, a pattern, a list of them, or an object that holds rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpa.data.sources.base import Source
from gdpa.data.sources.text import TextSource
from gdpa.paths import expand

TABLES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
OTHERS = (".json", ".jsonl", ".ndjson", ".xls", ".xlsx", ".orc", ".avro", ".pkl", ".pickle")
PACKED = (".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z")


def open_source(found: Any) -> Source:
    """A path or glob, a list of those, a frame of pandas or polars, a table of pyarrow, a data set of Hugging Face's
    ``datasets``, or whatever has the methods of :class:`Source`."""
    if isinstance(found, str | Path):
        return _open_files(expand([found]))
    if isinstance(found, list | tuple) and found and all(isinstance(entry, str | Path) for entry in found):
        return _open_files(expand(found))
    if all(hasattr(found, name) for name in ("identity", "start", "blocks", "check")):
        return found
    from gdpa.data.sources.arrow import open_object

    return open_object(found)


def _open_files(paths: list[Path]) -> Source:
    for path in paths:
        _check_kind(path)
    tables = [path for path in paths if path.name.lower().endswith(TABLES)]
    if not tables:
        return TextSource(paths)
    if len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ValueError(f"files must be all text or all tables, not {str(tables[0])!r} together with {str(other)!r}")
    from gdpa.data.sources.arrow import open_tables

    return open_tables(tables)


def _check_kind(path: Path) -> None:
    """Refuses what is known to be no text with a header: to read it would only say that its first line is none."""
    name = path.name.lower()
    if name.removesuffix(".gz").endswith(OTHERS):
        how = 'read_json(..., lines=True).to_parquet("log.parquet")' if "json" in name else "to_parquet"
        raise ValueError(
            f"{str(path)!r} is neither text with a header, nor Parquet or Arrow; pandas converts it: {how}"
        )
    if name.endswith((*PACKED, *(f"{ending}.gz" for ending in TABLES))):
        raise ValueError(f"{str(path)!r} must be unpacked first; only CSV and TSV may be compressed, by gzip (.gz)")
