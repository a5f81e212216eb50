"""MovieLens as GroupLens publishes it, in its three layouts. A row is a rating; liked is one of at least 4 stars."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gdpa.data.convert.histories import Column, Log, in_order, lookup, unknown, with_histories
from gdpa.data.convert.records import Records, finite, flag, separated, whole, with_header
from gdpa.data.convert.writing import Converter, find

ORIGIN = "https://files.grouplens.org/datasets/movielens/{}.zip (unpack it, and name the folder)"
FILES_100K = ("u.data", "u.item", "u.genre", "u.user")
FILES_1M = ("ratings.dat", "movies.dat", "users.dat")
FILES_20M = ("ratings.csv", "movies.csv")
LIKED = 4.0
PAST = {"hist_items": "item_id", "hist_ratings": "rating", "hist_times": "time"}
PERSON = ("age", "gender", "occupation", "zip")
Genres = dict[int, list[str]]
People = dict[int, dict[str, str]]


def _read_100k(raw: Path, max_len: int) -> Log:
    """u.data and u.user have tabs and bars; u.item has a flag for each genre of u.genre. All are in Latin-1."""
    paths = {name: _find(raw, name, "MovieLens-100k", "ml-100k") for name in FILES_100K}
    genres = [name for (name,) in separated(paths["u.genre"], "|", ("genre", "number")).read({"genre": str})]
    films = separated(paths["u.item"], "|", ("movie id", "title", "release", "video release", "url", *genres))
    items = {
        item: [name for name, of in zip(genres, flags, strict=True) if of]
        for item, *flags in films.read({"movie id": whole, **dict.fromkeys(genres, flag)})
    }
    users = _people(separated(paths["u.user"], "|", ("user id", *PERSON)))
    ratings = separated(paths["u.data"], "\t", ("user id", "movie id", "rating", "timestamp"))
    return _log(ratings, (items, paths["u.item"]), (users, paths["u.user"]), max_len)


def _read_1m(raw: Path, max_len: int) -> Log:
    """ratings.dat, movies.dat and users.dat have :: between their fields, in Latin-1."""
    ratings, movies, people = (_find(raw, name, "MovieLens-1M", "ml-1m") for name in FILES_1M)
    films = separated(movies, "::", ("movie id", "title", "genres"))
    items = {item: genres.split("|") for item, genres in films.read({"movie id": whole, "genres": str})}
    users = _people(separated(people, "::", ("user id", "gender", "age", "occupation", "zip")))
    rated = separated(ratings, "::", ("user id", "movie id", "rating", "timestamp"))
    return _log(rated, (items, movies), (users, people), max_len)


def _read_20m(raw: Path, max_len: int) -> Log:
    """ratings.csv and movies.csv have headers and are in UTF-8. Nothing is published of the users."""
    ratings, movies = (_find(raw, name, "MovieLens-20M", "ml-20m") for name in FILES_20M)
    films = with_header(movies).read({"movieId": whole, "genres": str})
    items = {item: [] if text == "(no genres listed)" else text.split("|") for item, text in films}
    return _log(with_header(ratings), (items, movies), None, max_len, user="userId", item="movieId")


def _find(raw: Path, name: str, what: str, archive: str) -> Path:
    return find(raw, name, what, ORIGIN.format(archive))


def _people(records: Records) -> People:
    found = records.read({"user id": whole, **dict.fromkeys(PERSON, str)})
    return {user: dict(zip(PERSON, about, strict=True)) for user, *about in found}


def _log(
    ratings: Records, films: tuple[Genres, Path], people: tuple[People, Path] | None, max_len: int,
    user: str = "user id", item: str = "movie id",
) -> Log:  # fmt: skip
    """What is known of items and users comes with the file that says it."""
    found = in_order(ratings.columns({"timestamp": whole, user: whole, item: whole, "rating": finite}), "timestamp")
    columns: dict[str, Column] = {
        "liked": (found["rating"] >= LIKED).astype(np.int8), "rating": found["rating"], "user_id": found[user],
        "item_id": found[item], "time": found["timestamp"], "genres": lookup(found[item])(films[0], []),
    }  # fmt: skip
    notes = unknown(found[item], films[0], "movies", films[1])
    if people is not None:
        users, path = people
        notes += unknown(found[user], users, "users", path)
        of_users = lookup(found[user])
        columns |= {fact: of_users({number: about[fact] for number, about in users.items()}, "") for fact in PERSON}
    return with_histories(columns, "user_id", PAST, max_len, notes=notes)


MOVIELENS = {
    "movielens-100k": Converter("MovieLens_100k", ORIGIN.format("ml-100k"), _read_100k, FILES_100K),
    "movielens-1m": Converter("MovieLens_1M", ORIGIN.format("ml-1m"), _read_1m, FILES_1M),
    "movielens-20m": Converter("MovieLens_20M", ORIGIN.format("ml-20m"), _read_20m, FILES_20M),
}
