"""Triton's interpreter without the work it repeats: less than half of the time of the kernels that tests run in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from support import FULL


def speed_up() -> None:
    """For this process. Nothing that a kernel computes changes."""
    patch_language_once()
    make_shapes_once()
    interpreter._get_np_dtype = once_for_each(interpreter._get_np_dtype)
    # The checks that no 32-bit number overflows are no part of the kernels, but a third of the time. They hardly fail
    # on the small tensors of tests: `make test-all` has them.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=FULL)


def once_for_each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of a type, and of what can be hashed. Types of pointers and blocks cannot, but their names say it all."""
    known: dict[Hashable, Any] = {}

    def found(type: tl.dtype, *args: Hashable) -> Any:
        key = (type.name, *args)
        if key not in known:
            known[key] = fn(type, *args)
        return known[key]

    return found


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


def make_shapes_once() -> None:
    """Every operation makes a tensor, whose type and shape are objects with types and names of their own. There are few
    different ones."""
    make_block, make_tuple = tl.block_type.__init__, tl.core.tuple

    @once_for_each
    def block_of(element: tl.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
        made = tl.block_type.__new__(tl.block_type)
        make_block(made, element, list(shape))
        return vars(made)

    @cache
    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return make_tuple([tl.constexpr(n) for n in shape]), tl.constexpr(math.prod(shape))

    def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        self.__dict__.update(block_of(element_ty, sizes))

    def init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
