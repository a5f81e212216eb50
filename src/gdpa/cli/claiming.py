"""Which files a command may write to: those that are not there yet, and those that it made before.

Each kind of file tells who made it: results by their fields, reports by their title, plots by what the PNG says of its
software, emitted code by its first line. Imports no torch, so that a long run is refused before it begins.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable
from pathlib import Path

import click

from gdpa.bench.results import FORMAT

PLOTS = ("", "-lengths", "-lengths-d*", "-layouts", "-errors")  # behind a result's name, as gdpa.bench.report.plot says
RESULTS = {
    "bench": ("bench.json", "model.json", "host.json", "data.json"),
    "demo": ("demo.json",),
    "compare": ("compare.json",),
}
_EMITTED = re.compile(r"# .+ maths\), graph ")
_HEAD = 1000  # bytes in which a file says what it is


def claim(command: str, result: Path, others: Iterable[Path] = ()) -> None:
    """Refuse to replace the file of numbers, or one of the ``others`` that come with it, if ``gdpa command`` did not
    make it."""
    made = {".html": _is_report, ".png": _is_plot, ".py": _is_emitted}
    for path in (result, *others):
        if path.is_dir():
            raise click.UsageError(f"{path} is a folder, but gdpa {command} would write a file there")
        if path.exists() and not (_is_result if path == result else made[path.suffix])(command, path):
            raise click.UsageError(
                f"{path} was not made by gdpa {command} and will not be overwritten: move it, or name another place"
            )


def claim_folder(command: str, folder: Path) -> None:
    """Refuse a folder of the usual name, which nobody has given, if it holds things of others and none of ours: no
    result, nor the code that comes before it, where a run was cut short."""
    held = [entry for entry in folder.iterdir() if not entry.name.startswith(".")] if folder.is_dir() else []
    ours = (entry.name in RESULTS[command] or (entry.suffix == ".py" and _is_emitted(command, entry)) for entry in held)
    if held and not any(ours):
        raise click.UsageError(f"{folder} holds files that gdpa {command} did not make: choose a location with --out")


def claim_bench(result: Path, kind: str, told: bool) -> None:
    """A result of `gdpa bench`, and what comes with one of this kind. ``told``: somebody has named the place."""
    if not told:
        claim_folder("bench", result.parent)
    if result.suffix in (".html", ".png"):
        raise click.UsageError(f"--out {result}: the result is JSON; the report and the plots go beside it")
    others = [result.with_suffix(".html")] if kind in ("bench", "model") else []
    if kind == "bench":
        stem = glob.escape(result.stem)
        others += [path for name in PLOTS for path in sorted(result.parent.glob(f"{stem}{name}.png"))]
    claim("bench", result, others)


def claim_report(command: str, folder: Path, told: bool, code: Iterable[str] = ()) -> None:
    """The files of `gdpa demo` or `compare` in a folder, ``code`` being those of emitted code."""
    if not told:
        claim_folder(command, folder)
    claim(command, folder / RESULTS[command][0], (folder / "report.html", *(folder / name for name in code)))


def _is_result(command: str, path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        return False
    if not isinstance(found, dict):
        return False
    if command == "bench":
        return found.get("format") == FORMAT and "records" in found  # tunings have a format, too
    return found.get("kind") == ("function-errors" if command == "check" else command)


def _is_report(command: str, path: Path) -> bool:
    return re.search(rf"<title>gdpa {command}\b", _head(path)) is not None


def _is_plot(command: str, path: Path) -> bool:
    head = _head(path)
    if f"gdpa {command}" in head:
        return True
    # Those of earlier versions do not say so, but came with a report that does.
    reports = (report for report in path.parent.glob("*.html") if path.stem.startswith(report.stem))
    return "Matplotlib" in head and any(_is_report(command, report) for report in reports)


def _is_emitted(command: str, path: Path) -> bool:
    return _EMITTED.match(_head(path)) is not None


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_HEAD).decode("utf-8", "replace")
