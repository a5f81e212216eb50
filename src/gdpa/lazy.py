"""Names of a package that are imported when they are first asked for: `gdpa --help` needs no torch.

Imports may draw random numbers (rich does). A program's own must not depend on when it first uses a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def attributes(
    package: dict[str, Any], names: Mapping[str, str], modules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package with these ``globals()``: ``names`` says in which module each name is,
    ``modules`` are submodules. What was found is kept, so that later uses cost nothing."""
    own = package["__name__"]

    def find(name: str) -> Any:
        if name in names:
            package[name] = getattr(_imported(names[name]), name)
            return package[name]
        if name in modules:
            return _imported(f"{own}.{name}")
        raise AttributeError(f"module {own!r} has no attribute {name!r}")

    return find


def _imported(module: str) -> ModuleType:
    import random

    before = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        random.setstate(before)
