"""KuaiRand (arXiv 2208.08696) as it is published: logs of shown videos, and what is known of users and videos. Clicked
videos are the history. The randomly shown videos (log_random) are a log apart, and are not part of the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gdpa.data.convert.histories import Column, Log, in_order, lookup, unknown, with_histories
from gdpa.data.convert.records import Kind, flag, whole, with_header
from gdpa.data.convert.writing import Converter, find

ORIGIN = "KuaiRand-{}.tar.gz from https://kuairand.com (unpack it, and name the folder)"
PERIODS = ("4_08_to_4_21", "4_22_to_5_08")
LABELS = ("is_click", "long_view", "is_like")
USER = ("user_active_degree", "is_video_author", "follow_user_num_range", "register_days_range")
VIDEO = ("author_id", "video_type", "upload_type", "music_id")
Table = dict[int, dict[str, str]]
PAST = {"hist_videos": "video_id", "hist_authors": "author_id", "hist_tabs": "tab", "hist_times": "time"}


def _converter(size: str, suffix: str, parts: tuple[str, ...]) -> Converter:
    origin = ORIGIN.format(size)
    logs = [f"log_standard_{period}_{suffix}{part}.csv" for period in PERIODS for part in parts]
    about = (f"user_features_{suffix}.csv", f"video_features_basic_{suffix}.csv")

    def read(raw: Path, max_len: int) -> Log:
        def path(name: str) -> Path:
            return find(raw, name, f"KuaiRand-{size}", origin)

        files = [path(name) for name in logs]
        of_users, of_videos = (path(name) for name in about)
        users, videos = _table(of_users, "user_id", USER), _table(of_videos, "video_id", (*VIDEO, "tag"))
        columns = _columns(files, users, videos)
        clicked, user, video = (columns[name] for name in ("is_click", "user_id", "video_id"))
        assert isinstance(clicked, np.ndarray)
        assert isinstance(user, np.ndarray)
        assert isinstance(video, np.ndarray)
        notes = unknown(user, users, "users", of_users) + unknown(video, videos, "videos", of_videos)
        return with_histories(columns, "user_id", PAST, max_len, clicked == 1, notes)

    return Converter("KuaiRand", origin, read, (*logs, *about))


def _table(path: Path, key: str, names: tuple[str, ...]) -> Table:
    found = with_header(path).read({key: whole, **dict.fromkeys(names, str)})
    return {number: dict(zip(names, about, strict=True)) for number, *about in found}


def _columns(files: list[Path], users: Table, videos: Table) -> dict[str, Column]:
    """In the order of time: a file is of one period, but has its rows by user."""
    kinds: dict[str, Kind] = {
        "time_ms": whole, "user_id": whole, "video_id": whole, "tab": whole, **dict.fromkeys(LABELS, flag),
    }  # fmt: skip
    parts = [with_header(path).columns(kinds) for path in files]
    found = in_order({name: np.concatenate([part[name] for part in parts]) for name in kinds}, "time_ms")

    of_users, of_videos = lookup(found["user_id"]), lookup(found["video_id"])
    author = {number: about["author_id"] or "0" for number, about in videos.items()}
    tags = {number: [tag for tag in about["tag"].split(",") if tag] for number, about in videos.items()}
    return {
        **{name: found[name] for name in (*LABELS, "user_id", "video_id", "tab")}, "time": found["time_ms"],
        **{name: of_users(_only(users, name), "") for name in USER},
        "author_id": of_videos(author, "0"),
        **{name: of_videos(_only(videos, name), "") for name in VIDEO if name != "author_id"},
        "tags": of_videos(tags, []),
    }  # fmt: skip


def _only(table: Table, name: str) -> dict[int, str]:
    return {number: about[name] for number, about in table.items()}


KUAIRAND = {
    "kuairand-pure": _converter("Pure", "pure", ("",)),
    "kuairand-1k": _converter("1K", "1k", ("",)),
    "kuairand-27k": _converter("27K", "27k", ("_part1", "_part2")),
}
