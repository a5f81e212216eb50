"""What a source is, from a file name, a pattern, a list of them, or an object that holds rows."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gdpa.data.sources.base import Source
from gdpa.data.sources.text import TextSource

TEXT = (".csv", ".tsv", ".tab", ".txt", ".csv.gz", ".tsv.gz", ".tab.gz", ".txt.gz")
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
    from gdpa.data.sources.tables import open_object

    return open_object(found)


def expand(names: Sequence[str | Path]) -> list[Path]:
    """The files that names and patterns mean, in order. One that means none is refused."""
    paths: list[Path] = []
    for name in names:
        if glob.has_magic(str(name)) and not Path(name).exists():
            matches = sorted(glob.glob(str(name), recursive=True))
            if not matches:
                raise FileNotFoundError(f"no file matches {str(name)!r}")
            paths += map(Path, matches)
        elif not Path(name).is_file():
            raise FileNotFoundError(f"there is no file {str(name)!r}")
        else:
            paths.append(Path(name))
    return paths


def _open_files(paths: list[Path]) -> Source:
    tables = [path for path in paths if path.name.lower().endswith(TABLES)]
    if not tables:
        return TextSource(paths)
    if len(tables) < len(paths):
        other = next(path for path in paths if path not in tables)
        raise ValueError(f"files must be all text or all tables, not {str(tables[0])!r} beside {str(other)!r}")
    from gdpa.data.sources.tables import open_tables

    return open_tables(tables)
