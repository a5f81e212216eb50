"""The public names, and the signatures of functions that WITH_SIGNATURES names, are those of public_api.txt.

python tests/test_public_api.py     # write that file anew, after a change that is meant
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from pathlib import Path

import gdpa

STORED = Path(__file__).with_name("public_api.txt")
WITH_SIGNATURES = ("gdpa", "gdpa.integrations.transformers", "gdpa.masks")
OPTIONAL = "gdpa.integrations.transformers"  # imports a library that need not be installed
INSTALLED = importlib.util.find_spec("transformers") is not None
CONSTRUCTED = ("Mask", "TritonSource", "precision")  # classes there that users make objects of
HINT = """The public API is not that of tests/public_api.txt (- stored, + now):

{diff}

Programs of others call these names. If one goes, or an argument goes, moves or has another default, keep the old form
with a DeprecationWarning, and note it in CHANGELOG.md under "Changed lately"; what is new goes to its area there. Then
`python tests/test_public_api.py` writes the file anew."""


def public_modules() -> list[str]:
    """gdpa, and what it lists of modules that say what is public."""
    listed = [f"gdpa.{name}" for name in gdpa.MODULES]
    found = [name for name in listed if hasattr(importlib.import_module(name), "__all__")]
    return ["gdpa", *sorted([*found, *([OPTIONAL] if INSTALLED else [])])]


def written(module: str, name: str) -> str:
    """A line: the name, and the arguments of what is called. Annotations are left out: Python's releases print them in
    different ways."""
    found = getattr(importlib.import_module(module), name)
    if module not in WITH_SIGNATURES or not (inspect.isfunction(found) or name in CONSTRUCTED):
        return f"{module}.{name}"
    signature = inspect.signature(found)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return f"{module}.{name}{inspect.Signature(plain)}"


def public_api() -> list[str]:
    return [
        written(module, name) for module in public_modules() for name in sorted(importlib.import_module(module).__all__)
    ]


def test_the_public_api_is_the_stored_one() -> None:
    stored = STORED.read_text(encoding="utf-8").splitlines()
    here = [line for line in stored if INSTALLED or not line.startswith(OPTIONAL)]
    diff = "\n".join(line for line in difflib.ndiff(here, public_api()) if line[0] in "+-")
    assert not diff, HINT.format(diff=diff)


if __name__ == "__main__":
    STORED.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
