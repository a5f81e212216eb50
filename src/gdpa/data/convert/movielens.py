"""MovieLens as GroupLens publishes it, in its three layouts. A row is a rating; liked is one of at least 4 stars."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gdpa.data.convert.histories import Column, Log, in_order, lookup, with_histories
from gdpa.data.convert.records import Records, finite, flag, separated, whole, with_header
from gdpa.data.convert.writing import Converter, find

ORIGIN = "https://files.grouplens.org/datasets/movielens/{}.zip (unpack it, and name the folder)"
LIKED = 4.0
PAST = {"hist_items": "item_id", "hist_ratings": "rating", "hist_times": "time"}
PERSON = ("age", "gender", "occupation", "zip")
Genres = dict[int, list[str]]
People = dict[int, dict[str, str]]


def _read_100k(raw: Path, max_len: int) -> Log:
    """u.data and u.user have tabs and bars; u.item has a flag for each genre of u.genre. All are in Latin-1."""
    paths = {name: _find(raw, name, "MovieLens-100k", "ml-100k") for name in ("u.data", "u.item", "u.genre", "u.user")}
    genres = [name for (name,) in separated(paths["u.genre"], "|", ("genre", "number")).read({"genre": str})]
    films = separated(paths["u.item"], "|", ("movie id", "title", "release", "video release", "url", *genres))
    items = {
        item: [name for name, of in zip(genres, flags, strict=True) if of]
        for item, *flags in films.read({"movie id": whole, **dict.fromkeys(genres, flag)})
    }
    users = _people(separated(paths["u.user"], "|", ("user id", *PERSON)))
    ratings = separated(paths["u.data"], "\t", ("user id", "movie id", "rating", "timestamp"))
    return _log(ratings, items, users, max_len)


def _read_1m(raw: Path, max_len: int) -> Log:
    """ratings.dat, movies.dat and users.dat have :: between their fields, in Latin-1."""
    names = ("ratings.dat", "movies.dat", "users.dat")
    ratings, movies, people = (_find(raw, name, "MovieLens-1M", "ml-1m") for name in names)
    films = separated(movies, "::", ("movie id", "title", "genres"))
    items = {item: genres.split("|") for item, genres in films.read({"movie id": whole, "genres": str})}
    users = _people(separated(people, "::", ("user id", "gender", "age", "occupation", "zip")))
    return _log(separated(ratings, "::", ("user id", "movie id", "rating", "timestamp")), items, users, max_len)


def _read_20m(raw: Path, max_len: int) -> Log:
    """ratings.csv and movies.csv have headers and are in UTF-8. Nothing is published of the users."""
    ratings, movies = (_find(raw, name, "MovieLens-20M", "ml-20m") for name in ("ratings.csv", "movies.csv"))
    films = with_header(movies).read({"movieId": whole, "genres": str})
    items = {item: [] if text == "(no genres listed)" else text.split("|") for item, text in films}
    return _log(with_header(ratings), items, None, max_len, user="userId", item="movieId")


def _find(raw: Path, name: str, what: str, archive: str) -> Path:
    return find(raw, name, what, ORIGIN.format(archive))


def _people(records: Records) -> People:
    found = records.read({"user id": whole, **dict.fromkeys(PERSON, str)})
    return {user: dict(zip(PERSON, about, strict=True)) for user, *about in found}


def _log(
    ratings: Records, items: Genres, users: People | None, max_len: int, user: str = "user id", item: str = "movie id"
) -> Log:
    found = in_order(ratings.columns({"timestamp": whole, user: whole, item: whole, "rating": finite}), "timestamp")
    columns: dict[str, Column] = {
        "liked": (found["rating"] >= LIKED).astype(np.int8), "rating": found["rating"], "user_id": found[user],
        "item_id": found[item], "time": found["timestamp"], "genres": lookup(found[item])(items, []),
    }  # fmt: skip
    if users is not None:
        of_users = lookup(found[user])
        columns |= {fact: of_users({number: about[fact] for number, about in users.items()}, "") for fact in PERSON}
    return with_histories(columns, "user_id", PAST, max_len)


MOVIELENS = {
    "movielens-100k": Converter("MovieLens_100k", ORIGIN.format("ml-100k"), _read_100k),
    "movielens-1m": Converter("MovieLens_1M", ORIGIN.format("ml-1m"), _read_1m),
    "movielens-20m": Converter("MovieLens_20M", ORIGIN.format("ml-20m"), _read_20m),
}
