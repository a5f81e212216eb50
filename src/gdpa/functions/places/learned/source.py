"""Gradients of tables, as Triton code: what backward kernels add to the entries that pairs have looked up.

Where an index does not depend on both query and key, a tile adds up its pairs first, and then adds once per row, column
or tile; otherwise once per pair. Hopper's kernels know which scores a thread holds, and add up those of one entry in a
thread and a warp first (additions.py).
"""

from __future__ import annotations

from gdpa.functions.graph import Node, Ref
from gdpa.functions.places.emit import Writer, either, function, leaf, start, unpacked
from gdpa.functions.places.learned.additions import Additions
from gdpa.functions.places.program import QUERY, Program


def learn_source(name: str, n_params: int, program: Program, learned: tuple[int, ...]) -> str:
    """{name}_learn: ``results`` are those of backward; queries lie along Q_AXIS of the tile."""
    writer = Writer(program, unpacked())
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
def learn_shifted_source(name: str, program: Program, learned: tuple[int, ...], constant: set[int]) -> str:
    """{name}_learn_shifted: the same for a sum of the score and leaves, whose gradient is ds, (keys x queries), 0 for
    pairs that are not seen. ``constant``: the leaves by which the sum's derivative is a constant; others may have no
    value for such pairs."""

    def write(writer: Writer) -> list[str]:
        leaves = "".join(f"{leaf(writer, o)}, " for o in program.graph.outputs)
        body = [f"shift = {name}_shift(ds, ({leaves.strip()}))"]
        for output in learned:
            index, _, entries = _lookup(program, output)
            product = f"ds * shift[{1 + output}]"
            value = product if output in constant else f"tl.where(ds == 0, 0.0, {product})"
            body.append(Additions(program, writer, index, value, entries).call)
        return [*writer.lines, *body]

    lines = either(program, write, [], columns=program)
    n = len(start(program))
    return function(
        f"{name}_learn_shifted(ds, given)", [*lines[:n], "gradients = spot[4].gradients", *lines[n:], "return ds"]
    )
