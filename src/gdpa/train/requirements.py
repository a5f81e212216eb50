"""Refuses to go on, in words, where what gdpa.train needs beside gdpa is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = {"filelock": "filelock", "scipy": "scipy", "sklearn": "scikit-learn", "tomli_w": "tomli-w"}
if sys.version_info < (3, 11):
    NEEDED["tomli"] = "tomli"

if missing := [package for module, package in NEEDED.items() if find_spec(module) is None]:
    raise ImportError(f"gdpa.train needs {', '.join(missing)}: pip install '.[train]' in a clone of gdpa")
