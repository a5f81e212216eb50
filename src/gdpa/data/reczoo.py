"""CSV files in the layout of the reczoo and BARS data sets: a header, one impression per row, histories as a^b^c."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpa.data.schema import Schema
from gdpa.data.tables import TableLog
from gdpa.data.vocabulary import Vocabularies


class ReczooCSV(TableLog):
    """A :class:`TableLog` of one CSV file.

    train = ReczooCSV("train.csv", "AmazonElectronics_x1", shuffle=100_000)
    test = ReczooCSV("test.csv", "AmazonElectronics_x1", train.vocabularies)
    """

    def __init__(
        self,
        path: str | Path,
        schema: Schema | str,
        vocabularies: Vocabularies | None = None,
        *,
        shuffle: int = 0,
        seed: int = 0,
        skip_bad: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.path = Path(path)
        super().__init__(
            path, schema, vocabularies, shuffle=shuffle, seed=seed, skip_bad=skip_bad, workers=workers, rank=rank,
            world=world,
        )  # fmt: skip

    def _identity(self) -> dict[str, Any]:
        """A file's name and size: its folder may differ where a run is continued."""
        size = self.path.stat().st_size
        return {"kind": "ReczooCSV", "file": self.path.name, "bytes": size, "shuffle": self.shuffle, "seed": self.seed}
