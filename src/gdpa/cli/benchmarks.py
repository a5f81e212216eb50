"""`gdpa bench`: time, memory and error of gdpa beside what people would use instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gdpa.cli.claiming import claim_bench
from gdpa.cli.options import DTYPES, Numbers, Specs, device_named, given, only_with, refusals_as_errors, together
from gdpa.commands.folding import show_table
from gdpa.commands.terminal import make_console, progress

if TYPE_CHECKING:
    from gdpa.bench.kernels.run import Plan


BENCH = Path("gdpa-bench")  # where results go unless --out says otherwise


@click.command(short_help="Time and memory of all contenders, and the roofline.")
@click.option("--case", "cases", multiple=True, metavar="GLOB", help="Names or globs, repeatable; --list shows them.")
@click.option("--function", "functions", multiple=True, metavar="SPEC", type=Specs("softplus_squared"),
              help="Built-in, softplus_squared, module:function or file.py:function; repeatable. Default: gelu_tanh, "
                   "and others on a few cases (--list).")  # fmt: skip
@click.option("--params", type=Numbers(), multiple=True, callback=together,
              help="Values of the functions' params: 0.5,2 or repeated; with --function.")  # fmt: skip
@click.option("--backend", "only", multiple=True, metavar="NAME",
              help="Contenders, repeatable: a backend of gdpa, eager, eager-compiled, flex-log, gdpa-softmax, "
                   "sdpa-cudnn, sdpa-flash, torch-varlen, flash-attn. With --model: see --model --list.")  # fmt: skip
@click.option("--layout", "layouts", multiple=True, metavar="NAME",
              help="How gdpa is given q, k, v: heads, rows, packed, packed-nohint, qkv; repeatable. Default: the "
                   "case's own, and all on a few cases (--list).")  # fmt: skip
@click.option("--precision", "precisions", multiple=True, metavar="NAME",
              help="exact or fast, for gdpa; repeatable. Default: exact, and fast where it differs.")  # fmt: skip
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: the GPU if there is one.")
@click.option("--dtype", type=DTYPES, help="Default: bfloat16 on a GPU, float32 on a CPU.")
@click.option("--quick", is_flag=True,
              help="A handful of cases (unless --case names some), one function (unless --function does), few "
                   "repeats: minutes rather than an hour.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=BENCH / "bench.json",
              show_default="gdpa-bench/bench.json, with --model model.json, --host host.json, and so on",
              help="The result as JSON; the plots and the HTML report go beside it.")  # fmt: skip
@click.option("--from", "stored", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE.json", help="Measure nothing: show this result, and redraw its plots and HTML report, "
              "beside it or --out. Several runs of one machine and commit become one result, in --out.")  # fmt: skip
@click.option("--compare", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="OLD.json",
              help="Also show the change of every record against this result.")  # fmt: skip
@click.option("--readme", "documents", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              metavar="FILE.md", help="Measure nothing: rebuild this document's tables from result files.")  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List and describe the cases.")
@click.option("--model", "whole", is_flag=True,
              help="Measure training steps of whole models instead, against padded ones (--model --list).")  # fmt: skip
@click.option("--host", is_flag=True,
              help="Measure the host time of repeated small calls instead, beside SDPA and FlexAttention.")  # fmt: skip
@click.option("--positions", "placed", is_flag=True,
              help="Measure functions of positions and tables, and masks, instead, beside FlexAttention.")  # fmt: skip
@click.option("--data", "reading", is_flag=True,
              help="Measure rows per second from CSV and Parquet files to batches instead.")  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1),
              help="With --data: rows of the files, 200,000 by default and 20,000 with --quick. --case csv or --case "
                   "parquet reads only those.")  # fmt: skip
@click.option("--compile/--no-compile", "compiled", default=None,
              help="With --model: whether all contenders are compiled. Default: on a GPU.")  # fmt: skip
@click.pass_context
def bench(
    ctx: click.Context, cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...],
    only: tuple[str, ...], layouts: tuple[str, ...], precisions: tuple[str, ...], device: str | None, dtype: str | None,
    quick: bool, out: Path, stored: tuple[Path, ...], compare: Path | None, documents: tuple[Path, ...], listing: bool,
    whole: bool, host: bool, placed: bool, reading: bool, rows: int | None, compiled: bool | None,
) -> None:  # fmt: skip
    """Time and memory of every contender on every case, beside the roofline of this machine."""
    params = params or ()
    told = given(ctx, "out")
    kinds = {"model": whole, "host": host, "positions": placed, "data": reading}
    kind = next((name for name, chosen in kinds.items() if chosen), "bench")
    out = out if told else BENCH / f"{kind}.json"
    if not (listing or documents or stored):
        claim_bench(out, kind, told)
    from gdpa.bench import join, results
    from gdpa.bench.kernels import run

    if listing:
        only_with(ctx, "--list", ("--model",))
        return _list_cases(whole)
    if documents:
        only_with(ctx, "--readme", ())
        return _refresh_documents(documents)
    if host:
        only_with(ctx, "--host", ("--device", "--quick", "--out"))
        return _bench_host(device, quick, out)
    if placed:
        only_with(ctx, "--positions", ("--case", "--device", "--quick", "--out"))
        return _bench_positions(cases, device, quick, out)
    if reading:
        only_with(ctx, "--data", ("--quick", "--out", "--rows", "--case"))
        return _bench_data(rows, cases, quick, out)
    if rows is not None:
        raise click.UsageError("--rows only applies with --data")
    if stored:
        only_with(ctx, "--from", ("--compare", "--out"))
    elif whole:
        return _bench_models(ctx, cases, functions, params, only, device, dtype, compiled, quick, out)
    elif compiled is not None:
        raise click.UsageError("--compile and --no-compile only apply with --model")
    with refusals_as_errors():
        old = results.read(compare) if compare is not None else None  # before a long run, not after it
        if stored:
            found = [results.read(path) for path in stored]
            document = found[0] if len(found) == 1 else join.joined(found)
            beside = len(stored) == 1 and not told
            out = stored[0] if beside else out
            claim_bench(out, document.get("kind", "bench"), told or beside)
            if not beside:
                results.save(document, out)
            return _show(document, out, old)
        plan = _plan(cases, functions, params, only, device, dtype, quick, layouts, precisions)
        with progress(make_console(), run.steps(plan), "benchmark") as step:
            document = run.run(plan, step, lambda so_far: results.save(so_far, out))
    results.save(document, out)
    _show(document, out, old)


def _plan(
    cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...], only: tuple[str, ...],
    device: str | None, dtype: str | None, quick: bool, layouts: tuple[str, ...], precisions: tuple[str, ...],
) -> Plan:  # fmt: skip
    import torch

    from gdpa.bench.functions import benchmark_function
    from gdpa.bench.kernels.run import make_plan

    if params and not functions:
        raise click.UsageError("--params needs --function: the default functions have none")
    place = device_named(device)
    chosen = tuple(benchmark_function(spec, params) for spec in functions)
    kind = getattr(torch, dtype) if dtype else None
    return make_plan(cases, chosen, only, place, kind, quick, layouts, precisions)


def _bench_models(
    ctx: click.Context, cases: tuple[str, ...], functions: tuple[str, ...], params: tuple[float, ...],
    only: tuple[str, ...], device: str | None, dtype: str | None, compiled: bool | None, quick: bool, out: Path,
) -> None:  # fmt: skip
    from gdpa.bench.models import command as model_command

    options = ("--case", "--function", "--params", "--backend", "--device", "--dtype", "--compile", "--quick", "--out")
    only_with(ctx, "--model", options)
    with refusals_as_errors():
        model_command.measure(
            make_console(), out, cases, functions, params, only, device, dtype, compiled, quick
        )  # fmt: skip


def _bench_host(device: str | None, quick: bool, out: Path) -> None:
    import torch

    from gdpa.bench import results
    from gdpa.bench.host import calls as host

    console = make_console()
    where = device_named(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with progress(console, host.steps(where), "host") as step:
        document = host.run(where, quick, step)
    results.save(document, out)
    host.show(console, document)
    console.print(f"result: {out}", markup=False)


def _bench_positions(cases: tuple[str, ...], device: str | None, quick: bool, out: Path) -> None:
    import torch

    from gdpa.bench import results
    from gdpa.bench.places import report, run

    console = make_console()
    where = device_named(device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with refusals_as_errors():
        chosen = run.find(cases)
    with progress(console, run.steps(chosen), "positions") as step:
        document = run.run(chosen, where, quick, step)
    results.save(document, out)
    report.show(console, document)
    console.print(f"result: {out}", markup=False)


def _bench_data(rows: int | None, cases: tuple[str, ...], quick: bool, out: Path) -> None:
    from gdpa.bench import results
    from gdpa.bench.host import data_rates

    console = make_console()
    with refusals_as_errors():
        names = data_rates.sources(cases)
    with progress(console, data_rates.steps(names), "data") as step:
        document = data_rates.run(rows or (data_rates.FEW_ROWS if quick else data_rates.ROWS), names, step)
    results.save(document, out)
    data_rates.show(console, document)
    console.print(f"result: {out}", markup=False)


def _list_cases(whole: bool) -> None:
    from gdpa.bench.contenders import layouts
    from gdpa.bench.kernels import coverage, suite

    console = make_console()
    if whole:
        from gdpa.bench.models import command as model_command

        return model_command.list_all(console)
    console.print(suite.__doc__, markup=False)
    console.print("by default on a GPU: " + " ".join(suite.names()), markup=False)
    console.print("by default on a CPU: " + " ".join(suite.names(on_cpu=True)), markup=False)
    console.print("with --quick: " + " ".join(suite.QUICK_NAMES), markup=False)
    console.print(f"functions: {coverage.EVERYWHERE} on every case", markup=False)
    for name, cases in coverage.ELSEWHERE.items():
        console.print(f"    {name} on {', '.join(cases)} (not with --quick)", markup=False)
    console.print(
        f"layouts: the case's own; all on {', '.join(coverage.LAYOUT_CASES)} (not with --quick)", markup=False
    )
    console.print(layouts.__doc__, markup=False)


def _refresh_documents(paths: tuple[Path, ...]) -> None:
    from gdpa.bench.report.documents import refresh

    for path in paths:
        with refusals_as_errors():
            click.echo(f"{path}: {refresh(path)} tables")


def _show(document: dict[str, Any], path: Path, old: dict[str, Any] | None) -> None:
    """The result in ``path`` on the terminal, and its plots and report beside it."""
    from gdpa.bench import conclusion
    from gdpa.bench.report import tables
    from gdpa.bench.report.page import write_page
    from gdpa.bench.report.plot import plot

    console = make_console()
    if "kind" in document or "kind" in (old or {}):
        if old is not None:
            raise click.UsageError("--compare compares results of kernels, not those of --model, --host and so on")
        return _show_kind(document, path)
    show_table(console, tables.table(document), 3)
    for line in tables.skipped(document):
        console.print(line, style="dim", markup=False)
    for line in conclusion.lines(document):
        console.print(line, style="yellow" if line.startswith("Warning") else None, markup=False)
    if old is not None:
        show_table(console, tables.comparison(document, old), 4)
    console.print(f"result: {path}", markup=False)
    console.print(plot(document, path.with_suffix(".png")), markup=False)
    console.print(write_page(document, path.with_suffix(".html")), markup=False)


def _show_kind(document: dict[str, Any], path: Path) -> None:
    """A result that is not of kernels."""
    from gdpa.bench.host import calls as host
    from gdpa.bench.host import data_rates
    from gdpa.bench.models import command as model_command
    from gdpa.bench.places import report, run

    console = make_console()
    shown = {host.KIND: host.show, data_rates.KIND: data_rates.show, run.KIND: report.show}
    if document["kind"] in shown:
        return shown[document["kind"]](console, document)
    return model_command.show(console, document, path)
