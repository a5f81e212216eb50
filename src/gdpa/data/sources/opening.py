"""What a source is, from a file name, a pattern, a list of them, or an object that holds rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpa.data.sources.base import Source
from gdpa.data.sources.text import TextSource
from gdpa.paths import expand

TABLES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")


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
    tables = [path for path in paths if path.name.lower().endswith(TABLES)]
    if not tables:
        return TextSource(paths)
    if len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ValueError(f"files must be all text or all tables, not {str(tables[0])!r} together with {str(other)!r}")
    from gdpa.data.sources.arrow import open_tables

    return open_tables(tables)
