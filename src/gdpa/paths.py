"""Names of files that people give, looked up before anything slow begins. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path


def expand(names: Sequence[str | Path]) -> list[Path]:
    """The files that names and patterns mean, in order. One that means none is refused."""
    paths: list[Path] = []
    for name in names:
        if glob.has_magic(str(name)) and not Path(name).exists():
            matches = sorted(glob.glob(str(name), recursive=True))
            if not matches:
                raise FileNotFoundError(f"no file matches {str(name)!r} (looked in {Path.cwd()})")
            paths += map(Path, matches)
        elif Path(name).is_dir():
            raise FileNotFoundError(f"{str(name)!r} is a folder: name files in it, as {str(Path(name) / '*.csv')!r}")
        elif not Path(name).is_file():
            raise FileNotFoundError(f"there is no file {str(name)!r} (looked in {Path.cwd()})")
        else:
            paths.append(Path(name))
    return paths


def check_spec(spec: str) -> None:
    """Refuses file.py:function if there is no such file."""
    where = spec.rpartition(":")[0]
    if where.endswith(".py"):
        expand([where])
