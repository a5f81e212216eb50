"""Gradients of tables, as Triton code: what backward kernels add to the entries that pairs have looked up.

A tile's sum goes to an entry at once where the index does not depend on both sides; otherwise every pair's goes there.
A kernel whose scores lie in a thread as the tensor cores leave them adds up what a thread has for one entry first:

    a table of                      additions per thread and 32 scores
    heads, sequences                1
    keys                            2
    queries                         16
    distances (along diagonals)     18
    pairs                           32, or as few as 8 where neighbours have the same entry
"""

from __future__ import annotations

from gdpa.functions.graph import Node, Ref
from gdpa.functions.places import gather
from gdpa.functions.places.emit import Writer, either, function, leaf, start, unpacked
from gdpa.functions.places.program import QUERY, Program


def learn_source(name: str, n_params: int, program: Program, learned: tuple[int, ...]) -> str:
    """{name}_learn: ``results`` are those of backward; queries lie along Q_AXIS of the tile."""
    writer = Writer(program, unpacked(program))
    lines = [*start(program), "gradients, copy, factor = learning"]
    body: list[str] = []
    for number, output in enumerate(learned):
        index, node, entries = _lookup(program, output)
        at, inside = writer.offset(index)
        body += [
            f"g{number} = dp * results[{2 + n_params + number}] * factor",
            "if MASKED:",
            f"    g{number} = tl.where(keep, g{number}, 0.0)",
        ]
        sides = program.sides[index]
        if not sides:
            total = f"tl.sum(g{number})"
        elif len(sides) == 2:
            total = f"g{number}"
        else:
            axis = "1 - Q_AXIS" if QUERY in sides else "Q_AXIS"
            total = f"tl.sum(g{number}, axis={axis}, keep_dims=True)"
        # Lanes of a warp whose indices are equal would wait for each other at one entry: each has a copy of its own.
        which = "copy + at[2] + 8 * at[3]" if len(sides) == 2 else "copy"
        place = f"gradients[{node.args[0]}] + (({which}) & (COPIES - 1)) * ({entries}) + {at}"
        body.append(f'tl.atomic_add({place}, {total}, mask={inside}, sem="relaxed")')
    constants = "COPIES: tl.constexpr, Q_AXIS: tl.constexpr, MASKED: tl.constexpr"
    head = f"{name}_learn(dp, results, keep, given, learning, {constants})"
    return function(head, [*lines, *writer.lines, *body])


def _lookup(program: Program, output: int) -> tuple[int, Node, str]:
    """Of one of the program's outputs, an entry of a table: the lookup and the number of the table's entries."""
    found = program.graph.outputs[output]
    assert isinstance(found, Ref)
    node = program.graph.nodes[found.index]
    sizes = (f"places.even(sizes[{node.args[0]}][{dim}])" for dim in range(len(node.args) - 1))
    return found.index, node, " * ".join(sizes)


# ---- thread by thread ------------------------------------------------------------------------------------------------
SCORES = 32  # of a thread at a time: two keys, 8 apart, and of 8 blocks of 8 queries two each


def _at(block: int, key: int, query: int) -> int:
    return 4 * block + 2 * key + query


BLOCKS, TWO = range(SCORES // 4), (0, 1)
# Which of a thread's scores belong to one entry; of pairs, which may do so.
GROUPS = {
    "tile": [[*range(SCORES)]],
    "key": [[_at(n, k, q) for n in BLOCKS for q in TWO] for k in TWO],
    "query": [[_at(n, k, q) for k in TWO] for n in BLOCKS for q in TWO],
    "diagonal": [[_at(n + k, k, q) for k in TWO if n + k in BLOCKS] for n in (-1, *BLOCKS) for q in TWO],
    "pair": [[_at(n, k, q) for k in TWO for q in TWO] for n in BLOCKS],
}
# The copy of a table that a thread adds to, so that lanes of a warp do not wait for each other, nor programs. Along
# diagonals neighbours lie beside each other: to share a line is faster.
COPY = "8 * tl.program_id(0) + places.lane(at[2] + at[3])"
COPY_OF_DIAGONAL = "tl.program_id(0)"


def kind_of(program: Program, index: int) -> str:
    """How a lookup depends on pairs."""
    sides = program.sides[index]
    if len(sides) < 2:
        return "tile" if not sides else "query" if QUERY in sides else "key"
    return "diagonal" if gather.is_along_diagonals(program, index) else "pair"


def learn_shifted_source(name: str, program: Program, learned: tuple[int, ...]) -> str:
    """{name}_learn_shifted: the same for a sum of the score and leaves, whose gradient is ds, (keys x queries)."""

    def write(writer: Writer) -> list[str]:
        leaves = "".join(f"{leaf(writer, o)}, " for o in program.graph.outputs)
        body = [f"shift = {name}_shift(ds, ({leaves.strip()}))"]
        for output in learned:
            index, node, entries = _lookup(program, output)
            kind = kind_of(program, index)
            which = COPY_OF_DIAGONAL if kind == "diagonal" else COPY
            begin = f"gradients[{node.args[0]}] + (({which}) & (places.even(spot[5].copies) - 1)) * ({entries})"
            inside = None
            if writer.inside and gather.can_be_inside(program, index):
                place = gather.address(program, index, writer.value, f"({begin})")
            else:
                at, inside = writer.offset(index)
                place = f"{begin} + {at}"
            body.append(_additions(kind, f"ds * shift[{1 + output}]", place, inside))
        return [*writer.lines, *body]

    lines = either(program, write, [])
    n = len(start(program))
    return function(
        f"{name}_learn_shifted(ds, given)", [*lines[:n], "gradients = spot[4].gradients", *lines[n:], "return ds"]
    )


def _additions(kind: str, value: str, place: str, inside: str | None) -> str:
    """What a thread adds to the gradients of a table, for 32 scores."""
    write = _pairs if kind == "pair" else _sums
    text = ["{", *(line for group in GROUPS[kind] for line in write(group, inside is not None)), "}"]
    text[-1:-1] = [f"mov.b32 ${i}, 0;" for i in range(SCORES)]  # elementwise code has a result; nobody reads it
    kinds = ["=&r", "f", "l"] + ["r"] * (inside is not None)
    constraints = ",".join(kind for kind in kinds for _ in range(SCORES))
    inputs = [value, f"({place}).to(tl.int64)"] + [f"({inside}).to(tl.int32)"] * (inside is not None)
    code = "\\n".join(text)
    given = f'"{code}", "{constraints}", [{", ".join(inputs)}]'
    return f"tl.inline_asm_elementwise({given}, dtype=tl.int32, is_pure=False, pack={SCORES})"


def _value(i: int) -> str:
    return f"${SCORES + i}"


def _add(i: int, value: str, condition: str) -> str:
    return f"{condition}red.relaxed.gpu.global.add.f32 [${2 * SCORES + i}], {value};"


def _found(i: int) -> str:
    return f"setp.ne.b32 found, ${3 * SCORES + i}, 0;"


def _sums(group: list[int], checked: bool) -> list[str]:
    """The sum of a group goes to where its first score belongs."""
    first, *others = group
    lines = ["{", ".reg .f32 total;", ".reg .pred found;", f"mov.f32 total, {_value(first)};"]
    lines += [f"add.rn.f32 total, total, {_value(i)};" for i in others]
    lines += [_found(first)] * checked
    return [*lines, _add(first, "total", "@found " * checked), "}"]


def _pairs(group: list[int], checked: bool) -> list[str]:
    """The same if all of them have one entry; otherwise each goes to its own."""
    first, *others = group
    lines = ["{", ".reg .f32 total;", ".reg .pred found, same, alone;"]
    lines.append(f"mov.f32 total, {_value(first)};")
    for n, i in enumerate(others):
        condition = ("setp.eq.and.u64", ", same") if n else ("setp.eq.u64", "")
        lines.append(f"{condition[0]} same, ${2 * SCORES + first}, ${2 * SCORES + i}{condition[1]};")
        lines.append(f"add.rn.f32 total, total, {_value(i)};")
    lines.append(f"selp.f32 total, total, {_value(first)}, same;")
    lines += [_found(first)] * checked
    lines.append(_add(first, "total", "@found " * checked))
    for i in others:
        lines += [_found(i), "not.pred alone, same;", "and.pred alone, alone, found;"] if checked else []
        lines.append(_add(i, _value(i), "@alone " if checked else "@!same "))
    return [*lines, "}"]
