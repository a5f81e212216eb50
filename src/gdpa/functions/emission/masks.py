"""JIT functions of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gdpa.functions.emit import compiled
from gdpa.functions.kept import kept_with_activation
from gdpa.functions.mask import MaskFunction
from gdpa.functions.places.classify import classify_source
from gdpa.functions.places.emit import keep_source, near_keep_source


@dataclass(frozen=True)
class JitMask:
    """A mask's code: which tiles have visible pairs, and any other (see classify.py)."""

    classify: Any
    keep: Any  # keep(at, tables, sizes): which pairs of a tile are visible
    near_keep: Any  # near_keep(at, spot, ends): the same for Hopper's kernels


@kept_with_activation
def jit_mask(mask: MaskFunction) -> JitMask:
    def code(name: str, source: str) -> Any:
        return compiled(mask, f"<gdpa mask {mask.name} {mask.key} {name}>", source)[name]

    return JitMask(
        code("classify", classify_source("classify", mask.program)),
        code("keep", keep_source("keep", mask.program)),
        code("near_keep", near_keep_source("near_keep", mask.program)),
    )
