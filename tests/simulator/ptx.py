"""PTX as blocks of instructions. Registers have numbers; names are those of the scope they stand in."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
          "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}  # fmt: skip
# Instructions that a block begins with: all threads of a warp execute them together, or they may have to wait.
APART = (
    "bar.", "barrier.", "shfl.", "vote.", "redux.", "elect.", "wgmma.fence", "wgmma.wait_group", "stmatrix.",
    "ldmatrix.", "mbarrier.try_wait", "cp.async.bulk.wait_group", "ld.acquire", "ld.volatile", "atom.",
)  # fmt: skip


class UnknownError(Exception):
    """PTX that the simulator does not know."""


@dataclass(frozen=True)
class Register:
    number: int
    width: int  # in bits; 1: a predicate


@dataclass(frozen=True)
class Instruction:
    """``guard``: a predicate, with a mark if it is negated; ``where``: the line of the source it was made for."""

    op: str
    kinds: tuple[str, ...]
    args: tuple[str, ...]
    guard: str | None
    names: MutableMapping[str, Register]
    labels: MutableMapping[str, int]
    where: str

    @property
    def name(self) -> str:
        return ".".join((self.op, *self.kinds))


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """``tables``: the targets of indexed branches; ``constants``: the bytes of global variables."""

    name: str
    params: list[Parameter]
    threads: int
    constants: dict[str, bytes]
    widths: list[int] = field(default_factory=list)  # of registers
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    tables: dict[str, list[str]] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)  # where variables begin in a thread's own memory,
    local_bytes: int = 0  # and its size

    def begin_block(self) -> int:
        """Its number."""
        if self.blocks[-1]:
            self.blocks.append([])
        return len(self.blocks) - 1


def parse(text: str) -> Kernel:
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{\n", text, re.DOTALL)
    if head is None:
        raise UnknownError("no kernel in this text")
    threads = re.search(r"\.reqntid (\d+)", head[3])
    assert threads is not None
    kernel = Kernel(head[1], _parameters(head[2]), int(threads[1]), _constants(text))
    _Reader(kernel).read(text, head.end())
    return kernel


def _parameters(text: str) -> list[Parameter]:
    found, offset = [], 0
    for line in filter(None, map(str.strip, text.split(","))):
        array = re.search(r"\.b8 (\w+)\[(\d+)\]", line)
        kind = re.search(r"\.param \.(\w+)", line)
        assert kind is not None
        size = int(array[2]) if array else WIDTHS[kind[1]] // 8
        offset += -offset % (64 if array else size)
        found.append(Parameter(array[1] if array else line.split()[-1], offset, size))
        offset += size
    return found


def _constants(text: str) -> dict[str, bytes]:
    found = re.findall(r"^\s*\.global .*\.b8 (\w+)\[\d+\] = \{([\d, ]*)\};", text, re.MULTILINE)
    return {name: bytes(map(int, numbers.split(","))) for name, numbers in found}


STATEMENT = re.compile(
    r"""\s*(?: (?P<comment> //[^\n]* )
             | (?P<loc>     \.loc\s[^\n]* )
             | (?P<brace>   [{}] )
             | (?P<label>   [\w$]+ ) : (?!:)
             | (?P<words>   [^;{}]* (?: \{[^}]*\} [^;{}]* )* ) ; )""",
    re.VERBOSE,
)


class _Reader:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.names: ChainMap[str, Register] = ChainMap()
        self.labels: ChainMap[str, int] = ChainMap()
        self.label = ""
        self.where = ""

    def read(self, text: str, at: int) -> None:
        """From the first statement in a kernel's braces to the closing one."""
        depth = 1
        while depth > 0:
            found = STATEMENT.match(text, at)
            if found is None:
                raise UnknownError(text[at : at + 80])
            at = found.end()
            if found["loc"]:
                self.where = found["loc"].partition("// ")[2] or found["loc"]
            elif found["brace"] == "{":
                depth += 1
                self.names, self.labels = self.names.new_child(), self.labels.new_child()
            elif found["brace"] == "}":
                depth -= 1
                self.names, self.labels = self.names.parents, self.labels.parents
            elif found["label"]:
                self.label = found["label"]
                self.labels[self.label] = self.kernel.begin_block()
            elif found["words"] is not None:
                self._statement(" ".join(re.sub(r"//[^\n]*", " ", found["words"]).split()))

    def _statement(self, words: str) -> None:
        if words.startswith(".reg"):
            _, kind, names = words.split(maxsplit=2)
            for name in names.split(","):
                self._declare(kind[1:], name.strip())
        elif words.startswith(".local"):
            name, size = re.findall(r"(\w+)\[(\d+)\]", words)[0]
            self.kernel.local[name] = self.kernel.local_bytes
            self.kernel.local_bytes += int(size) + -int(size) % 16
        elif words.startswith(".branchtargets"):
            self.kernel.tables[self.label] = [t.strip() for t in words.split(maxsplit=1)[1].split(",")]
        elif not words.startswith("."):
            self._instruction(words)

    def _declare(self, kind: str, name: str) -> None:
        family = re.fullmatch(r"(.*)<(\d+)>", name)
        for one in [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]:
            self.names[one] = Register(len(self.kernel.widths), WIDTHS[kind])
            self.kernel.widths.append(WIDTHS[kind])

    def _instruction(self, words: str) -> None:
        guard = None
        if words.startswith("@"):
            guard, words = words[1:].split(maxsplit=1)
        name, _, rest = words.partition(" ")
        op, *kinds = name.replace("::", "_").split(".")
        if name.startswith(APART):
            self.kernel.begin_block()
        made = Instruction(op, tuple(kinds), tuple(_split(rest)), guard, self.names, self.labels, self.where)
        self.kernel.blocks[-1].append(made)
        if op in ("bra", "brx", "ret", "exit", "trap"):
            self.kernel.begin_block()


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p for p in map(str.strip, parts) if p]
