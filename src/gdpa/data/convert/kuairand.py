"""KuaiRand (arXiv 2208.08696) as it is published: logs of shown videos, and what is known of users and videos. Clicked
videos are the history. The randomly shown videos (log_random) are a log apart, and are not part of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gdpa.data.convert.records import Kind, flag, with_header
from gdpa.data.convert.writing import Converter, Row, find, with_histories

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

    def rows(raw: Path, max_len: int) -> Iterator[Row]:
        def path(name: str) -> Path:
            return find(raw, name, f"KuaiRand-{size}", origin)

        files = [path(name) for name in logs]
        users = _table(path(f"user_features_{suffix}.csv"), "user_id", USER)
        videos = _table(path(f"video_features_basic_{suffix}.csv"), "video_id", (*VIDEO, "tag"))
        return with_histories(_events(files, users, videos), "user_id", PAST, max_len, lambda row: row["is_click"] == 1)

    return Converter("KuaiRand", origin, rows)


def _table(path: Path, key: str, names: tuple[str, ...]) -> Table:
    found = with_header(path).read({key: int, **dict.fromkeys(names, str)})
    return {number: dict(zip(names, about, strict=True)) for number, *about in found}


def _events(files: list[Path], users: Table, videos: Table) -> Iterator[Row]:
    """In the order of time: a file is of one period, but has its rows by user."""
    kinds: dict[str, Kind] = {
        "time_ms": int,
        "user_id": int,
        "video_id": int,
        "tab": int,
        **dict.fromkeys(LABELS, flag),
    }
    held = [event for path in files for event in with_header(path).read(kinds)]
    held.sort(key=lambda event: event[0])
    no_user = dict.fromkeys(USER, "")
    no_video = dict.fromkeys((*VIDEO, "tag"), "")
    for time, user, video, tab, *labels in held:
        about = dict(videos.get(video, no_video))
        tags = [tag for tag in about.pop("tag").split(",") if tag]
        yield {
            **dict(zip(LABELS, labels, strict=True)), "user_id": user, "video_id": video, "tab": tab, "time": time,
            **users.get(user, no_user), **about, "author_id": about["author_id"] or "0", "tags": tags,
        }  # fmt: skip


KUAIRAND = {
    "kuairand-pure": _converter("Pure", "pure", ("",)),
    "kuairand-1k": _converter("1K", "1k", ("",)),
    "kuairand-27k": _converter("27K", "27k", ("_part1", "_part2")),
}
