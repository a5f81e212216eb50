"""The text of emitted functions: Triton's own code, operation by operation, and around blocks of PTX."""

from __future__ import annotations

import torch

from gdpa.functions.emission.code import TL_DTYPE, expression, literal
from gdpa.functions.emission.ptx import Block, assemble_products
from gdpa.functions.graph import Arg, Graph, Node, Ref
from gdpa.functions.passes.products import Products
from gdpa.functions.passes.stretch import Stretch, has_rest_of_params
from gdpa.functions.traced import TracedFunction

PRODUCTS = "s, dp, ds_scale, params, skips"  # arguments


def packed_functions(
    act: TracedFunction, dtype: torch.dtype, forward: Block | None, backward: Block | None,
    stretch: Stretch | None = None, more: float = 1.0,
) -> str:  # fmt: skip
    """The functions whose results are rounded, as PTX if there is a block of it, the first of them one of scores
    stretched by ``stretch``, and ``more``, if there is one. No ``{name}_forward`` is one of these names, whatever a
    user calls a function."""
    kind = TL_DTYPE[dtype]
    kinds = ", ".join([kind] + ["tl.float32"] * (1 + act.n_params))
    inputs = ", ".join(["s", *(f"params[{i}]" for i in range(act.n_params))])
    grads = ["p", "ds", *(f"dparam{i}" for i in range(act.n_params))]
    rounded = ", ".join([f"p.to({kind})", *grads[1:]])
    if forward is not None and stretch is not None:
        unpack = [f"param{i} = params[{i}]" for i in range(act.n_params)]
        lines, takes = stretched_lines(stretch, more)
        alone = [*unpack, *lines, returned_block(forward, takes, "tl.float32")]
    else:
        alone = rounded_lines(act, dtype, forward)
    if backward is not None:
        both = [returned_block(backward, inputs, f"({kinds})")]
    else:
        both = [f"{', '.join(grads)} = {act.name}_backward(s, params)", f"return {rounded}"]
    return function_text("forward_packed", alone) + function_text("backward_packed", both)


def products_functions(act: TracedFunction, dtype: torch.dtype, level: str, split: Products | None) -> str:
    """The functions of a backward with params (see passes/products.py); without ``split`` there is no block of PTX."""
    n, kind, prescaled = act.n_params, TL_DTYPE[dtype], dtype == torch.float16
    terms = [f"term{i}" for i in range(n)]
    results = f"return {', '.join(['p', 'ds', *terms])}"
    if split is None:
        gains = ["1.0"] * n
        lines = [
            f"p, ds, {', '.join(terms)} = {act.name}_backward(s, params)",
            f"p, ds = p.to({kind}), (dp * ds{' * ds_scale' if prescaled else ''}).to({kind})",
            *(f"{term} = dp * {term}" for term in terms), results,
        ]  # fmt: skip
        return function_text("products", lines, PRODUCTS) + function_text(
            "gains", [f"return ({', '.join(gains)},)"], "params"
        )
    block = assemble_products(split.code, level, dtype)
    assert block is not None  # it has the operations of the block of value and derivatives
    inputs = ", ".join(["s", *(f"params[{i}]" for i in range(n)), "dp", *["ds_scale"] * prescaled, "skips"])
    kinds = ", ".join([kind, kind, *["tl.float32"] * n])
    lines = [
        f"p, ds, {', '.join(terms)} = {block_call(block, inputs, f'({kinds})')}",
        *(f"{term} = {term} * {times}" for term, times in zip(terms, split.times, strict=True) if times), results,
    ]  # fmt: skip
    unpack = [f"param{i} = params[{i}]" for i in range(n)]
    names = tuple(f"gain{i}" for i in range(n))
    gains = [*unpack, *body_lines(split.gains, "accurate", names, spread=False), f"return ({', '.join(names)},)"]
    return function_text("products", lines, PRODUCTS) + function_text("gains", gains, "params")


def rounded_lines(act: TracedFunction, dtype: torch.dtype, block: Block | None) -> list[str]:
    """Lines of a function that returns the value in ``dtype``, or in float32 if ``block`` leaves the rounding."""
    kind = TL_DTYPE[dtype]
    if block is None:
        return [f"return {act.name}_forward(s, params).to({kind})"]
    inputs = ", ".join(["s", *(f"params[{i}]" for i in range(act.n_params))])
    return [returned_block(block, inputs, "tl.float32" if block.votes else kind)]


def stretched_lines(stretch: Stretch, more: float) -> tuple[list[str], str]:
    """What composed code takes, and the lines that make it."""
    lines, takes = [], ["s"]
    if stretch.factor is not None:
        lines += [
            *body_lines(stretch.factor, "accurate", ("factor",), spread=False),
            f"factor = factor * {literal(more)}",
        ]
        takes.append("factor")
    if stretch.rest is not None and has_rest_of_params(stretch):
        lines += body_lines(stretch.rest, "accurate", ("rest",), spread=False)
        takes.append("rest")
    return lines, ", ".join(takes)


def function_text(name: str, lines: list[str], arguments: str = "s, params") -> str:
    return "\n".join(["", "", "@triton.jit", f"def {name}({arguments}):", *(f"    {line}" for line in lines)]) + "\n"


def returned_block(block: Block, inputs: str, dtype: str) -> str:
    return f"return {block_call(block, inputs, dtype)}"


def block_call(block: Block, inputs: str, dtype: str) -> str:
    text = block.text.replace("\n", "\\n")
    call = f'"{text}", "{block.constraints}", [{inputs}], dtype={dtype}, is_pure={not block.votes}, pack={block.pack}'
    return f"tl.inline_asm_elementwise({call})"


def usual_functions(
    act: TracedFunction, level: str, factors: tuple[float, float], forward: list[str], backward: list[str], target: str
) -> str:  # fmt: skip
    """The three functions as one module's text; ``factors`` are what the last two leave to the kernel."""
    # Triton 3.6's interpreter takes a comparison of scalars for a float when it meets one of tensors.
    spread = "tl.broadcast_to(params[{0}], s.shape)" if target == "interpret" else "params[{0}]"
    unpack = [f"param{i} = {spread.format(i)}" for i in range(act.n_params)]
    loads = [f"tl.load(p_params + {i} * stride + h)" for i in range(act.n_params)]
    grads = ", ".join(["p", "ds", *(f"dparam{i}" for i in range(act.n_params))])
    rest, backward_rest = (
        "" if factor == 1.0 else f" / {factor!r}: the kernel multiplies what comes of it by that" for factor in factors
    )
    functions = [
        (
            "load_params(p_params, stride, h)",
            "The params of head h.",
            [f"return ({', '.join(loads)},)" if loads else "return 0"],
        ),
        (f"{act.name}_forward(s, params)", f"p = f(s){rest}", [*unpack, *forward, "return p"]),
        (
            f"{act.name}_backward(s, params)",
            f"f(s) and its derivatives{backward_rest}",
            [*unpack, *backward, f"return {grads}"],
        ),
    ]
    text = [f"# {act.name} ({level} maths), graph {act.key}"]
    for head, doc, lines in functions:
        text += ["", "", "@triton.jit", f"def {head}:", f'    """{doc}"""', *(f"    {line}" for line in lines)]
    return "\n".join(text) + "\n"


def body_lines(graph: Graph, level: str, names: tuple[str, ...], spread: bool = True) -> list[str]:
    """One assignment per node, then the outputs under ``names``, with the shape of the scores if they are ``spread``
    to it."""

    def show(a: Arg) -> str:
        if isinstance(a, Ref):
            n = graph.nodes[a.index]
            return _input_name(n) if n.op == "input" else f"x{a.index}"
        return literal(a)

    lines = [f"x{i} = {expression(n, level, show)}" for i, n in enumerate(graph.nodes) if n.op != "input"]
    per_score = _depends_on_score(graph)
    for name, output in zip(names, graph.outputs, strict=True):
        # An output of constants or params still has the shape of the scores.
        varies = not spread or (isinstance(output, Ref) and output.index in per_score)
        lines.append(f"{name} = {show(output)}" if varies else f"{name} = maths.spread({show(output)}, s)")
    return lines


def _depends_on_score(graph: Graph) -> set[int]:
    """The nodes that vary from score to score; the others are scalars on the device."""
    found: set[int] = set()
    for i, n in enumerate(graph.nodes):
        if n.args[:1] == (0,) if n.op == "input" else any(isinstance(a, Ref) and a.index in found for a in n.args):
            found.add(i)
    return found


def _input_name(node: Node) -> str:
    return "s" if node.args[0] == 0 else f"param{int(node.args[0]) - 1}"  # type: ignore[arg-type]
