"""The benchmark's bookkeeping: cases, counts, floors, plans, the command. Nothing depends on how fast a machine is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from gdpa.bench import rates, timing
from gdpa.bench.contenders.contender import NoRoom, Prepared
from gdpa.bench.functions import benchmark_function
from gdpa.bench.kernels import coverage, memory, passes, run, suite
from gdpa.cli import main
from gdpa.data import lengths
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, dense
from processes import elsewhere

CPU = torch.device("cpu")
RATES = rates.Rates(matmul_tflops=0.1, copy_tb_s=0.01)
FASTEST = timing.Effort(warmup_ms=0, measure_ms=0, least=1, most=1)


# ---- cases -----------------------------------------------------------------------------------------------------------
def test_suite_has_the_cases_it_promises() -> None:
    names = suite.suite_names()
    assert len(names) == len(set(names))
    wanted = {f"{family}-{n}" for family in ("self", "uniform", "jagged") for n in (256, 512, 1024, 2048)}
    wanted |= {f"kv{k}-q{n}" for k in (128, 256) for n in (256, 512, 1024, 2048)}
    wanted |= {"pma", "lognormal085", "lognormal16", "zipf", "bimodal", "causal-2048", "window128-2048"}
    wanted |= {"full-lognormal085", "self-8192", "self-32768", "causal-8192"}
    assert set(names) == wanted | {f"{name}-d64" for name in wanted}


@pytest.mark.parametrize("scale", [suite.FULL_SCALE, suite.CPU_SCALE], ids=["full", "cpu"])
def test_every_case_is_well_formed(scale: suite.Scale) -> None:
    for case in suite.find(["*"], scale):
        assert case.name
        assert len(case.len_q) == len(case.len_k)
        assert case.packed_q or len(set(case.len_q)) == 1
        assert case.packed_k or len(set(case.len_k)) == 1
        if not case.name.startswith("cpu-"):
            assert (len(case.len_q), case.heads) == (suite._batch(scale, case.len_q[0] * scale.divisor), 4)
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


def test_long_cases_have_the_same_work() -> None:
    batches = {f"{family}-{n}": b for family in ("self", "causal") for n, b in ((8192, 16), (16384, 4), (32768, 1))}
    for name, batch in batches.items():
        case = suite.make(name)
        assert (len(case.len_q), case.len_q[0]) == (batch, int(name.split("-")[1]))
    assert suite.make("self-8192").flops() == suite.make("self-32768").flops()
    assert len(suite.make("self-65536").len_q) == 1
    assert (len(suite.make("self-8192", suite.CPU_SCALE).len_q), len(suite.make("self-7000").len_q)) == (16, 1152)


def test_a_full_case_has_the_mean_length_of_its_jagged_one() -> None:
    for name in ("lognormal085", "zipf", "jagged-512"):
        jagged, full = suite.make(f"{name}-d64"), suite.make(f"full-{name}-d64")
        assert not full.varlen
        assert len(full.len_q) == len(jagged.len_q)
        assert full.len_q[0] == full.len_k[0] == round(sum(jagged.len_q) / len(jagged.len_q))
    with pytest.raises(ValueError, match="no benchmark case"):
        suite.make("full-self-512")  # it is full already


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
    code += "import gdpa.commands.verification, gdpa.bench.kernels.run, gdpa.bench.kernels.function_errors"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_timing_tells_a_sleep() -> None:
    found = timing.time_ms(lambda: time.sleep(0.002), "cpu", timing.Effort(0, 20, 5, 10))
    assert 2.0 <= found.p20_ms <= found.median_ms <= found.p80_ms
    assert 5 <= found.repeats <= 10


def test_a_stopwatch_takes_its_share_in_every_turn() -> None:
    """The first turn also warms up; a long call's first calls count."""
    calls: list[int] = []

    def clock(fn: Callable[[], None], n: int) -> list[float]:
        calls.append(n)
        return [10.0] * n

    watch = timing.Stopwatch(clock, timing.Effort(warmup_ms=30, measure_ms=90, least=3, most=30), turns=3)
    for _ in range(3):
        watch.turn(lambda: None)
    assert calls == [1, 1, 1, 1, 3, 1, 3, 1, 3]
    assert watch.timing().repeats == 9
    calls.clear()
    watch = timing.Stopwatch(clock, timing.Effort(warmup_ms=1, measure_ms=90, least=3, most=30), turns=3)
    for _ in range(3):
        watch.turn(lambda: None)
    assert calls == [1, 1, 1, 1, 3, 3]
    assert watch.timing().repeats == 9
    calls.clear()
    watch = timing.Stopwatch(clock, timing.Effort(warmup_ms=1, measure_ms=5, least=3, most=30), turns=3)
    for _ in range(3):
        watch.turn(lambda: None)
    assert calls == [1, 1, 0, 1, 1]  # of very long ones there are as few as may be
    assert watch.timing().repeats == 3


def test_percentiles() -> None:
    found = timing.summarise([float(i) for i in range(11)])
    assert (found.p20_ms, found.median_ms, found.p80_ms) == (2.0, 5.0, 8.0)
    assert timing.summarise([3.0]).median_ms == 3.0


def test_rates_are_positive_and_the_best_count() -> None:
    found = rates.measure_rates(CPU, torch.float32, FASTEST)
    assert found.matmul_tflops == max(found.products.values()) > 0
    assert len(found.products) == 3
    assert found.copy_tb_s > 0
    readings = [rates.Rates(1.0, 9.0), rates.Rates(5.0, 1.0), rates.Rates(2.0, 3.0)]
    assert rates.best(readings) == rates.Rates(5.0, 9.0)


def test_peak_memory_of_a_fresh_process() -> None:
    """Eager holds several Lq x Lk matrices: more than one, and not those of another case or of the inputs."""
    cases = (dense("x", 1, 128, 128, heads=1, d=16), dense("y", 1, 2048, 2048, heads=1, d=16))
    small, large = memory.cpu_peaks(memory.Request(cases, "eager", "gelu", (), "float32"))
    matrix = 2048 * 2048 * 4
    assert small["both"] < matrix < large["fwd"] <= large["both"] < 10 * matrix


# ---- the plan --------------------------------------------------------------------------------------------------------
def test_defaults_put_one_function_everywhere_and_others_on_a_few_cases() -> None:
    assert coverage.functions("jagged-512", quick=False) == ("gelu_tanh",)
    everything = ("gelu_tanh", "gelu", "silu", "relu", "softplus_squared")
    for name in ("self-2048", "kv256-q1024", "self-2048-d64"):
        assert coverage.functions(name, quick=False) == everything
        assert coverage.functions(name, quick=True) == ("gelu_tanh",)
    known = suite.suite_names()
    assert all(case in known for cases in coverage.ELSEWHERE.values() for case in cases)


def test_what_compiles_for_long_is_left_out_in_words_unless_named() -> None:
    small, large = suite.make("self-512-d64"), suite.make("self-512")
    assert coverage.left_out(large, "eager-compiled", quick=False) is None
    assert "--backend eager-compiled" in (coverage.left_out(small, "eager-compiled", quick=False) or "")
    assert "--quick" in (coverage.left_out(large, "eager-compiled", quick=True) or "")
    assert coverage.left_out(small, "triton", quick=True) is None
    assert "illegal access" in (coverage.left_out(suite.make("jagged-1024"), "flex-log", quick=False) or "")


def test_jobs_of_a_plan() -> None:
    plan = run.make_plan(("self-2048", "self-1024"), device=CPU, quick=False, chosen_precisions=("exact",))
    jobs = [str(job) for job in replace(plan, contenders=(*plan.contenders, Fake("kernel", "softmax"))).jobs()]
    assert len(jobs) == (4 + 5 + 5 + 1) + (1 + 1 + 1)  # four more layouts and five functions, and one function
    assert jobs.count("self-2048 softmax kernel heads") == 1
    quick = run.make_plan(device=CPU, quick=True)
    assert [case.name for case in quick.cases] == list(suite.QUICK_NAMES)
    assert len(quick.jobs()) == len(suite.QUICK_NAMES) * len(quick.contenders)


class Fake:
    """A contender that does what a test wants."""

    def __init__(self, name: str, function: str | None = None, why: str = "", error: Exception | None = None) -> None:
        self.name, self.function, self.why, self.error, self.seen = name, function, why, error, []

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        self.seen.append(x)
        if self.error is not None:
            raise self.error
        return self.why or Prepared(lambda: x.q * 2, (x.q,))


def tiny_plan(*found: Fake, cases: int = 2) -> run.Plan:
    small = tuple(dense(f"case{i}", 1, 4, 4, heads=1, d=8) for i in range(cases))
    return run.Plan(small, (benchmark_function("relu"),), found, CPU, torch.float32, FASTEST)


@pytest.fixture
def no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_rates", lambda device, dtype, effort: RATES)
    monkeypatch.setattr(memory, "cpu_peaks", lambda request: None)


@pytest.mark.usefixtures("no_rates")
def test_inputs_are_made_once_per_case() -> None:
    first, second = Fake("first"), Fake("second", why="not today")
    labels: list[str] = []
    plan = tiny_plan(first, second)
    found = run.run(plan, labels.append)
    assert [a is b for a, b in zip(first.seen, second.seen, strict=True)] == [True, True]
    assert first.seen[0] is not first.seen[1]
    assert len(labels) == run.steps(plan)
    assert [label for label in labels if "rates" in label] == [labels[0], labels[4], labels[-1]]
    assert [reading["when"] for reading in found["rates"]["readings"]] == ["start", "middle", "end"]
    assert [s["why"] for s in found["skipped"]] == ["not today"] * 2
    assert all(record["peak_mib"] is None for record in found["records"])
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("no_rates")
def test_an_error_ends_the_run_but_keeps_what_was_measured() -> None:
    """A contender that raises is one of gdpa's backends: the others turn failures into reasons themselves. What the
    same case had given before it is kept too."""
    kept: list[dict] = []
    plan = tiny_plan(Fake("fine"), cases=1)
    plan = replace(plan, cases=(*plan.cases, dense("case9", 1, 4, 4, heads=1, d=8)))
    broken = Fake("broken", error=RuntimeError("illegal memory access"))
    broken.prepare = lambda case, x, f: Fake("", error=broken.error if case.name == "case9" else None).prepare(
        case, x, f
    )
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.run(replace(plan, contenders=(*plan.contenders, broken)), keep=kept.append)
    names = {(record["case"], record["backend"]) for record in kept[-1]["records"]}
    assert names == {("case0", "fine"), ("case0", "broken"), ("case9", "fine")}
    assert all(record["floor_fraction"] > 0 for record in kept[-1]["records"])


@pytest.mark.usefixtures("no_rates")
def test_contenders_are_timed_in_turns() -> None:
    seen: list[str] = []

    def fake(name: str) -> Fake:
        made = Fake(name)

        def prepare(case: Case, x: Inputs, function: Loaded) -> Prepared:
            return Prepared(lambda: (seen.append(name), x.q * 2)[1], (x.q,))

        made.prepare = prepare
        return made

    run.run(tiny_plan(fake("a"), fake("b"), cases=1))
    order = [name for i, name in enumerate(seen) if i == 0 or seen[i - 1] != name]
    assert order == ["a", "b", "a", "b"]  # a, b, then b, a, then a, b


@pytest.mark.usefixtures("no_rates")
def test_what_has_no_room_beside_others_is_timed_alone() -> None:
    class Room:
        held = 0

    def fake(name: str, greedy: bool) -> Fake:
        made = Fake(name)

        def prepare(case: Case, x: Inputs, function: Loaded) -> Prepared:
            class Held:
                def __init__(self) -> None:
                    Room.held += 1

                def __call__(self) -> torch.Tensor:
                    if greedy and Room.held > 1:
                        raise torch.OutOfMemoryError("CUDA out of memory.")
                    return x.q * 2

                def __del__(self) -> None:
                    Room.held -= 1

            return Prepared(Held(), (x.q,))

        made.prepare = prepare
        return made

    found = run.run(tiny_plan(fake("modest", False), fake("greedy", True), fake("other", False), cases=1))
    assert found["skipped"] == []
    assert {r["backend"] for r in found["records"]} == {"modest", "greedy", "other"}
    cautious = fake("cautious", False)
    prepare = cautious.prepare
    cautious.prepare = lambda case, x, f: NoRoom("1 GiB is free") if Room.held else prepare(case, x, f)
    found = run.run(tiny_plan(fake("modest", False), cautious, cases=1))
    assert {r["backend"] for r in found["records"]} == {"modest", "cautious"}


@pytest.mark.usefixtures("no_rates")
def test_running_out_of_memory_is_a_reason() -> None:
    found = run.run(tiny_plan(Fake("huge", error=torch.OutOfMemoryError("CUDA out of memory.\nmore")), cases=1))
    assert found["skipped"][0]["why"] == "out of memory: CUDA out of memory."


# ---- the command -----------------------------------------------------------------------------------------------------
def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def test_bench_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures, writes JSON and PNG, shows it again, and compares."""
    monkeypatch.setattr(run, "measure_rates", lambda device, dtype, effort: RATES)
    monkeypatch.setattr(memory, "cpu_peaks", lambda request: elsewhere(memory._answer, request))  # imports nothing
    out = tmp_path / "new.json"
    result = bench(
        "--quick", "--case", "kv128-q256-d64", "--function", "relu", "--backend", "cpu", "--layout", "heads",
        "--precision", "exact", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "kv128-q256-d64" in result.output
    for suffix in (".png", ".html"):
        out.with_suffix(suffix).unlink()
    again = bench("--from", str(out), "--compare", str(out))
    assert again.exit_code == 0
    assert "1.00x" in again.output
    assert out.with_suffix(".png").exists()
    assert out.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "nonsense"), "no benchmark case"),
        (("--function", "nonsense"), "is not a built-in"),
        (("--function", "relu", "--params", "1"), "takes 0 params"),
        (("--backend", "nonsense"), "unknown here"),
        (("--layout", "nonsense"), "layout 'nonsense' is unknown here; known: heads, rows, packed"),
        (("--precision", "nonsense"), "precision 'nonsense' is unknown here; known: exact"),
    ],
)
def test_bench_refuses_in_words(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = bench("--quick", "--out", str(tmp_path / "x.json"), *arguments)
    assert result.exit_code in (1, 2)  # 2: before torch is imported
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--list", "--quick"), "--quick does not apply with --list"),
        (("--readme", __file__, "--out", "x.json"), "--out does not apply with --readme"),
        (("--from", __file__, "--case", "self-512"), "--case does not apply with --from"),
        (("--from", __file__, "--quick"), "--quick does not apply with --from"),
        (("--params", "1"), "--params needs --function"),
        *([] if torch.cuda.is_available() else [(("--device", "cuda"), "no GPU here")]),
    ],
)
def test_bench_refuses_options_it_would_ignore(arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_bench_reads_the_old_result_before_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "run", lambda *arguments: pytest.fail("it measured first"))
    (tmp_path / "old.json").write_text("[]")
    result = bench("--quick", "--compare", str(tmp_path / "old.json"))
    assert result.exit_code == 1
    assert "not a result" in result.output


def test_bench_lists_cases() -> None:
    result = bench("--list")
    assert result.exit_code == 0
    for word in ("self-N", "lognormal085", "cpu-long", "B 1152", "full-X", "relu on self-2048", "packed-nohint"):
        assert word in result.output
