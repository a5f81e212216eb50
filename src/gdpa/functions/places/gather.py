"""Lookups for every pair of a tile without bounds, where the tile's ends show that all of them lie inside the table.

That is worth a second copy of the code where an index is a term of the query plus a term of the key, such as their
distance: the address is then such a sum, too, which the compiler reduces to adding one constant per score. (Other
indices gain nothing by it.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gdpa.functions.emission.code import literal
from gdpa.functions.graph import Arg, Node, Ref
from gdpa.functions.places.intervals import Intervals
from gdpa.functions.places.names import POSITIONS
from gdpa.functions.places.program import KEY, QUERY, SIDE, Program

# Names of the tile's ends (see intervals.py) for a function that is handed ``ends``, or None.
NAMES = [
    "b, h, q_row, kv_row = places.starts(spot)",
    "q_len, kv_len = at[4].to(tl.int64), at[5].to(tl.int64)",
    "q_first, q_last = ends[0].to(tl.int64), ends[1].to(tl.int64)",
    "kv_first, kv_last = ends[2].to(tl.int64), ends[3].to(tl.int64)",
]
FIRST = {"q_idx": "q_first", "kv_idx": "kv_first", "q_row": "(q_row + q_first)", "kv_row": "(kv_row + kv_first)"}


def is_bounded(program: Program, a: Arg) -> tuple[bool, bool]:
    """Whether (a least, a largest) value follows from a tile's ends."""
    if not isinstance(a, Ref):
        return True, True
    node = program.graph.nodes[a.index]
    if node.op == "position":
        return True, True
    whole = all(_is_whole(program, b) for b in node.args)
    known = [is_bounded(program, b) for b in node.args] if node.op in BOUNDED and whole else []
    return BOUNDED[node.op](node, known) if known else (False, False)


def _both(node: Node, known: list[tuple[bool, bool]]) -> tuple[bool, bool]:
    return all(low for low, _ in known), all(high for _, high in known)


def _scaled(node: Node, known: list[tuple[bool, bool]]) -> tuple[bool, bool]:
    c = node.args[-1]
    if isinstance(c, Ref):
        return False, False
    return known[0] if c > 0 else known[0][::-1]


Rule = Callable[[Node, list[tuple[bool, bool]]], tuple[bool, bool]]
BOUNDED: dict[str, Rule] = {
    "add": _both,
    "sub": lambda node, known: (known[0][0] and known[1][1], known[0][1] and known[1][0]),
    "cast": _both,
    "neg": lambda node, known: known[0][::-1],
    "abs": lambda node, known: (True, all(known[0])),
    "minimum": lambda node, known: (known[0][0] and known[1][0], known[0][1] or known[1][1]),
    "maximum": lambda node, known: (known[0][0] or known[1][0], known[0][1] and known[1][1]),
    "mul": _scaled,
    "floordiv": lambda node, known: (
        known[0] if not isinstance(node.args[1], Ref) and node.args[1] > 0 else (False, False)
    ),
    "mod": lambda node, known: (not isinstance(node.args[1], Ref) and node.args[1] > 0,) * 2,
}


def lookups(program: Program, sums: bool = True) -> list[int]:
    """The lookups for every pair, if a tile's ends may show that all of them lie inside of their tables; otherwise
    none. ``sums``: only if all indices are sums of a term of the query and a term of the key."""
    pairs = [i for i, n in enumerate(program.graph.nodes) if n.op == "lookup" and len(program.sides[i]) == 2]
    known = can_be_inside if sums else has_ends
    return pairs if all(known(program, i) for i in pairs) else []


def has_ends(program: Program, index: int) -> bool:
    """Whether the least and the largest value of every index follow from a tile's ends."""
    return all(all(is_bounded(program, a)) and _is_whole(program, a) for a in program.graph.nodes[index].args[1:])


def can_be_inside(program: Program, index: int) -> bool:
    sums = all(_is_sum(program, a) for a in program.graph.nodes[index].args[1:])
    return sums and len(program.sides[index]) == 2 and has_ends(program, index)


def _is_sum(program: Program, a: Arg) -> bool:
    """Whether _sum takes it."""
    if not isinstance(a, Ref) or len(program.sides[a.index]) < 2:
        return _is_whole(program, a)
    node = program.graph.nodes[a.index]
    return node.op in ("add", "sub", "neg") and all(_is_sum(program, b) for b in node.args)


def _is_whole(program: Program, a: Arg) -> bool:
    return not isinstance(a, Ref) or program.graph.nodes[a.index].dtype in (torch.int64, torch.int32)


def inside_lines(program: Program, nodes: list[int]) -> list[str]:
    """Lines after which ``inside`` tells whether those lookups find something for all pairs of the tile; where a row
    itself is an index, something of the sequence's own (see Program.finite_past_the_end)."""
    found = [program.graph.nodes[i] for i in nodes]
    sides = {_side_of_position(program, a) for n in found for a in n.args[1:]}
    intervals = Intervals(program, [a.index for n in found for a in n.args[1:] if isinstance(a, Ref)])
    held = [
        f"({low} >= 0) & ({high} < places.even(sizes[{n.args[0]}][{dim}]))"
        for n in found
        for dim, (low, high) in enumerate(map(intervals.ends, n.args[1:]))
    ]
    held += ["(q_last < q_len)"] * (QUERY in sides) + ["(kv_last < kv_len)"] * (KEY in sides)
    return [*NAMES, *intervals.lines, f"inside = {' & '.join(held)}"]


def _side_of_position(program: Program, a: Arg) -> str | None:
    node = program.graph.nodes[a.index] if isinstance(a, Ref) else None
    return SIDE.get(POSITIONS[node.args[0]]) if node is not None and node.op == "position" else None  # type: ignore[index]


def address(program: Program, index: int, value: Callable[[Arg], str], base: str) -> str:
    """Code of where the entry is in what begins at ``base``, if it is inside. ``value``: code of a node."""
    node = program.graph.nodes[index]
    sums = [_sum(program, a, value) for a in node.args[1:]]
    for part in range(3):  # of the sequence, of the query, of the key
        flat = ""
        for dim, terms in enumerate(sums):
            size = f"places.even(sizes[{node.args[0]}][{dim}]).to(tl.int64)"
            flat = " + ".join([f"({flat}) * {size}"] * bool(flat) + [terms[part]] * bool(terms[part]))
        base = f"({base} + ({flat}))" if flat else base
    return base


Terms = tuple[str, str, str]


def _sum(program: Program, a: Arg, value: Callable[[Arg], str]) -> Terms:
    """``a`` as a sum of what neither side, the query and the key have to do with, in 64 bits; "" for nothing."""
    if not isinstance(a, Ref):
        return literal(a), "", ""
    node, sides = program.graph.nodes[a.index], program.sides[a.index]
    if len(sides) < 2:
        code = _wide(node, value(a))
        return (code, "", "") if not sides else ("", code, "") if QUERY in sides else ("", "", code)
    first, *others = (_sum(program, b, value) for b in node.args)
    if node.op == "neg":
        return _combined(("", "", ""), first, "-")
    return _combined(first, others[0], "+" if node.op == "add" else "-")


def _combined(x: Terms, y: Terms, sign: str) -> Terms:
    a, b, c = (f"{one} {sign} ({two})".strip(" +") if two else one for one, two in zip(x, y, strict=True))
    return a, b, c


def _wide(node: Node, code: str) -> str:
    """In 64 bits: of a position first the tile's, which is the same for all, then the few more of a row."""
    if node.op != "position":
        return f"{code}.to(tl.int64)"
    name = POSITIONS[node.args[0]]  # type: ignore[index]
    first = FIRST.get(name)
    return f"({first} + ({code} - {first}.to(tl.int32)).to(tl.int64))" if first else f"{code}.to(tl.int64)"


# ---- lookups that are the same along a diagonal ----------------------------------------------------------------------
def is_along_diagonals(program: Program, index: int) -> bool:
    """Whether a lookup for every pair is the same for the next query and the next key."""
    return all(slope == 0 for slope in (_slope(program, a) for a in program.graph.nodes[index].args[1:]))


def _slope(program: Program, a: Arg) -> float | None:
    """By how much ``a`` grows from a pair to the next query and the next key; None if that is not one number."""
    if not isinstance(a, Ref) or not program.sides[a.index]:
        return 0
    node = program.graph.nodes[a.index]
    if node.op == "position":
        return 1
    parts = [_slope(program, b) for b in (node.args[1:] if node.op == "lookup" else node.args)]
    first, last = parts[0], parts[-1]
    if all(p == 0 for p in parts):
        return 0
    if first is None or last is None or node.dtype.is_floating_point:
        return None
    if node.op in ("add", "sub"):
        return first + last if node.op == "add" else first - last
    return -first if node.op == "neg" else None
