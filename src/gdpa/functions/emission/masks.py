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
    """A mask's code."""

    keep: Any  # which pairs of a tile are visible
    classify: Any  # which tiles have a visible pair, and which have only such (see classify.py)


@kept_with_activation
def jit_mask(mask: MaskFunction) -> JitMask:
    source = keep_source("keep", mask.program) + classify_source("classify", mask.program)
    scope = compiled(mask, f"<gdpa mask {mask.name} {mask.key}>", source)
    return JitMask(scope["keep"], scope["classify"])


@kept_with_activation
def near_keep(mask: MaskFunction) -> Any:
    """What Hopper's kernels call in place of ``keep`` (see emit.near_keep_source). Made by itself, since it needs
    Gluon."""
    source = near_keep_source("near_keep", mask.program)
    return compiled(mask, f"<gdpa mask {mask.name} {mask.key} near>", source)["near_keep"]
