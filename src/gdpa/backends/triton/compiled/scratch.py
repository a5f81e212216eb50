"""Shared memory that the compiler itself takes, in code that two consumers are to share (see sharing.py).

Triton moves numbers between threads through shared memory of its own (conversions of layouts, sums over warps), and
each consumer has some at an address that is a constant of its code. ``of_either`` adds %scratch to these addresses in
the second consumer's code, which is 0 for the second consumer and, for the first, what its addresses are less.

Which addresses these are is found by comparing both copies, instruction by instruction. They must differ in nothing
else but what is known here: so code of consumers that are not alike is never shared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

PARTITION_ENDS = re.compile(r"\tbarrier\.sync \t1;")
LEAVES = re.compile(r"\t(?:@!?%p\d+ )?(?:brx\.idx|ret|exit|trap)\b")
LABEL = re.compile(r"(\$L\w+):")
ADDRESS = re.compile(r"(?<=\+)\d+(?=\])|(?<=^add\.s32 \t%, %, )\d+(?=;$)")  # in an instruction as _shape has it
MEMORY = re.compile(r"shared|global_smem")
# What is known to differ: the barrier among its warps, how the numbers of its threads are told, and what only one of
# the two computes itself of what all code has before it.
OF_FIRST = re.compile(
    r"bar\.sync \t0, 128;|setp\.lt\.u32 \t%, %, (?:32|64);|and\.b32 \t%, %, (?:3|24);|shl\.b32 \t%, %, [24];"
    r"|mov\.u32 \t%, %ctaid\.x;"
)
OF_SECOND = re.compile(
    r"bar\.sync \t2, 128;|setp\.eq\.b32 \t%, %, 0;|shr\.u32 \t%, %, [35];|and\.b32 \t%, %, (?:12|64|96|127);"
    r"|(?:add|sub|mul\.lo)\.s32 \t%, %, %;|mov\.b32 \t%, %;"
)
ADDITION = re.compile(r"\tadd\.s32 \t(%r\d+), (%r\d+), \d+;.*")
ACCESS = re.compile(r"(.*\[)(%r\d+|global_smem)(\+\d+\].*)")


class UnlikeError(Exception):
    """The code is not as it is expected to be."""


def of_either(ptx: str, first: int, second: int) -> tuple[str, int]:
    """``ptx``, in which the consumers' code begins at ``first`` and ``second``, with %scratch in the latter, and how
    far the two scratches are apart; 0 and no %scratch if there are none."""
    lines = ptx.split("\n")
    code, own = (_reached(lines, ptx.count("\n", 0, start)) for start in (first, second))
    shapes, own_shapes = (Counter(shape for i in found if (shape := _shape(lines[i]))) for found in (code, own))
    only_first, only_second = _differences(shapes, own_shapes, ptx[:first])
    if not only_first and not only_second:
        return ptx, 0
    apart = _least(only_second) - _least(only_first)
    moved = Counter({_moved(shape, apart): n for shape, n in only_first.items()})
    if moved != only_second or any(own_shapes[shape] != n for shape, n in moved.items()):
        raise UnlikeError
    for i in own:
        if _shape(lines[i]) in moved:
            lines[i] = _from_scratch(lines[i])
    return "\n".join(lines), apart


def code_from(ptx: str, start: int) -> str:
    """The code that a partition gets to which begins at ``start``."""
    lines = ptx.split("\n")
    return "\n".join(lines[i] for i in _reached(lines, ptx.count("\n", 0, start)))


def _reached(lines: list[str], start: int) -> list[int]:
    """The lines of that code."""
    labels = {label[1]: i for i, line in enumerate(lines) if (label := LABEL.match(line))}
    found: set[int] = set()
    ahead = [start]
    while ahead:
        i = ahead.pop()
        while i not in found and not PARTITION_ENDS.match(lines[i]):
            if LEAVES.match(lines[i]):
                raise UnlikeError
            found.add(i)
            branch = re.match(r"\t(@!?%p\d+ )?bra(?:\.uni)? \t(\$L\w+);", lines[i])
            if branch:
                ahead.append(labels[branch[2]])
            if branch and not branch[1]:
                break
            i += 1
    return sorted(found)


def _shape(line: str) -> str:
    """An instruction without the names of registers and labels; nothing for what is none."""
    line = line.split("//")[0].strip()
    if not line or line.startswith(".loc") or LABEL.match(line):
        return ""
    return re.sub(r"%[a-z]+\d+", "%", re.sub(r"\$L\w+", "$L", line))


def _differences(first: Counter[str], second: Counter[str], known: str) -> tuple[Counter[str], Counter[str]]:
    """What only one of them has, and is not expected to have. Addresses that the first consumer takes from the code
    before it, which is ``known``, the second may compute."""
    of_first = {shape: n for shape, n in (first - second).items() if not OF_FIRST.fullmatch(shape)}
    of_second = {}
    for shape, n in (second - first).items():
        address = None if MEMORY.search(shape) else ADDRESS.search(shape)
        if not OF_SECOND.fullmatch(shape) and not (address and re.search(rf", {address[0]};", known)):
            of_second[shape] = n
    return Counter(of_first), Counter(of_second)


def _least(shapes: Iterable[str]) -> int:
    """The lowest address in instructions that all must have one."""
    found = [ADDRESS.findall(shape) for shape in shapes]
    if not found or any(len(one) != 1 for one in found):
        raise UnlikeError
    return min(int(one[0]) for one in found)


def _moved(shape: str, by: int) -> str:
    return ADDRESS.sub(lambda found: str(int(found[0]) + by), shape)


def _from_scratch(line: str) -> str:
    """``line`` with %scratch added to the address in it."""
    addition, access = ADDITION.fullmatch(line), ACCESS.fullmatch(line)
    if addition:
        return f"{line}\n\tadd.s32 \t{addition[1]}, {addition[1]}, %scratch;"
    if not access or line.startswith("\t@"):
        raise UnlikeError
    base = f"\tmov.b32 \t%scratch_at, {access[2]};\n\tadd.s32 \t%scratch_at, %scratch_at, %scratch;\n"
    return f"{base}{access[1]}%scratch_at{access[3]}"
