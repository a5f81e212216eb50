"""MovieLens as GroupLens publishes it, in its three layouts. A row is a rating; liked is one of at least 4 stars."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gdpa.data.convert.records import Records, finite, flag, separated, with_header
from gdpa.data.convert.writing import Converter, Row, find, with_histories

ORIGIN = "https://files.grouplens.org/datasets/movielens/{}.zip (unpack it, and name the folder)"
LIKED = 4.0
PAST = {"hist_items": "item_id", "hist_ratings": "rating", "hist_times": "time"}
PERSON = ("age", "gender", "occupation", "zip")
Genres = dict[int, list[str]]
People = dict[int, dict[str, str]]


def _rows_100k(raw: Path, max_len: int) -> Iterator[Row]:
    """u.data and u.user have tabs and bars; u.item has a flag for each genre of u.genre. All are in Latin-1."""
    paths = {name: _find(raw, name, "MovieLens-100k", "ml-100k") for name in ("u.data", "u.item", "u.genre", "u.user")}
    genres = [name for (name,) in separated(paths["u.genre"], "|", ("genre", "number")).read({"genre": str})]
    films = separated(paths["u.item"], "|", ("movie id", "title", "release", "video release", "url", *genres))
    items = {
        item: [name for name, of in zip(genres, flags, strict=True) if of]
        for item, *flags in films.read({"movie id": int, **dict.fromkeys(genres, flag)})
    }
    users = _people(separated(paths["u.user"], "|", ("user id", *PERSON)))
    ratings = separated(paths["u.data"], "\t", ("user id", "movie id", "rating", "timestamp"))
    return _rows(ratings, items, users, max_len)


def _rows_1m(raw: Path, max_len: int) -> Iterator[Row]:
    """ratings.dat, movies.dat and users.dat have :: between their fields, in Latin-1."""
    names = ("ratings.dat", "movies.dat", "users.dat")
    ratings, movies, people = (_find(raw, name, "MovieLens-1M", "ml-1m") for name in names)
    films = separated(movies, "::", ("movie id", "title", "genres"))
    items = {item: genres.split("|") for item, genres in films.read({"movie id": int, "genres": str})}
    users = _people(separated(people, "::", ("user id", "gender", "age", "occupation", "zip")))
    return _rows(separated(ratings, "::", ("user id", "movie id", "rating", "timestamp")), items, users, max_len)


def _rows_20m(raw: Path, max_len: int) -> Iterator[Row]:
    """ratings.csv and movies.csv have headers and are in UTF-8. Nothing is published of the users."""
    ratings, movies = (_find(raw, name, "MovieLens-20M", "ml-20m") for name in ("ratings.csv", "movies.csv"))
    films = with_header(movies).read({"movieId": int, "genres": str})
    items = {item: [] if text == "(no genres listed)" else text.split("|") for item, text in films}
    return _rows(with_header(ratings), items, None, max_len, user="userId", item="movieId")


def _find(raw: Path, name: str, what: str, archive: str) -> Path:
    return find(raw, name, what, ORIGIN.format(archive))


def _people(records: Records) -> People:
    found = records.read({"user id": int, **dict.fromkeys(PERSON, str)})
    return {user: dict(zip(PERSON, about, strict=True)) for user, *about in found}


def _rows(
    ratings: Records, items: Genres, users: People | None, max_len: int, user: str = "user id", item: str = "movie id"
) -> Iterator[Row]:
    """All ratings are held as four numbers each, to be put in the order of time."""
    held = list(ratings.read({"timestamp": int, user: int, item: int, "rating": finite}))
    held.sort(key=lambda rating: rating[0])  # equal times stay in the order of the file
    nobody = dict.fromkeys(PERSON, "")

    def events() -> Iterator[Row]:
        for time, user, item, stars in held:
            facts = {} if users is None else users.get(user, nobody)
            genres = items.get(item, [])
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
