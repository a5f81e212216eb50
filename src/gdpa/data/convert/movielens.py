"""MovieLens as GroupLens publishes it, in its three layouts. A row is a rating; liked is one of at least 4 stars."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdpa.data.convert.writing import Converter, Row, find, with_histories

ORIGIN = "https://files.grouplens.org/datasets/movielens/{}.zip (unpack it, and name the folder)"
LIKED = 4.0
PAST = {"hist_items": "item_id", "hist_ratings": "rating", "hist_times": "time"}
Table = dict[str, dict[str, Any]]


def _rows_100k(raw: Path, max_len: int) -> Iterator[Row]:
    """u.data and u.user have tabs and bars; u.item has a flag for each genre of u.genre. All are in Latin-1."""
    paths = {name: _find(raw, name, "MovieLens-100k", "ml-100k") for name in ("u.data", "u.item", "u.genre", "u.user")}
    genres = [row[0] for row in _split(paths["u.genre"], "|") if row[0]]
    items = {
        row[0]: {"genres": [name for name, flag in zip(genres, row[5:], strict=False) if flag == "1"]}
        for row in _split(paths["u.item"], "|")
    }
    users = {
        row[0]: {"age": row[1], "gender": row[2], "occupation": row[3], "zip": row[4]}
        for row in _split(paths["u.user"], "|")
    }
    return _rows(_split(paths["u.data"], "\t"), items, users, max_len)


def _rows_1m(raw: Path, max_len: int) -> Iterator[Row]:
    """ratings.dat, movies.dat and users.dat have :: between their fields, in Latin-1."""
    names = ("ratings.dat", "movies.dat", "users.dat")
    ratings, movies, people = (_find(raw, name, "MovieLens-1M", "ml-1m") for name in names)
    items = {row[0]: {"genres": row[2].split("|")} for row in _split(movies, "::")}
    users = {
        row[0]: {"age": row[2], "gender": row[1], "occupation": row[3], "zip": row[4]} for row in _split(people, "::")
    }
    return _rows(_split(ratings, "::"), items, users, max_len)


def _rows_20m(raw: Path, max_len: int) -> Iterator[Row]:
    """ratings.csv and movies.csv have headers and are in UTF-8. Nothing is published of the users."""
    ratings, movies = (_find(raw, name, "MovieLens-20M", "ml-20m") for name in ("ratings.csv", "movies.csv"))
    items = {row[0]: {"genres": _genres(row[2])} for row in _csv(movies)}
    return _rows(_csv(ratings), items, None, max_len)


def _genres(text: str) -> list[str]:
    return [] if text == "(no genres listed)" else text.split("|")


def _find(raw: Path, name: str, what: str, archive: str) -> Path:
    return find(raw, name, what, ORIGIN.format(archive))


def _split(path: Path, separator: str) -> Iterator[list[str]]:
    with path.open(encoding="latin-1") as file:
        for line in file:
            if line.strip():
                yield line.rstrip("\r\n").split(separator)


def _csv(path: Path) -> Iterator[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows, None)
        yield from rows


def _rows(ratings: Iterator[list[str]], items: Table, users: Table | None, max_len: int) -> Iterator[Row]:
    """All ratings are held as four numbers each, to be put in the order of time."""
    held = [(int(time), int(user), int(item), float(stars)) for user, item, stars, time in ratings]
    held.sort(key=lambda rating: rating[0])  # equal times stay in the order of the file
    nobody = {"age": "", "gender": "", "occupation": "", "zip": ""}

    def events() -> Iterator[Row]:
        for time, user, item, stars in held:
            facts = {} if users is None else users.get(str(user), nobody)
            genres = items.get(str(item), {"genres": []})["genres"]
            yield {
                "liked": int(stars >= LIKED), "rating": stars, "user_id": user, "item_id": item, "time": time,
                "genres": genres, **facts,
            }  # fmt: skip

    return with_histories(events(), "user_id", PAST, max_len, lambda row: True)


MOVIELENS = {
    "movielens-100k": Converter("MovieLens_100k", ORIGIN.format("ml-100k"), _rows_100k),
    "movielens-1m": Converter("MovieLens_1M", ORIGIN.format("ml-1m"), _rows_1m),
    "movielens-20m": Converter("MovieLens_20M", ORIGIN.format("ml-20m"), _rows_20m),
}
