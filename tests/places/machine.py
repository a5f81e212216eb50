"""Emitted code of places without a GPU: Triton's lines as torch, and blocks of PTX by a small machine."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gdpa.functions.places.names import POSITIONS

ADDRESS = 2**40  # of the first table; the next ones are as far from each other
f32, i32, i64 = torch.float32, torch.int32, torch.int64
DTYPES = {"s32": i32, "u32": i32, "b32": i32, "s64": i64, "u64": i64, "b64": i64, "f32": f32, "pred": torch.bool}


THREADS = torch.arange(128)  # of a warpgroup


def place_of(score: int, thread: Any) -> tuple[Any, Any]:
    """The row and the column of a thread's score, as the tensor cores leave a tile of 64 rows."""
    block, row, column = score // 4, score // 2 % 2, score % 2
    return 16 * (thread // 32) + 8 * row + thread % 32 // 4, 8 * block + 2 * (thread % 4) + column


class Machine:
    """Runs PTX of many threads at once: a register is a tensor with a number for each of them."""

    def __init__(self, registers: dict[str, Tensor], tables: list[Tensor]) -> None:
        self.registers, self.tables = dict(registers), tables
        self.shape = next(iter(registers.values())).shape
        self.kinds: dict[str, torch.dtype] = {}

    def run(self, text: str, runs: Callable[[str], bool] = lambda words: True) -> None:
        """Those instructions for which ``runs`` holds."""
        for kind, names in re.findall(r"\.reg \.(\w+) ([\w, ]+);", text):
            self.kinds |= {name: DTYPES[kind] for name in names.split(", ")}
        for line in re.findall(r"[^;\n{}]+", text):
            words = line.strip()
            if words and not words.startswith(".reg") and runs(words):
                self._step(words)

    def _step(self, words: str) -> None:
        where = torch.ones(self.shape, dtype=torch.bool)
        if words.startswith("@"):
            predicate, words = words[1:].split(" ", 1)
            where = self._value(predicate, "pred")
        name, rest = words.split(" ", 1)
        target, *args = (a.strip() for a in rest.split(","))
        op, *kinds = name.split(".")
        if op == "red":
            self._add(self._value(target, "s64"), self._value(args[0], "f32"), where)
            return
        found = self._result(op, kinds, args, where)
        if (op, kinds) == ("mov", ["b32"]) and target in self.kinds:
            found = found.view(self.kinds[target]) if found.dtype != self.kinds[target] else found
        self.registers[target] = torch.where(where, found, self.registers.get(target, torch.zeros_like(found)))

    def _value(self, text: str, kind: str) -> Tensor:
        text = text.strip("[]")
        if text.startswith("!"):
            return ~self._value(text[1:], kind)
        if text in self.registers:
            return self.registers[text].expand(self.shape)
        number = struct.unpack(">f", bytes.fromhex(text[2:]))[0] if text.startswith("0f") else int(text)
        return torch.full(self.shape, number, dtype=DTYPES[kind])

    def _result(self, op: str, kinds: list[str], args: list[str], where: Tensor) -> Tensor:
        kind = kinds[-1]
        if op == "ld":
            return self._load(self._value(args[0], "s64"), where)
        if op == "setp":
            values = self._unsigned([self._value(a, kind) for a in args[:2]], kind)
            found = getattr(torch, {"neu": "ne"}.get(kinds[0], kinds[0]))(*values)
            return found & self._value(args[2], "pred") if "and" in kinds else found
        if op == "selp":
            return torch.where(self._value(args[2], "pred"), *(self._value(a, kind) for a in args[:2]))
        if op == "shfl":
            return self._of_other_lanes(kinds, args)
        values = [self._value(a, kind) for a in args]
        if op == "cvt":
            return values[0].to({"f32": f32, "s64": i64, "s32": i32}[kinds[-2]])
        if op == "mad":
            wide = i64 if kinds[0] == "wide" else i32
            return values[0].to(wide) * values[1].to(wide) + self._value(args[2], "s64" if wide == i64 else "s32")
        if op == "fma":
            return (values[0].double() * values[1].double() + values[2].double()).float()
        if kinds[0] == "rz":
            return rounded_to_zero(values[0].double() + values[1].double())
        calls = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "min": torch.minimum, "max": torch.maximum,
                 "neg": torch.neg, "abs": torch.abs, "and": torch.bitwise_and, "or": torch.bitwise_or,
                 "shr": torch.bitwise_right_shift,
                 "mov": torch.clone}  # fmt: skip
        return calls[op](*values)

    def _of_other_lanes(self, kinds: list[str], args: list[str]) -> Tensor:
        assert args[2:] == ["31", "0xffffffff"], "lanes that are left out"
        threads, to = torch.arange(self.shape[0]), self._value(args[1], "s32")
        others = threads ^ to if kinds[1] == "bfly" else threads // 32 * 32 + to
        return self._value(args[0], "b32")[others]

    def _unsigned(self, values: list[Tensor], kind: str) -> list[Tensor]:
        """Negative numbers are the largest ones."""
        if not kind.startswith("u"):
            return values
        return [torch.where(v < 0, v.double() + 2.0 ** int(kind[1:]), v.double()) for v in values]

    def _load(self, address: Tensor, where: Tensor) -> Tensor:
        found = torch.zeros(self.shape)
        for table, here, at in self._found(address, where):
            found[here] = table[at].float()
        return found

    def _add(self, address: Tensor, values: Tensor, where: Tensor) -> None:
        for table, here, at in self._found(address, where):
            table.index_add_(0, at, values[here].to(table.dtype))

    def _found(self, address: Tensor, where: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Each table, flat, with the threads that point into it, and to which entries."""
        found = []
        for n, table in enumerate(self.tables):
            here = where & (address >= ADDRESS * (n + 1)) & (address < ADDRESS * (n + 2))
            at = (address[here] - ADDRESS * (n + 1)) // table.element_size()
            assert (at < table.numel()).all(), "outside of a table"
            found.append((table.view(-1), here, at))
            where = where & ~here
        assert not where.any(), "before a table"
        return found


def rounded_to_zero(x: Tensor) -> Tensor:
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), near.nextafter(torch.zeros_like(near)), near)


class Pointer:
    """A table, as emitted code takes it."""

    def __init__(self, number: int, table: Tensor, at: Any = 0) -> None:
        self.number, self.table, self.at = number, table, at

    def to(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor(ADDRESS * (self.number + 1)) + self.table.element_size() * self.at

    def __add__(self, at: Any) -> Pointer:
        return Pointer(self.number, self.table, self.at + at)


def load(p: Pointer, mask: Tensor, other: int) -> Tensor:
    return torch.where(mask, p.table.flatten()[p.at.clamp(0, p.table.numel() - 1).long()], other)


def _where(condition: Any, yes: Any, no: Any) -> Tensor:
    dtype = next((x.dtype for x in (yes, no) if isinstance(x, Tensor)), i32)
    return torch.where(condition, *(torch.as_tensor(x, dtype=dtype) for x in (yes, no)))


def _of_both(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """``fn`` of a tensor and a tensor or a number, which has its dtype."""
    return lambda x, y: fn(x, torch.as_tensor(y, dtype=x.dtype))


def emitted_scope(at: dict[str, Tensor], tables: list[Tensor], assembly: Callable[..., Any]) -> dict[str, Any]:
    """The names that emitted lines use, with positions ``at``; ``assembly`` stands for Triton's blocks of PTX."""
    return {
        "tl": SimpleNamespace(
            int32=i32, int64=i64, float32=f32, minimum=_of_both(torch.minimum), maximum=_of_both(torch.maximum),
            where=_where, abs=torch.abs, inline_asm_elementwise=assembly, load=load,
        ),
        "at": tuple(at[n] for n in POSITIONS),
        "tables": [Pointer(n, t) for n, t in enumerate(tables)],
        "sizes": [[torch.tensor(n, dtype=i32) for n in t.shape] for t in tables],
        "places": SimpleNamespace(
            even=lambda n: n, from_end=lambda x, n: torch.where(x < 0, x + n, x), number=lambda c, like: like * 0 + c,
            inside=lambda x, n: (x >= 0) & (x < n), mod=torch.remainder,
            floordiv=lambda x, n: torch.div(x, n, rounding_mode="floor"),
        ),
    }  # fmt: skip
