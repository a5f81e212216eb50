"""A block of instructions as a Python function of a warp, its registers ``R`` and the threads ``m`` that are active.

The function returns the number of the next block, BLOCKED if the warp has to wait at the block's first instruction, or
OVER. ``m`` is None where all threads are active, for which there is code of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from simulator.arithmetic import DTYPES, HANDLERS, SCOPE, number
from simulator.ptx import WIDTHS, Instruction, Kernel, UnknownError

BLOCKED, OVER = -1, -2
LOOKING = ("ld.acquire", "ld.volatile", "atom.")
SPECIAL = {
    "%tid.x": "w.threads", "%laneid": "w.lanes",
    **{f"%{name}.{axis}": f"w.{attribute}[{i}]"
       for name, attribute in (("ctaid", "place"), ("nctaid", "extent")) for i, axis in enumerate("xyz")},
}  # fmt: skip
BASE = 1024  # where a program's shared memory begins


class Coder:
    """Makes the functions of a kernel's blocks when they are first run."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.offsets = {p.name: p.offset for p in kernel.params}
        self.found: dict[tuple[int, bool], Callable[..., int]] = {}
        self.scope = dict(SCOPE)
        self.constants: dict[Any, str] = {}

    def block(self, number: int, masked: bool) -> Callable[..., int]:
        made = self.found.get((number, masked))
        if made is None:
            lines = [line for ins in self.kernel.blocks[number] for line in self._lines(ins, number, masked)]
            lines.append(f"return {number + 1}" if number + 1 < len(self.kernel.blocks) else f"return {OVER}")
            exec("def block(w, R, m):\n    " + "\n    ".join(lines), self.scope)
            made = self.found[number, masked] = self.scope["block"]
        return made

    def looks(self, number: int) -> bool:
        """Whether a block begins by looking at what other programs write."""
        return self.kernel.blocks[number][0].name.startswith(LOOKING)

    def where(self, number: int) -> str:
        """What a block begins with, for people."""
        ins = next(iter(self.kernel.blocks[number]), None)
        return "the end" if ins is None else f"{ins.name} at {ins.where}"

    # ---- operands ----------------------------------------------------------------------------------------------------
    def _constant(self, value: Any) -> str:
        """An array of it."""
        key = (value.dtype, value.tobytes())
        if key not in self.constants:
            name = self.constants[key] = f"C{len(self.constants)}"
            self.scope[name] = np.full(32, value)
        return self.constants[key]

    def value(self, ins: Instruction, text: str, kind: str) -> str:
        """The expression for an operand that is read as ``kind``."""
        negated, text = text.startswith("!"), text.lstrip("!")
        found = ins.names.get(text)
        if found is not None:
            if kind == "u32" and found.width == 64:  # an address in local memory
                return f"R[{found.number}].astype(U4)"
            if found.width == 1:
                return f"(~R[{found.number}])" if negated else f"R[{found.number}]"
            expression = f"R[{found.number}].view({DTYPES[kind]})"
            narrow = WIDTHS[kind] < found.width
            if narrow:
                return f"R[{found.number}].view(U{found.width // 8}).astype(U{WIDTHS[kind] // 8}).view({DTYPES[kind]})"
            return expression
        if text in SPECIAL:
            return f"{SPECIAL[text]}.view({DTYPES[kind]})"
        if text.startswith("{"):
            return self._joined(ins, text, kind)
        if text == "global_smem":
            return self._constant(np.array(BASE, f"u{WIDTHS[kind] // 8}"))
        if text in self.offsets:
            return f"w.address_of_param({self.offsets[text]})"
        if text in self.kernel.local:
            return self._constant(np.array(self.kernel.local[text], f"u{WIDTHS[kind] // 8}"))
        if text in self.kernel.constants:
            return self._constant(np.array(0, np.uint64))  # text of assertions: see _called
        return self._constant(number(text, kind))

    def _joined(self, ins: Instruction, text: str, kind: str) -> str:
        parts = _names(text)
        width = WIDTHS[kind] // len(parts)
        values = ", ".join(self.value(ins, p, f"u{width}") for p in parts)
        return f"np.stack([{values}], -1).view(U{WIDTHS[kind] // 8})[:, 0].view({DTYPES[kind]})"

    def _address(self, ins: Instruction, text: str, kind: str) -> str:
        base, _, more = text.strip("[] ").partition("+")
        found = self.value(ins, base.strip(), kind)
        offset = int(more.strip() or "0", 0)
        return found if offset == 0 else f"({found} + {self._constant(number(str(offset), kind))})"

    def put(self, ins: Instruction, target: str, expression: str, where: str) -> list[str]:
        """Lines that set a register, or the parts of one that is taken apart."""
        if target == "_":
            return []
        if target.startswith("{"):
            parts = _names(target)
            width = WIDTHS[ins.kinds[-1]] // 8 // len(parts)
            split = f"parts = np.ascontiguousarray({expression}).view(U{width}).reshape(32, {len(parts)})"
            return [split, *(x for i, p in enumerate(parts) for x in self.put(ins, p, f"parts[:, {i}].copy()", where))]
        n = ins.names[target].number
        return [f"R[{n}] = {expression}" if where == "None" else f"R[{n}] = put({where}, {expression}, R[{n}])"]

    # ---- instructions ------------------------------------------------------------------------------------------------
    def _lines(self, ins: Instruction, number: int, masked: bool) -> list[str]:
        where = "m" if masked else "None"
        lines = [f"w.at = {number}"] if ins is self.kernel.blocks[number][0] else []
        if ins.guard is not None:
            guard = self.value(ins, ins.guard, "pred")
            if ins.op == "bra":
                return [*lines, f"return w.fork({guard}, {self._target(ins)}, {number + 1}, {where})"]
            lines.append(f"g = {guard} & m" if masked else f"g = {guard}")
            where = "g"
        special = getattr(self, f"_{ins.op}", None)
        if special is not None:
            return [*lines, *special(ins, where)]
        handler = HANDLERS.get(ins.op)
        if handler is None:
            raise UnknownError(f"{ins.name} at {ins.where}")
        result = handler(ins, lambda i, kind: self.value(ins, ins.args[i + 1], kind))
        return [*lines, *self.put(ins, ins.args[0], result, where)]

    def _target(self, ins: Instruction) -> int:
        return ins.labels[ins.args[-1]]

    def _bra(self, ins: Instruction, where: str) -> list[str]:
        return [f"return {self._target(ins)}"]

    def _brx(self, ins: Instruction, where: str) -> list[str]:
        targets = tuple(ins.labels[t] for t in self.kernel.tables[ins.args[1]])
        return [f"return w.only({self.value(ins, ins.args[0], 'u32')}, {where}, {targets})"]

    def _ret(self, ins: Instruction, where: str) -> list[str]:
        return [f"return {OVER}" if where == "None" else f"return w.leave({where})"]

    _exit = _ret

    def _trap(self, ins: Instruction, where: str) -> list[str]:
        return [f"w.fail('trap at {ins.where}')"]

    def _call(self, ins: Instruction, where: str) -> list[str]:
        texts = [c.decode(errors="replace").strip("\0") for n, c in self.kernel.constants.items() if "Message" in n]
        return [f"w.fail({' or '.join(texts)!r} + ' (an assertion of the kernel, {ins.where})')"]

    def _ld(self, ins: Instruction, where: str) -> list[str]:
        kind = ins.kinds[-1]
        targets = _names(ins.args[0])
        if "param" in ins.kinds:
            name, _, more = ins.args[1].strip("[]").partition("+")
            lines = [f"loaded = [w.param({self.offsets[name] + int(more or 0)}, {DTYPES[kind]})]"]
        else:
            space, width = _space(ins)
            address = self._address(ins, ins.args[1], width)
            lines = [f"loaded = w.{space}.load({address}, {DTYPES[kind]}, {len(targets)}, {where}, w)"]
        for i, target in enumerate(targets):
            lines += self._widened(ins, target, f"loaded[{i}]", kind, where)
        return lines

    def _widened(self, ins: Instruction, target: str, found: str, kind: str, where: str) -> list[str]:
        register = ins.names.get(target)
        if register is not None and register.width > WIDTHS[kind]:
            sign = "I" if kind.startswith("s") else "U"
            found = f"{found}.view({sign}{WIDTHS[kind] // 8}).astype({sign}{register.width // 8})"
        return self.put(ins, target, found, where)

    def _st(self, ins: Instruction, where: str) -> list[str]:
        if "param" in ins.kinds:
            return []
        kind = ins.kinds[-1]
        space, width = _space(ins)
        values = ", ".join(self.value(ins, n, kind) for n in _names(ins.args[1]))
        return [f"w.{space}.store({self._address(ins, ins.args[0], width)}, [{values}], {where}, w)"]

    def _atom(self, ins: Instruction, where: str) -> list[str]:
        kind = ins.kinds[-1]
        action = next(k for k in ins.kinds if k in ("add", "min", "max", "exch", "cas", "and", "or"))
        space, width = _space(ins)
        lines, targets = [], _names(ins.args[0])
        values = [[self.value(ins, n, kind) for n in _names(a)] for a in ins.args[2:]]
        for i, target in enumerate(targets):
            step = self._constant(number(str(i * WIDTHS[kind] // 8), width))
            address = f"{self._address(ins, ins.args[1], width)} + {step}"
            given = ", ".join(value[i] for value in values)
            lines += self.put(ins, target, f"w.{space}.update({address}, {action!r}, [{given}], {where}, w)", where)
        return lines

    def _red(self, ins: Instruction, where: str) -> list[str]:
        kind = ins.kinds[-1]
        action = next(k for k in ins.kinds if k in ("add", "min", "max", "and", "or"))
        values = "".join(self.value(ins, a, kind) + ", " for n in ins.args[1:] for a in _names(n))
        return [f"w.memory.add({self._address(ins, ins.args[0], 'u64')}, {action!r}, [{values}], {where}, w)"]

    def _mbarrier(self, ins: Instruction, where: str) -> list[str]:
        if ins.kinds[0] == "try_wait":
            address, phase = self._address(ins, ins.args[1], "u32"), self.value(ins, ins.args[2], "u32")
            return self.put(ins, ins.args[0], f"w.tried({address}, {phase}, {where})", where)
        place = 1 if ins.kinds[0] == "arrive" else 0
        address = self._address(ins, ins.args[place], "u32")
        count = int(ins.args[place + 1], 0) if len(ins.args) > place + 1 else 1
        name = "arrive_expecting" if "expect_tx" in ins.kinds else ins.kinds[0]
        return [f"w.program.mbarriers.{name}(w, {address}, {count}, {where})"]

    def _bar(self, ins: Instruction, where: str) -> list[str]:
        if "warp" in ins.kinds:
            return []
        if "red" in ins.kinds or where != "None":
            raise UnknownError(f"{ins.name} by some threads")
        barrier = f"w.one({self.value(ins, ins.args[0], 'u32')})"
        count = int(ins.args[1], 0) if len(ins.args) > 1 else self.kernel.threads
        if ins.kinds[0] == "arrive":
            return [f"w.program.barriers.arrive(w, {barrier}, {count})"]
        return [f"if not w.program.barriers.passed(w, {barrier}, {count}): return {BLOCKED}"]

    _barrier = _bar

    def _fence(self, ins: Instruction, where: str) -> list[str]:
        return ["w.shared.fence(w)"] if "async" in ins.kinds and "global" not in ins.kinds else []

    def _nothing(self, ins: Instruction, where: str) -> list[str]:
        return []

    _setmaxnreg = _prefetch = _membar = _griddepcontrol = _nothing

    def _elect(self, ins: Instruction, where: str) -> list[str]:
        number_of, chosen = ins.args[0].split("|")
        self._all(ins, where)
        lines = self.put(ins, chosen, "(w.lanes == 0)", where)
        return lines + self.put(ins, number_of, self._constant(np.array(0, np.uint32)), where)

    def _all(self, ins: Instruction, where: str) -> None:
        """Whoever takes part must be all threads of a warp."""
        if where != "None":
            raise UnknownError(f"{ins.name} by some threads of a warp at {ins.where}")

    def _shfl(self, ins: Instruction, where: str) -> list[str]:
        self._all(ins, where)
        of, by, clamp = (self.value(ins, a, "u32") for a in ins.args[1:4])
        return self.put(ins, ins.args[0], f"w.shuffled({ins.kinds[1]!r}, {of}, {by}, {clamp})", where)

    def _vote(self, ins: Instruction, where: str) -> list[str]:
        self._all(ins, where)
        asked = self.value(ins, ins.args[1], "pred")
        if ins.kinds[1] == "ballot":
            return self.put(ins, ins.args[0], f"w.ballot({asked})", where)
        return self.put(ins, ins.args[0], f"np.full(32, {asked}.{ins.kinds[1]}())", where)

    def _redux(self, ins: Instruction, where: str) -> list[str]:
        self._all(ins, where)
        action = {"add": "np.add", "min": "np.minimum", "max": "np.maximum", "and": "np.bitwise_and",
                  "or": "np.bitwise_or", "xor": "np.bitwise_xor"}[ins.kinds[1]]  # fmt: skip
        of = self.value(ins, ins.args[1], ins.kinds[-1])
        dtype = DTYPES[ins.kinds[-1]]
        return self.put(ins, ins.args[0], f"np.full(32, {action}.reduce({of}, dtype={dtype}))", where)

    def _stmatrix(self, ins: Instruction, where: str) -> list[str]:
        self._all(ins, where)
        values = ", ".join(self.value(ins, n, "u32") for n in _names(ins.args[1]))
        address = self._address(ins, ins.args[0], "u32")
        return [f"w.store_matrices({address}, [{values}], {'trans' in ins.kinds})"]

    def _ldmatrix(self, ins: Instruction, where: str) -> list[str]:
        self._all(ins, where)
        targets = _names(ins.args[0])
        address = self._address(ins, ins.args[1], "u32")
        lines = [f"loaded = w.load_matrices({address}, {len(targets)}, {'trans' in ins.kinds})"]
        return lines + [x for i, t in enumerate(targets) for x in self.put(ins, t, f"loaded[{i}]", where)]

    def _wgmma(self, ins: Instruction, where: str) -> list[str]:
        if ins.kinds[0] == "fence":
            return []
        if ins.kinds[0] == "commit_group":
            return ["w.products.commit()"]
        if ins.kinds[0] == "wait_group":
            return [f"w.products.wait({int(ins.args[0])})"]
        self._all(ins, where)
        sums = tuple(ins.names[n].number for n in _names(ins.args[0]))
        a, b, keep, *signs = ins.args[1:]
        if a.startswith("{"):
            left = repr(tuple(ins.names[n].number for n in _names(a)))
        else:
            left = f"w.one({self.value(ins, a, 'u64')})"
        right, kept = f"w.one({self.value(ins, b, 'u64')})", f"w.one({self.value(ins, keep, 'pred')})"
        factors, turned = [int(s) for s in signs[:2]], [int(s) for s in signs[2:]]
        if factors != [1, 1]:
            raise UnknownError(ins.name)
        turned = [0] * (2 - len(turned)) + turned
        return [f"w.products.queue({sums}, {left}, {right}, {kept}, {turned[0]}, {turned[1]}, {ins.kinds[-1]!r})"]

    def _cp(self, ins: Instruction, where: str) -> list[str]:
        if "bulk" not in ins.kinds:
            return self._moved(ins, where)
        if "commit_group" in ins.kinds:
            return ["w.copies.commit()"]
        if "wait_group" in ins.kinds:
            return [f"if not w.copies.passed({int(ins.args[0])}, {'read' in ins.kinds}): return {BLOCKED}"]
        if "tensor" not in ins.kinds:
            raise UnknownError(f"{ins.name} at {ins.where}")
        if any(k.startswith("mbarrier") for k in ins.kinds):
            target, place, barrier = ins.args[:3]
            return [f"w.copies.load({self._address(ins, target, 'u32')}, {self._place(ins, place)}, "
                    f"{self._address(ins, barrier, 'u32')}, {where})"]  # fmt: skip
        place, of = ins.args[:2]
        adds = ins.kinds[0] == "reduce"
        if adds and "add" not in ins.kinds:
            raise UnknownError(ins.name)
        return [f"w.copies.store({self._address(ins, of, 'u32')}, {self._place(ins, place)}, {adds}, {where})"]

    def _moved(self, ins: Instruction, where: str) -> list[str]:
        """Copies of 4 to 16 bytes per thread, of which only the first ``given`` are read."""
        if "commit_group" in ins.kinds:
            return ["w.moves.commit()"]
        if "wait_group" in ins.kinds:
            return [f"w.moves.wait({int(ins.args[0], 0)})"]
        to, of, size = ins.args[:3]
        given = self.value(ins, ins.args[3] if len(ins.args) > 3 else size, "u32")
        return [f"w.moves.queue({self._address(ins, to, 'u32')}, {self._address(ins, of, 'u64')}, {int(size, 0)}, "
                f"{given}, {where})"]  # fmt: skip

    def _place(self, ins: Instruction, text: str) -> str:
        """(the descriptor's address, coordinates)"""
        descriptor, coordinates = text.strip("[]").split(",", 1)
        found = ", ".join(self.value(ins, n, "s32") for n in _names(coordinates.strip()))
        return f"{self.value(ins, descriptor.strip(), 'u64')}, [{found}]"


def _space(ins: Instruction) -> tuple[str, str]:
    """Which memory an instruction uses, and what an address of it is."""
    for kind in ins.kinds:
        if kind.startswith(("shared", "local")):
            return kind.partition("_")[0], "u32"
    return "memory", "u64"


def _names(text: str) -> list[str]:
    """Of one register, or of several in braces."""
    return [n.strip() for n in re.sub(r"[{}]", "", text).split(",")]
