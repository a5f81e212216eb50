"""A small table with everything that a schema can ask for, as columns of Python values and as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpa.data import Bag, Categorical, History, Numeric, Schema, Time

SCHEMA = Schema(
    label=("click", "like"),
    group="user",
    numeric=(Numeric("price", log1p=True),),
    categorical=(Categorical("item"), Categorical("page")),
    histories=(
        History("seen", (Categorical("items", "item"), Numeric("stars"), Time("times", "ms")), max_len=4),
        History("words", (Categorical("query"),), max_len=3, separator=" "),
    ),
    bags=(Bag("genres", max_len=2),),
    weight="weight",
    time="time",
)


def columns(rows: int = 40) -> dict[str, list[Any]]:
    """Row n has the user n, by which tests recognise it. Histories are longer and shorter than max_len, and empty."""
    lengths = [n % 7 for n in range(rows)]
    return {
        "click": [n % 2 for n in range(rows)],
        "like": [int(n % 5 == 0) for n in range(rows)],
        "user": list(range(rows)),
        "price": [n / 4 for n in range(rows)],
        "item": [n % 9 for n in range(rows)],
        "page": [f"p{n % 3}" for n in range(rows)],
        "items": [[(n + j) % 11 for j in range(length)] for n, length in enumerate(lengths)],
        "stars": [[j / 2 for j in range(length)] for length in lengths],
        "times": [
            [1000 * (100_000 + n - 86_400 * j) for j in range(length, 0, -1)] for n, length in enumerate(lengths)
        ],
        "query": [["a", "b", "c", "d"][: n % 5] for n in range(rows)],
        "genres": [["x", "y", "z"][: n % 4] for n in range(rows)],
        "weight": [0.5 + n % 3 for n in range(rows)],
        "time": [100_000 + n for n in range(rows)],
        "unused": ["-"] * rows,
    }


SEPARATORS = {"items": "^", "stars": "^", "times": "^", "query": " ", "genres": "|"}


def write_text(path: Path, table: dict[str, list[Any]], delimiter: str = ",") -> Path:
    def text(name: str, value: Any) -> str:
        return SEPARATORS[name].join(map(str, value)) if isinstance(value, list) else str(value)

    lines = [delimiter.join(table)]
    for row in zip(*table.values(), strict=True):
        lines.append(delimiter.join(text(name, value) for name, value in zip(table, row, strict=True)))
    content = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        import gzip

        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path
