"""A program of places as Triton code: one assignment per node.

Values have the shape that their places need: a scalar for what depends on the sequence and the head, a column or a row
of a tile for what depends on the query or the key alone. Integers are as torch has them, 64 bits wide, but computed in
32 where their ranges show that nothing is lost. A lookup reads nothing outside of its table; there it gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from gdpa.functions.emission.code import TL_DTYPE, expression, literal
from gdpa.functions.graph import Arg, Node, Ref
from gdpa.functions.places import gather
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import KEY, QUERY, SIDE, Program

INT32 = (-(2**31), 2**31 - 1)
LENGTHS = ("q_len", "kv_len")
SMALL = 2**22  # see places.as_float
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
OWN, MASK = "tables, sizes = spot[4].own, spot[5].sizes", "tables, sizes = spot[4].mask, spot[5].mask_sizes"
LOGIC = {"and": "&", "or": "|", "xor": "^"}
CALLS = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "bitand": "{} & {}", "bitor": "{} | {}", "bitxor": "{} ^ {}",
    "shl": "{} << {}", "shr": "{} >> {}",
    "neg": "-{}", "abs": "tl.abs({})", "sign": "({0} > 0).to(tl.int32) - ({0} < 0).to(tl.int32)", "bitnot": "~{}",
    "minimum": "tl.minimum({}, {})", "maximum": "tl.maximum({}, {})", "truncdiv": "{} // {}", "fmod": "{} % {}",
    "floordiv": "places.floordiv({}, {})", "mod": "places.mod({}, {})",
}  # fmt: skip


class Writer:
    """Writes Triton code for the nodes that are asked for by ``value``, and for all that these need, to ``lines``.
    ``at`` has the code of each position."""

    def __init__(self, program: Program, at: Mapping[str, str], prefix: str = "x", small: str | None = None,
                 own: bool = False, inside: bool = False, by_sides: bool = False,
                 columns: Program | None = None, rows: bool = False) -> None:  # fmt: skip
        """``small``: code of Numbers.small, where that is at hand. ``own``: rows past the end of a sequence read the
        sequence's last entry, not the next sequence's; and 0 where the other side has no rows, since kernels then
        compute f once all the same, times zero. ``inside``: lookups for every pair need no bounds (see gather.py).
        ``by_sides``: i - j as a float is a difference of two floats, which takes registers for those of one side.
        ``columns``: the program whose values for a tile's columns, and, if these are keys, for its ``rows``, the kernel
        may have looked up already (see columns_source)."""
        self.program, self.at, self.prefix, self.small, self.own = program, at, prefix, small, own
        self.inside, self.by_sides = inside, by_sides
        self.lines: list[str] = []
        self._done: set[int] = set()
        self._offsets: set[int] = set()
        self._columns = (
            {i: (side, n) for side in (QUERY, KEY) for n, i in enumerate(columns.columns(side))} if columns else {}
        )
        after = len(columns.columns(KEY)) if columns else 0
        self._rows = {i: after + n for n, i in enumerate(columns.rows(QUERY))} if columns and rows else {}

    def value(self, arg: Arg) -> str:
        """The name, or literal, of ``arg``; what it needs is written first."""
        if not isinstance(arg, Ref):
            return literal(arg)
        if arg.index not in self._done:
            self._done.add(arg.index)
            self._write(arg.index)
            if arg.index in self._columns or arg.index in self._rows:
                self.lines += self._looked_up(arg.index, self.lines.pop())
        return f"{self.prefix}{arg.index}"

    def dtype(self, arg: Arg) -> torch.dtype:
        """The dtype in which ``arg`` is computed."""
        if not isinstance(arg, Ref):
            wide = not isinstance(arg, bool | float) and not INT32[0] <= arg <= INT32[1]
            return torch.int64 if wide else torch.float32 if isinstance(arg, float) else torch.int32
        node, found = self.program.graph.nodes[arg.index], self.program.ranges[arg.index]
        if node.op == "lookup" or node.dtype != torch.int64 or found is None:
            return node.dtype
        return torch.int32 if INT32[0] <= found[0] and found[1] <= INT32[1] else torch.int64

    def _write(self, index: int) -> None:
        node, name = self.program.graph.nodes[index], f"{self.prefix}{index}"
        if node.op == "lookup":
            self._lookup(index, node, name)
        else:
            self.lines.append(f"{name} = {self._expression(index, node)}")

    def _expression(self, index: int, node: Node) -> str:
        own = self.dtype(Ref(index))
        if node.op == "position":
            name = POSITIONS[node.args[0]]  # type: ignore[index]
            # Kernels compute f once where one side of a sequence has no rows, times zero: 1 / kv_len must be finite.
            return f"tl.maximum({self.at[name]}, 1)" if self.own and name in LENGTHS else self.at[name]
        args = [self.value(a) for a in node.args]
        if node.op == "cast":
            if node.dtype == torch.bool:
                return f"{args[0]} != 0"
            return self.as_float(node.args[0]) if own == torch.float32 else f"{args[0]}.to({tl_dtype(own)})"
        if node.op in LOGIC:
            return f"{args[0]} {LOGIC[node.op]} {args[1]}"
        if node.op == "not":
            return f"{args[0]} == 0"
        if node.op == "where":
            yes, no = (self._in(a, own) for a in node.args[1:])
            text = f"tl.where({args[0]}, {yes}, {no})"
            return text if any(isinstance(a, Ref) for a in node.args[1:]) else f"{text}.to({tl_dtype(own)})"
        integers = all(not self.dtype(a).is_floating_point for a in node.args)
        if node.op in COMPARE and integers:
            work = self._work(node, torch.int32)
            left, right = (self._in(a, work) for a in node.args)
            return f"{left} {COMPARE[node.op]} {right}"
        if not node.dtype.is_floating_point and integers:
            return self._arithmetic(node, own)
        return self._float(node, args)

    def as_float(self, arg: Arg) -> str:
        """Code of ``arg`` as float32. Integers that differ for every pair are converted by places.as_float, if they are
        small wherever positions are. abs and neg are applied after the conversion, where they cost nothing."""
        if isinstance(arg, Ref) and len(self.program.sides[arg.index]) == 2 and self.dtype(arg) == torch.int32:
            node = self.program.graph.nodes[arg.index]
            if node.op in ("abs", "neg") and self.dtype(node.args[0]) == torch.int32:
                return CALLS[node.op].format(f"({self.as_float(node.args[0])})")
            if self.by_sides and node.op == "sub" and all(map(self._is_small, (arg, *node.args))):
                return f"places.difference({', '.join(map(self.value, node.args))}, {self.small})"
        text = self.value(arg)
        if isinstance(arg, Ref) and len(self.program.sides[arg.index]) == 2 and self._is_small(arg):
            return f"places.as_float({text}, {self.small})"
        return text if self.dtype(arg) == torch.float32 else f"{text}.to(tl.float32)"

    def _is_small(self, arg: Arg) -> bool:
        """Whether places.as_float may convert it in the short way, if ``small`` says that positions are small."""
        if self.small is None or not isinstance(arg, Ref) or self.dtype(arg) != torch.int32:
            return False
        found = self.program.small_ranges[arg.index]
        return found is not None and found[0] > -SMALL and found[1] < SMALL

    def _arithmetic(self, node: Node, own: torch.dtype) -> str:
        work = self._work(node, own)
        args = [self._in(a, work) for a in node.args]
        text = CALLS[node.op].format(*args)
        return text if work == own and node.op != "sign" else f"({text}).to({tl_dtype(own)})"

    def _work(self, node: Node, own: torch.dtype) -> torch.dtype:
        """The dtype of an operation's arithmetic: 64 bits if an argument (a constant, too) or the result needs them."""
        if torch.int64 in map(self.dtype, node.args) or node.op in ("shl", "bitnot"):
            return torch.int64
        return max_int([*(self.dtype(a) for a in node.args if isinstance(a, Ref)), own])

    def _in(self, a: Arg, dtype: torch.dtype) -> str:
        text = self.value(a)
        if not isinstance(a, Ref):
            return f"({text})" if text.startswith("-") else text
        return text if self.dtype(a) == dtype else f"{text}.to({tl_dtype(dtype)})"

    def _float(self, node: Node, args: list[str]) -> str:
        shown = iter(args)
        return expression(node, "accurate", lambda a: next(shown))

    def offset(self, index: int) -> tuple[str, str]:
        """Names of a lookup's offset in its flattened table, and of whether that lies inside."""
        node = self.program.graph.nodes[index]
        table, name = node.args[0], f"{self.prefix}{index}"
        if index not in self._offsets:
            self._offsets.add(index)
            total, inside = "", []
            for dim, a in enumerate(node.args[1:]):
                size, i = f"places.even(sizes[{table}][{dim}])", f"{name}_{dim}"
                code = self.index(a)
                known = self.program.ranges[a.index] if isinstance(a, Ref) else (int(a), int(a))
                if known is None or known[0] < 0:
                    code = f"places.from_end({code}, {size})"
                if not isinstance(a, Ref) and not code.startswith("places"):
                    code = f"places.number({code}, {size})"
                self.lines.append(f"{i} = {code}")
                inside.append(f"places.inside({i}, {size})")
                here = f"{i}.to(tl.int32)"
                total = f"({total}) * {size} + {here}" if total else here
            self.lines.append(f"{name}_at = {total}")
            if self.own and len(self.program.sides[index]) < 2:
                inside.append(f"(tl.minimum({self.at['q_len']}, {self.at['kv_len']}) > 0)")
            self.lines.append(f"{name}_in = {' & '.join(inside)}")
        return f"{name}_at", f"{name}_in"

    def index(self, a: Arg) -> str:
        """Code of an index."""
        code = self.value(a)
        node = self.program.graph.nodes[a.index] if isinstance(a, Ref) else None
        if not self.own or node is None or node.op != "position":
            return code
        name = POSITIONS[node.args[0]]  # type: ignore[index]
        if name not in SIDE:
            return code
        side = "q" if SIDE[name] == QUERY else "kv"
        i, length = (self.at[f"{side}_{what}"] for what in ("idx", "len"))
        return f"tl.minimum({code}, {code} - {i} + {length} - 1)"

    def _lookup(self, index: int, node: Node, name: str) -> None:
        truth = " != 0" if node.dtype == torch.bool else ""
        if self.inside and gather.can_be_inside(self.program, index):
            place = gather.address(self.program, index, self.value, f"tables[{node.args[0]}]")
            self.lines.append(f"{name} = tl.load({place}){truth}")
        else:
            at, inside = self.offset(index)
            self.lines.append(f"{name} = tl.load(tables[{node.args[0]}] + {at}, mask={inside}, other=0){truth}")

    def _looked_up(self, index: int, usual: str) -> list[str]:
        """Lines for a value that the kernel may have looked up already (given[4]), otherwise computed as ``usual``.
        (Kernels that pass no ``ends`` look nothing up.)"""
        side, number = self._columns.get(index, ("", 0))
        name, keys = usual.split(" = ")[0], self.at["kv_idx"]
        of_column = f"{name} = once.spread(given[4][{number}], {self.at['q_idx' if side == QUERY else 'kv_idx']})"
        of_row = f"{name} = given[4][{self._rows[index]}]" if index in self._rows else usual
        return [
            "if ends is None:",
            f"    {usual}",
            f"elif {keys}.shape[0] == 1:",  # columns are keys
            f"    {of_column if side == KEY else of_row}",
            "else:",
            f"    {of_column if side == QUERY else usual}",
        ]


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def max_int(kinds: list[torch.dtype]) -> torch.dtype:
    """The widest of some integer types."""
    whole = [k for k in kinds if k != torch.bool] or [torch.int32]
    return max(whole, key=lambda k: torch.iinfo(k).bits)


def tl_dtype(dtype: torch.dtype) -> str:
    return TL_DTYPE[dtype]


def unpacked() -> dict[str, str]:
    """Code of each position in a function that gets them as the tuple ``at``."""
    return {name: f"at[{i}]" for i, name in enumerate(POSITIONS)}


def positions_by_thread(side: str) -> dict[str, str]:
    """The same where each thread has one of a tile's columns, which are of ``side`` (see device/once.py)."""
    short, first, start = ("q", 0, 2) if side == QUERY else ("kv", 2, 3)
    own = f"once.numbered(ends[{first}], at[{POSITIONS.index(f'{short}_idx')}])"
    row = f"places.starts(spot)[{start}].to(tl.int32)"
    return {**unpacked(), f"{short}_idx": own, f"{short}_row": f"({row} + {own})"}


# ---- functions -------------------------------------------------------------------------------------------------------
def keep_source(name: str, program: Program) -> str:
    """The function ``name`` of a mask: which pairs are visible."""
    lines, shown = _truth(program, Writer(program, unpacked()))
    return function(f"{name}(at, tables, sizes)", [*lines, f"return {shown}"])


def near_keep_source(name: str, program: Program) -> str:
    """The same for Hopper's kernels: values of a tile's columns are looked up by one thread each (columns_source)."""
    lines, shown = _truth(program, Writer(program, unpacked(), columns=program))
    found = f"{name}_columns((0, at, spot, ends))" if any(map(program.columns, (KEY, QUERY))) else "0"
    given = f"given = (0, at, spot, ends, {found})"
    source = columns_source(name, program, MASK) if found != "0" else ""
    first = [MASK, given] if program.tables else []
    return source + function(f"{name}(at, spot, ends)", [*first, *lines, f"return {shown}"])


def _truth(program: Program, writer: Writer) -> tuple[list[str], str]:
    (output,) = program.graph.outputs
    shown = writer.value(output) if isinstance(output, Ref) else f"at[2] {'==' if output else '!='} at[2]"
    return writer.lines, shown


def placed_source(
    name: str, inner: str, n_params: int, program: Program, learned: tuple[int, ...], columns: Program | None
) -> str:  # fmt: skip
    """The functions of a placed activation, around those of ``inner``, which takes its leaves after the params.

    They take the score and ``given`` (see device/places.positions). ``backward`` returns p, ds, dparams, and the
    derivative by each leaf that is an entry of a table with a gradient (see learned/).
    """
    results = [0, 1, *range(2, 2 + n_params), *(2 + n_params + i for i in learned)]
    names = [f"r{i}" for i in results]

    def inputs(writer: Writer) -> str:
        leaves = [leaf(writer, o) for o in program.graph.outputs]
        given = "".join(f"{x}, " for x in [*(f"params[{i}]" for i in range(n_params)), *leaves])
        return f"({given.strip()})" if given else "0"

    def value(writer: Writer) -> list[str]:
        code = inputs(writer)
        return [*writer.lines, f"p = {inner}_forward(s, {code})"]

    def both(writer: Writer) -> list[str]:
        code = inputs(writer)
        parts = [f"{name} = r[{i}]" for name, i in zip(names, results, strict=True)]
        return [*writer.lines, f"r = {inner}_backward(s, {code})", *parts]

    loads = ", ".join(f"tl.load(p_params + {i} * stride + h)" for i in range(n_params))
    source = function("load_params(p_params, stride, h)", [f"return ({loads},)" if loads else "return 0"])
    source += function(f"{name}_forward(s, given)", [*either(program, value, ["p"], columns=columns), "return p"])
    source += function(
        f"{name}_backward(s, given)", [*either(program, both, names, columns=columns), f"return {', '.join(names)}"]
    )
    return source


Write = Callable[[Writer], list[str]]


def shifted_source(
    name: str, outer: str, program: Program, learned: tuple[int, ...], blocks: Write | None,
    columns: Program | None,
) -> str:  # fmt: skip
    """The same for ``outer`` of a shift (see shift.py): {name}_shift returns it with its derivatives. Also the shift
    alone, {name}_shifted, written by ``blocks`` if they are given (see pairs.py); but by Triton where gather.py
    applies: in the backward, where a thread holds half as many scores, that takes fewer instructions. For guarded code
    see terms/source.py."""

    def total(writer: Writer) -> list[str]:
        leaves = "".join(f"{leaf(writer, o)}, " for o in program.graph.outputs)
        return [*writer.lines, f"shift = {name}_shift(s, ({leaves.strip()}))", "u = shift[0]"]

    lines = [*start(program), *total(function_writer(program))]
    both = ", ".join(["r[0]", "r[1]", *(f"r[1] * shift[{1 + i}]" for i in learned)])
    source = function("load_params(p_params, stride, h)", ["return 0"])
    write = None if gather.lookups(program) else blocks
    alone = either(program, write or total, ["u"], sums=write is None, columns=columns)
    source += function(f"{name}_shifted(s, given)", [*alone, "return u"])
    source += function(f"{name}_forward(s, given)", [*lines, f"return {outer}_forward(u, 0)"])
    last = [f"r = {outer}_backward(u, 0)", f"return {both}"]
    source += function(f"{name}_backward(s, given)", [*lines, *last])
    return source


def columns_source(name: str, program: Program, tables: str = OWN) -> str:
    """{name}_columns: the values of a tile's columns that take a lookup (Program.columns), each column by one thread,
    as a tuple. If the columns are keys, functions (not masks) have behind them the values of its rows
    (Program.rows)."""
    lines = [*start(program, tables)]
    for side, i in ((KEY, "kv_idx"), (QUERY, "q_idx")):
        writer = Writer(program, positions_by_thread(side), f"{side}_", own=True)
        values = [writer.value(Ref(index)) for index in program.columns(side)]
        first = writer.lines
        if side == KEY and tables == OWN:
            writer = Writer(program, unpacked(), "row_", "spot[5].small", own=True)
            values += [writer.value(Ref(index)) for index in program.rows(QUERY)]
            first = [*first, *writer.lines]
        found = f"return ({', '.join(values)},)" if values else "return 0"
        lines += [f"{'if' if side == KEY else 'elif'} {unpacked()[i]}.shape[0] == 1:", *indented([*first, found])]
    return function(f"{name}_columns(given)", lines)


def function_writer(
    program: Program, inside: bool = False, by_sides: bool = False, columns: Program | None = None
) -> Writer:  # fmt: skip
    return Writer(program, unpacked(), "x", "spot[5].small", True, inside, by_sides, columns, rows=True)


def either(
    program: Program, write: Write, results: list[str], sums: bool = True, by_sides: bool = False,
    columns: Program | None = None,
) -> list[str]:  # fmt: skip
    """The lines of ``write``, which compute ``results``. Where the ends of a tile may show that all lookups for its
    pairs are inside their tables, two copies behind a branch, with bounds and without. (Looked-up values are used
    inside of the branch: they would not fit beside the scores.) ``sums``: only for indices that are sums, see
    gather.lookups."""
    first, usual = start(program), write(function_writer(program, by_sides=by_sides, columns=columns))
    lookups = gather.lookups(program, sums)
    if not lookups:
        return [*first, *usual]
    return [
        *first, "if ends is None:", "    inside: tl.constexpr = False", "else:",
        *indented(gather.inside_lines(program, lookups)),
        "if inside:", *indented(write(function_writer(program, inside=True, by_sides=by_sides, columns=columns))),
        *(f"    {x} = places.finished({x})" for x in results), "else:", *indented(usual),
    ]  # fmt: skip


def start(program: Program, tables: str = OWN) -> list[str]:
    """Lines that unpack ``given``."""
    first = "params, at, spot, ends = given[0], given[1], given[2], given[3]"
    return [first, tables] if program.tables else [first]


def leaf(writer: Writer, output: Arg) -> str:
    """Code of a leaf as the float that ``inner`` takes."""
    if not isinstance(output, Ref):
        return f"maths.spread({float(output)!r}, s)"
    if writer.dtype(output) == torch.bool:
        return f"tl.where({writer.value(output)}, 1.0, 0.0)"
    return writer.as_float(output)


def function(head: str, lines: list[str]) -> str:
    return "\n".join(["", "", "@triton.jit", f"def {head}:", *(f"    {line}" for line in lines)]) + "\n"
