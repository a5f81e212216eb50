"""What happened in a run, one record after another: in memory, and as metrics.jsonl where there is a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from gdpa.train.storage.checkpoint import write_whole


class Journal:
    """``kept`` records of the earlier part of a continued run come first: those before its checkpoint."""

    def __init__(self, path: Path | None = None, kept: int = 0) -> None:
        self.records: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        if path is not None:
            self.records = _read(path)[:kept]
            text = "".join(_line(record) for record in self.records)
            write_whole(path, lambda file: file.write(text.encode()))
            self._file = path.open("a", encoding="utf-8")

    def add(self, event: str, step: int, **values: Any) -> dict[str, Any]:
        record = {"event": event, "step": step, **values}
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))
        return record

    def flush(self) -> None:
        """To the disk: a checkpoint must not be newer than the records before it."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["event"] == event]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _read(path: Path) -> list[dict[str, Any]]:
    """Up to the first line that a killed process left unfinished."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return found
