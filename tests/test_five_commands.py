"""From MovieLens-100k's raw files to scores, by the commands of the guide as they are written, with small sizes."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from gdpa.cli import main

GUIDE = Path(__file__).parents[1] / "docs" / "guide-recsys.md"
TITLE = "## From raw files to scores in five commands"

# What the test adds to a command: flags that are given again win, so that all of the guide's are read too.
SMALLER = {
    "train --data": "--steps 4 --eval-every 2 --batch-size 16 --device cpu --set dim=8 --set num_layers=1",
    "compare": "--quick",
}
USERS, ITEMS, RATINGS = 12, 20, 8  # the ratings are of each user


def commands() -> list[tuple[list[str], str | None]]:
    """The arguments of each command of the guide, and the file that its output goes to."""
    section = GUIDE.read_text(encoding="utf-8").split(TITLE)[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"^    gdpa (.*)$", section.replace("\\\n", ""), re.MULTILINE):
        command, _, target = line.partition(" > ")
        added = next((flags for start, flags in SMALLER.items() if command.startswith(start)), "")
        found.append((shlex.split(f"{command} {added}"), target or None))
    return found


def write_raw_files(raw: Path) -> None:
    """u.data, u.item, u.genre and u.user, as GroupLens has them: tabs, bars, a flag for each genre, Latin-1."""
    raw.mkdir()
    draw = random.Random(0)
    genres = ["unknown", "Action", "Comedy", "Drama"]
    (raw / "u.genre").write_text("".join(f"{name}|{i}\n" for i, name in enumerate(genres)) + "\n")
    flags = {i: "|".join(str(int(i % 4 == g)) for g in range(len(genres))) for i in range(1, ITEMS + 1)}
    titles = [f"{i}|Café {i} (1995)|01-Jan-1995||http://example.org/{i}|{flag}\n" for i, flag in flags.items()]
    (raw / "u.item").write_bytes("".join(titles).encode("latin-1"))
    (raw / "u.user").write_text(
        "".join(f"{u}|{20 + u}|{'MF'[u % 2]}|writer|9404{u % 10}\n" for u in range(1, USERS + 1))
    )
    ratings = [
        f"{user}\t{item}\t{draw.randint(1, 5)}\t{880_000_000 + draw.randrange(10**6)}\n"
        for user in range(1, USERS + 1)
        for item in draw.sample(range(1, ITEMS + 1), RATINGS)
    ]
    draw.shuffle(ratings)
    (raw / "u.data").write_text("".join(ratings))


def test_the_five_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_raw_files(tmp_path / "ml-100k")
    five = commands()
    assert [arguments[0] for arguments, _ in five] == ["convert", "train", "compare", "train", "predict"]
    for arguments, target in five:
        result = CliRunner().invoke(main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        if target is not None:
            Path(target).write_text(result.stdout, encoding="utf-8")

    compared = json.loads(Path("compared/compare.json").read_text(encoding="utf-8"))
    assert compared["failures"] == []
    assert compared["training"]["steps"] == 4
    assert compared["training"]["part"] == "test"
    assert set(compared["training"]["models"]) == {"silu", "softmax"}
    assert Path("compared/report.html").exists()
    with Path("scores.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == USERS * RATINGS
    assert all(0 < float(row["probability"]) < 1 and row["user_id"] and row["item_id"] for row in rows)
    assert len({row["logit"] for row in rows}) > USERS  # they depend on more than the user
