"""Shifts s + x + y (see shift.py) where x belongs to the query and y to the key: Triton code of x and y alone.

Hopper's forward lets the tensor cores add such a bias, as more columns of the queries and keys that they multiply
(backends/hopper/forward/bias.py). ALiBi is one, a slope times i - j being a i - a j, and so are tables by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gdpa.functions.emission.code import literal
from gdpa.functions.graph import Arg, Graph, Ref
from gdpa.functions.passes.simplify import Builder, value_of
from gdpa.functions.places.emit import Writer, function, leaf, start, unpacked
from gdpa.functions.places.program import KEY, QUERY, Program
from gdpa.functions.places.terms.distances import COUNTED, by_sides
from gdpa.functions.places.terms.opening import opened
from gdpa.functions.traced import Shift

Body = Callable[..., list[str]]  # emission.source.body_lines
Sides = frozenset[str]


def bias_source(name: str, shift: Shift, program: Program, body: Body) -> str:
    """The functions {name}_bias_of_queries and {name}_bias_of_keys, of (params, at, spot, ends) where positions are
    those of a tile's queries or keys alone. Their results are float32, numbers if they are the same for all rows. No
    source if some term of the shift belongs to both, if both have terms that are no distance, or if the key has none:
    terms of queries alone are two registers of a consumer's thread, and cheaper there."""
    program, sums = opened(program, value_of(shift.joint))
    both = halves(program, sums)
    if both is None:
        return ""
    return "".join(
        _half_source(f"{name}_bias_of_{rows}", half, program, body)
        for rows, half in zip(("queries", "keys"), both, strict=True)
    )


def halves(program: Program, sums: Graph) -> tuple[Graph, Graph] | None:
    """The terms of the opened sum that belong to queries, and all others but the score; None if there is no source.
    Behind the leaves both take the two of COUNTED."""
    sides = [program.sides[o.index] if isinstance(o, Ref) else Sides() for o in program.graph.outputs]
    rewritten = by_sides(program, sums, [len(one) for one in sides])
    if rewritten is not None:
        sums, sides = rewritten[0], [*sides, Sides([QUERY]), Sides([KEY])]
    found: list[tuple[Arg, bool]] = []  # and whether they are subtracted
    n = len(program.graph.outputs)  # of inputs, behind the score and before COUNTED

    def collect(a: Arg, negative: bool) -> None:
        node = sums.nodes[a.index] if isinstance(a, Ref) else None
        if node is not None and node.op in ("add", "sub", "neg"):
            last = negative != (node.op != "add")
            for arg, sign in zip(node.args, (negative, last) if len(node.args) == 2 else (last,), strict=True):
                collect(arg, sign)
        else:
            found.append((a, negative))

    def sides_of(a: Arg) -> Sides:
        if not isinstance(a, Ref):
            return Sides()
        node = sums.nodes[a.index]
        if node.op == "input":
            return sides[int(node.args[0]) - 1]  # type: ignore[arg-type]
        return Sides().union(*map(sides_of, node.args))

    collect(sums.outputs[0], False)
    terms = [(a, negative) for a, negative in found if 0 not in inputs_of(sums, a)]
    of_queries, others = ([t for t in terms if (QUERY in sides_of(t[0])) == side] for side in (True, False))
    if any(len(sides_of(a)) == 2 for a, _ in terms) or not any(KEY in sides_of(a) for a, _ in others):
        return None
    # Where terms of 1e6 cancel, the accumulator of a tensor core loses more than the definition. Distances are near 0.
    far = [sides_of(a) for a, _ in terms if not any(number > n for number in inputs_of(sums, a))]
    if Sides([QUERY]) in far and Sides([KEY]) in far:
        return None
    return _total(sums, of_queries), _total(sums, others)


def inputs_of(sums: Graph, a: Arg) -> set[int]:
    """The inputs that a value depends on; the score is 0."""
    if not isinstance(a, Ref):
        return set()
    node = sums.nodes[a.index]
    return {int(node.args[0])} if node.op == "input" else set().union(*(inputs_of(sums, x) for x in node.args))  # type: ignore[arg-type]


def _total(sums: Graph, terms: list[tuple[Arg, bool]]) -> Graph:
    b = Builder(sums.n_inputs)
    values: list[Arg] = []
    for node in sums.nodes:
        args = [values[a.index] if isinstance(a, Ref) else a for a in node.args]
        values.append(b.input(int(args[0])) if node.op == "input" else b(node.op, *args))  # type: ignore[arg-type]
    total: Arg | None = None
    for a, negative in terms:
        value = values[a.index] if isinstance(a, Ref) else a
        if total is None:
            total = b("neg", value) if negative else value
        else:
            total = b("sub" if negative else "add", total, value)
    return b.finish((0.0 if total is None else total,))


def _half_source(name: str, half: Graph, program: Program, body: Body) -> str:
    writer, outputs = Writer(program, unpacked(), small="spot[5].small", own=True), program.graph.outputs
    leaves = []
    for number in sorted({int(n.args[0]) - 1 for n in half.nodes if n.op == "input"}):  # type: ignore[arg-type]
        leaves.append(f"param{number} = {_leaf(writer, outputs, number)}")  # inputs after s are called so
    lines = [*start(program), *writer.lines, *leaves, *body(half, "accurate", ("bias",), spread=False)]
    return function(f"{name}(given)", [*lines, "return bias"])


def _leaf(writer: Writer, outputs: Sequence[Arg], number: int) -> str:
    if number >= len(outputs):
        return COUNTED[number - len(outputs)]
    output = outputs[number]
    return leaf(writer, output) if isinstance(output, Ref) else literal(float(output))
