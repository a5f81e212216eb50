"""Triton's interpreter without the work it repeats: a third of the time of the kernels that the tests run in it."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Leave triton.language alone where it is patched already.

    The interpreter replaces the functions of triton.language while a kernel runs, and again, by the same ones, in every
    call of a device function.
    """
    patch = interpreter._patch_lang

    def patch_once(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if not seen or any(tl.core.is_builtin(language.load) for language in seen):
            return patch(fn)
        return interpreter._LangPatchScope()  # which has nothing to restore

    interpreter._patch_lang = patch_once
