"""The benchmark's bookkeeping: cases, counts, floors, documents. Nothing here depends on how fast a machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from gdpa.bench import contenders, documents, eager, lengths, memory, passes, rates, report, run, suite, timing
from gdpa.bench.cases import SMALL_CASES, Case, call, dense, make_inputs
from gdpa.bench.functions import benchmark_function
from gdpa.cli import main

CPU = torch.device("cpu")
RATES = rates.Rates(matmul_tflops=0.1, copy_tb_s=0.01)
FASTEST = timing.Effort(warmup_ms=0, measure_ms=0, least=1, most=1)
NAMES_OF_RECORD = {
    "case", "function", "backend", "pass", "median_ms", "p20_ms", "p80_ms", "tflops", "floor_fraction", "peak_mib",
}  # fmt: skip


# ---- cases -----------------------------------------------------------------------------------------------------------
def test_suite_has_the_cases_it_promises() -> None:
    names = suite.suite_names()
    assert len(names) == len(set(names))
    wanted = {f"{family}-{n}" for family in ("self", "uniform", "jagged") for n in (256, 512, 1024, 2048)}
    wanted |= {f"kv{k}-q{n}" for k in (128, 256) for n in (256, 512, 1024, 2048)}
    wanted |= {"pma", "lognormal085", "lognormal16", "zipf", "bimodal", "causal-2048", "window128-2048"}
    assert set(names) == wanted | {f"{name}-d64" for name in wanted}


@pytest.mark.parametrize("scale", [suite.FULL_SCALE, suite.CPU_SCALE], ids=["full", "cpu"])
def test_every_case_is_well_formed(scale: suite.Scale) -> None:
    for case in suite.find(["*"], scale):
        assert case.name
        assert len(case.len_q) == len(case.len_k)
        assert case.packed_q or len(set(case.len_q)) == 1
        assert case.packed_k or len(set(case.len_k)) == 1
        if not case.name.startswith("cpu-"):
            assert (len(case.len_q), case.heads) == (scale.batch, 4)
            assert case.d == (64 if case.name.endswith("-d64") else 128)


def test_cases_are_what_their_names_say() -> None:
    assert set(suite.make("self-512").len_q) == {512}
    uniform = suite.make("uniform-1024")
    assert (uniform.packed_q, uniform.packed_k, set(uniform.len_k)) == (True, False, {1024})
    short = suite.make("kv256-q1024-d64")
    assert (short.len_q[0], short.len_k[0], short.d) == (1024, 256, 64)
    pma = suite.make("pma")
    assert (pma.shared, pma.packed_k, pma.len_q[0]) == (True, True, 64)
    assert suite.make("causal-2048").band == (None, 0)
    assert suite.make("window128-2048").band == (128, 128)
    assert suite.make("window128-2048", suite.CPU_SCALE).band == (16, 16)
    assert suite.make("self-1368").len_q[0] == 1368  # any length may be asked for


def test_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark case is called 'nonsense'"):
        suite.find(["nonsense"], suite.CPU_SCALE)


def test_globs_select_each_case_once() -> None:
    found = [case.name for case in suite.find(["kv*-q256", "kv128-*", "cpu-dense"], suite.CPU_SCALE)]
    assert len(found) == len(set(found))
    assert {"kv128-q256", "kv256-q256", "kv128-q2048-d64", "cpu-dense"} <= set(found)


def test_lengths_are_reproducible_and_shaped_as_said() -> None:
    n = 1152
    drawn = {
        "uniform": lengths.uniform(n, 2048),
        "lognormal085": lengths.lognormal(n, 4096, 0.85, 1024),
        "lognormal16": lengths.lognormal(n, 4096, 1.6, 256),
        "zipf": lengths.zipf(n, 4096),
        "bimodal": lengths.bimodal(n, 2048),
    }
    means = {name: sum(values) / n for name, values in drawn.items()}
    assert 980 < means["uniform"] < 1070
    assert 1200 < means["lognormal085"] < 1500
    assert 550 < means["lognormal16"] < 800
    assert 0.03 < sum(length == 0 for length in drawn["zipf"]) / n < 0.07
    assert not any(256 < length < 1792 for length in drawn["bimodal"])
    for name, values in drawn.items():
        assert max(values) <= 4096
        assert name == "zipf" or min(values) >= 1
    assert lengths.uniform(n, 2048) == drawn["uniform"]
    assert lengths.uniform(4, 100, seed=1) != lengths.uniform(4, 100, seed=2)


# ---- counts ----------------------------------------------------------------------------------------------------------
def test_flops_and_bytes() -> None:
    case = dense("x", 3, 10, 20, heads=2, d=8)
    assert passes.flops(case, "fwd") == 4 * 3 * 2 * 10 * 20 * 8
    assert passes.flops(case, "bwd") == 2.5 * passes.flops(case, "fwd")
    assert passes.flops(case, "both") == 3.5 * passes.flops(case, "fwd")
    q, k = 3 * 2 * 10 * 8, 3 * 2 * 20 * 8
    assert case.bytes(2) == 2 * (q + 2 * k + q)
    assert case.bytes(2, backward=True) == 2 * (2 * (q + 2 * k) + q)
    assert passes.results_bytes(case, "fwd", 2) == 2 * q
    assert passes.results_bytes(case, "both", 2) == 2 * (2 * q + 2 * k)


def test_flops_count_only_pairs_in_the_band() -> None:
    full, causal = suite.make("self-2048"), suite.make("causal-2048")
    assert causal.flops() / full.flops() == pytest.approx(0.5, rel=1e-3)
    packed = Case("x", (3, 0, 5), (3, 2, 5), heads=1, d=8, packed_q=True, packed_k=True, causal=True)
    assert packed.pairs == 6 + 0 + 15


def test_shared_queries_are_read_once() -> None:
    case = suite.make("pma")
    assert case.elements()["q"] == 64 * 4 * 128
    assert case.elements()["out"] == 1152 * 64 * 4 * 128


def test_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    machine = rates.Rates(matmul_tflops=100.0, copy_tb_s=1.0)
    assert rates.floor_ms(flops=1e12, traffic=1e6, rates=machine) == pytest.approx(10.0)
    assert rates.floor_ms(flops=1e9, traffic=1e9, rates=machine) == pytest.approx(1.0)
    case = suite.make("self-512")
    both = passes.floor(case, "both", 2, machine)
    assert both == pytest.approx(passes.floor(case, "fwd", 2, machine) + passes.floor(case, "bwd", 2, machine))


# ---- measuring -------------------------------------------------------------------------------------------------------
def test_measuring_needs_no_terminal_library() -> None:
    """A machine that only has torch can still be measured from a script."""
    code = "import sys; sys.modules.update(rich=None, click=None, matplotlib=None); "
    code += "import gdpa.check, gdpa.bench.run, gdpa.bench.function_errors"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_timing_tells_a_sleep() -> None:
    found = timing.time_ms(lambda: time.sleep(0.002), "cpu", timing.Effort(0, 20, 5, 10))
    assert 2.0 <= found.p20_ms <= found.median_ms <= found.p80_ms
    assert 5 <= found.repeats <= 10


def test_percentiles() -> None:
    found = timing.summarise([float(i) for i in range(11)])
    assert (found.p20_ms, found.median_ms, found.p80_ms) == (2.0, 5.0, 8.0)
    assert timing.summarise([3.0]).median_ms == 3.0


def test_rates_are_positive_and_typical_is_the_median() -> None:
    found = rates.measure_rates(CPU, torch.float32, FASTEST)
    assert found.matmul_tflops > 0
    assert found.copy_tb_s > 0
    readings = [rates.Rates(1.0, 9.0), rates.Rates(5.0, 1.0), rates.Rates(2.0, 3.0)]
    assert rates.typical(readings) == rates.Rates(2.0, 3.0)


def test_peak_memory_of_a_fresh_process() -> None:
    """Eager holds several Lq x Lk matrices: more than one, and not those of another case or of the inputs."""
    cases = (dense("x", 1, 128, 128, heads=1, d=16), dense("y", 1, 2048, 2048, heads=1, d=16))
    small, large = memory.cpu_peaks(memory.Request(cases, "eager", "gelu", (), "float32"))
    matrix = 2048 * 2048 * 4
    assert small["both"] < matrix < large["fwd"] <= large["both"] < 10 * matrix


@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_eager_contender_computes_the_same(case: Case) -> None:
    """What is timed beside gdpa is the same function of the same data, padded or sequence by sequence."""
    x = make_inputs(case, torch.float64)
    want = call(case, x, "sigmoid", backend="reference")
    torch.testing.assert_close(eager.by_sequence(case, x, torch.sigmoid), want)
    prepared = contenders.Eager().prepare(case, x, benchmark_function("sigmoid"))
    assert isinstance(prepared, contenders.Prepared)
    out = prepared.forward()  # (B, H, longest, Dv)
    if case.varlen:
        out = torch.cat([o[:, :n].transpose(0, 1) for o, n in zip(out, case.len_q, strict=True)])
    torch.testing.assert_close(out, want)


def test_contenders_of_a_cpu() -> None:
    assert [c.name for c in contenders.contenders(CPU, torch.float32)] == ["cpu", "eager"]
    assert [c.name for c in contenders.contenders(CPU, torch.float32, ("reference",))] == ["reference"]
    with pytest.raises(ValueError, match="'sdpa-cudnn' is unknown here"):
        contenders.contenders(CPU, torch.float32, ("sdpa-cudnn",))


def test_eager_declines_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "free_memory", lambda device: 1000)
    case = dense("x", 1, 64, 64, heads=1, d=8)
    reason = contenders.Eager().prepare(case, make_inputs(case), benchmark_function("relu"))
    assert isinstance(reason, str)
    assert "GiB" in reason


@pytest.mark.parametrize("name", ["causal-2048", "self-512", "pma", "window128-2048", "jagged-256"])
def test_sdpa_takes_only_what_it_can(name: str) -> None:
    """The softmax columns, here by the math backend, on dense cases without a window."""
    case = replace(suite.make(name, suite.Scale(2, 32)), d=16)
    prepared = contenders.Sdpa("math", torch.nn.attention.SDPBackend.MATH).prepare(
        case, make_inputs(case), benchmark_function("relu")
    )
    assert isinstance(prepared, str) == (name not in ("causal-2048", "self-512"))


# ---- documents -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def document() -> dict:
    """A real run of two tiny cases, without the time that memory and rates take."""
    plan = run.make_plan(("self-256", "pma-d64"), (benchmark_function("softplus_squared"),), device=CPU, effort=FASTEST)
    plan = replace(plan, cases=tuple(replace(c, len_q=c.len_q[:2], len_k=c.len_k[:2]) for c in plan.cases))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "cpu_peaks", lambda request: [{"fwd": 2**20, "bwd": 2**21, "both": 2**21}])
        patch.setattr(run, "measure_rates", lambda device, dtype: RATES)
        return run.run(plan)


def test_records_have_what_readers_need(document: dict) -> None:
    assert len(document["records"]) == 2 * 2 * 3
    for record in document["records"]:
        assert set(record) >= NAMES_OF_RECORD
        assert record["function"] == "softplus_squared"
        assert record["floor_fraction"] > 0
        assert record["p20_ms"] <= record["median_ms"] <= record["p80_ms"]
    assert {r["pass"] for r in document["records"]} == {"fwd", "bwd", "both"}
    assert {"date", "commit", "versions", "gpu", "cpu", "clocks", "rates", "cases", "dtype"} <= set(document)
    assert len(document["rates"]["readings"]) == 3
    assert document["cases"]["self-256"]["gflop"]["fwd"] > 0


def test_document_survives_its_file(document: dict, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    run.save(document, path)
    assert run.read(path) == document
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a result"):
        run.read(path)


def test_reports(document: dict, tmp_path: Path) -> None:
    assert report.table(document).row_count == 4
    text = report.markdown(document, ["self-*"])
    assert "self-256" in text
    assert "pma" not in text
    faster = json.loads(json.dumps(document))
    for record in faster["records"]:
        record["floor_fraction"] *= 2
    assert report.comparison(faster, document).row_count == len(document["records"])


def test_plot(document: dict, tmp_path: Path) -> None:
    from gdpa.bench.plot import plot

    pytest.importorskip("matplotlib")
    softmax = [
        {**r, "function": "softmax", "backend": "sdpa-cudnn"} for r in document["records"] if r["backend"] == "eager"
    ]
    assert "plot.png" in plot({**document, "records": document["records"] + softmax}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_tables_in_documents(document: dict, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    run.save(document, tmp_path / "results" / "x.json")
    page = tmp_path / "README.md"
    page.write_text(
        "a\n<!-- table: bench results/x.json self-* -->\nold\n<!-- end -->\nb\n<!-- table: builtins -->\n<!-- end -->\n"
    )
    assert documents.refresh(page) == 2
    text = page.read_text()
    assert "old" not in text
    assert "| self-256 | softplus_squared | cpu |" in text
    assert "| `gelu` |" in text
    assert documents.refresh(page) == 2
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no table to fill"):
        documents.refresh(page)


# ---- the command -----------------------------------------------------------------------------------------------------
def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def test_bench_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures, writes JSON and PNG, shows it again, and compares."""
    monkeypatch.setattr(run, "measure_rates", lambda device, dtype: RATES)
    out = tmp_path / "new.json"
    result = bench("--quick", "--case", "kv128-q256-d64", "--function", "relu", "--backend", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "kv128-q256-d64" in result.output
    assert out.with_suffix(".png").exists()
    again = bench("--from", str(out), "--compare", str(out))
    assert again.exit_code == 0
    assert "1.00x" in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "nonsense"), "no benchmark case"),
        (("--function", "nonsense"), "is no built-in"),
        (("--function", "relu", "--params", "1"), "takes 0 params"),
        (("--backend", "nonsense"), "unknown here"),
    ],
)
def test_bench_refuses_in_words(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = bench("--quick", "--out", str(tmp_path / "x.json"), *arguments)
    assert result.exit_code == 1
    assert message in result.output


def test_bench_lists_cases() -> None:
    result = bench("--list")
    assert result.exit_code == 0
    for word in ("self-N", "lognormal085", "cpu-long", "B 1152"):
        assert word in result.output
