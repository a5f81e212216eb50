"""`gdpa tune`: what is stored and looked up, which configurations are legal, and how the best is chosen. No GPU."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import gdpa
from gdpa import backends
from gdpa.backends import tuning
from gdpa.backends.hopper import config as hopper
from gdpa.backends.triton import config as triton
from gdpa.backends.tuning import ShapeClass
from gdpa.bench.kernels import suite
from gdpa.bench.tune import jobs, search, select
from gdpa.bench.tune.select import Effort, Job, Measured
from gdpa.cli import main
from gdpa.functions.activation import from_name
from gdpa.masks.band import Band
from gdpa.problem import Operands, Problem, make_problem
from gdpa.testing import cases

pytestmark = pytest.mark.usefixtures("large_batch")  # small ones have tiles of their own, whatever is tuned

GPU, DEVICE = "NVIDIA H200", torch.device("cuda", 0)
SHORT = ShapeClass("hopper", "fwd", "bfloat16", 128, "short")
OTHER = replace(hopper.FORWARD[128], ping_pong=not hopper.FORWARD[128].ping_pong)  # legal, not the default


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory and a GPU to look up; the file that gdpa would read."""
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    tuning.forget()
    yield tmp_path / "cache" / "gdpa" / "tuning.json"
    tuning.forget()


def make_entry(config: Any, default: Any = hopper.FORWARD[128]) -> dict[str, Any]:
    found = Measured("kv256-q1024", "gelu_tanh", 1152, default, {default: [[2.0], [2.2]]}, {})
    if config is not None:
        found.times[config] = [[1.0], [1.1]]
    found.refused[replace(default, stages=3)] = "does not fit"
    return {**search.entry([found], config, {}), "date": "2026-01-01"}


def store(file: Path, config: Any = OTHER, shape: ShapeClass = SHORT, key: str | None = None) -> tuning.Document:
    document = tuning.new()
    tuning.put(document, key or tuning.machine_key(GPU), shape, make_entry(config))
    tuning.write(document, file)
    return document


def problem(
    keys: int = 256, d: int = 128, dtype: torch.dtype = torch.bfloat16, device: torch.device = DEVICE
) -> Problem:
    q = torch.empty(2, 1, 8, d, dtype=dtype)
    k = torch.empty(2, 1, keys, d, dtype=dtype)
    return replace(make_problem(Operands(q, k, k), (from_name("gelu"),), 1.0, 1.0, Band()), device=device)


# ---- classes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "name"), [(0, "short"), (256, "short"), (257, "medium"), (1024, "medium"), (1025, "long")]
)
def test_key_classes(keys: int, name: str) -> None:
    assert tuning.key_class(keys) == name


def test_classes_are_written_and_read_back() -> None:
    assert str(SHORT) == "hopper/fwd/bfloat16/128/short"
    assert tuning.parse(str(SHORT)) == SHORT
    for wrong in ("", "hopper/fwd/bfloat16/128", "hopper/both/bfloat16/128/short", "hopper/fwd/bfloat16/x/short"):
        with pytest.raises(ValueError, match="is not a class"):
            tuning.parse(wrong)


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_case_has_the_class_of_its_problem(name: str) -> None:
    """Plans are made from cases, lookups from problems."""
    backend = jobs.tunable(name, (9, 0))
    config: Any = {"hopper": hopper, "triton": triton}[name]
    for case_name in ("kv256-q1024", "self-512-d64", "jagged-1024", "lognormal085-d64", "pma"):
        case = suite.make(case_name, suite.Scale(4, 1))
        function = search.benchmark_function("gelu_tanh")
        x = jobs.operands(case, jobs.make_inputs(case, torch.bfloat16), function)
        made = jobs.problem_of(case, x, function)
        columns = (config.width if name == "hopper" else config.widest)(made)
        for which in tuning.PASSES:
            assert backend.class_of(case, which, torch.bfloat16) == tuning.shape_class(name, which, made, columns)


# ---- legality --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", tuning.PASSES)
@pytest.mark.parametrize("columns", [64, 128])
def test_hopper_candidates_fit_and_include_the_default(which: str, columns: int) -> None:
    shape = ShapeClass("hopper", which, "bfloat16", columns, "long")
    found = hopper.candidates(shape)
    assert (hopper.FORWARD if which == "fwd" else hopper.BACKWARD)[columns] in found
    assert len(found) == len(set(found)) > 1
    assert all(hopper.shared_memory(which, c, columns) <= 227 * 1024 for c in found)


def test_hopper_stages_stop_where_shared_memory_does() -> None:
    def stages(which: str, columns: int, **fixed: int) -> set[int]:
        found = hopper.candidates(ShapeClass("hopper", which, "float16", columns, "short"))
        return {c.stages for c in found if all(getattr(c, name) == value for name, value in fixed.items())}

    assert stages("fwd", 128, block_n=128) == {2}
    assert stages("fwd", 128, block_n=64) == {2, 3, 4}
    assert stages("fwd", 64, block_n=128) == {2, 3, 4, 5}
    assert stages("fwd", 64, block_n=64) == {2, 3, 4, 5, 6}
    assert stages("bwd", 64) == {2}
    assert stages("bwd", 128) == {2}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_triton_candidates_include_the_default(capability: tuple[int, int], d: int) -> None:
    for keys in (256, 2048):
        made = problem(keys, d)
        for which, default in (("fwd", triton.forward_default), ("bwd", triton.backward_default)):
            shape = tuning.shape_class("triton", which, made, triton.widest(made))
            assert default(made, capability) in triton.candidates(capability)(shape)


# ---- lookup ----------------------------------------------------------------------------------------------------------
def test_a_stored_choice_is_used_for_its_class_only(file: Path) -> None:
    store(file)
    assert hopper.forward_config(problem()) == OTHER
    assert hopper.forward_config(problem(keys=257)) == hopper.FORWARD[128]
    assert hopper.forward_config(problem(keys=40)) == hopper.FORWARD_BY_64[128]  # of the class, but fewer than measured
    assert hopper.forward_config(problem(d=64)) == hopper.FORWARD[64]
    assert hopper.forward_config(problem(dtype=torch.float16)) == hopper.FORWARD[128]
    assert hopper.forward_config(problem(device=torch.device("cpu"))) == hopper.FORWARD[128]
    assert hopper.backward_config(problem()) == hopper.BACKWARD[128]


def test_triton_looks_up_as_well(file: Path) -> None:
    made, capability = problem(), (9, 0)
    shape = tuning.shape_class("triton", "fwd", made, 128)
    stored = next(c for c in triton.candidates(capability)(shape) if c != triton.forward_default(made, capability))
    store(file, stored, shape)
    assert triton.forward_config(made, capability) == stored
    assert triton.backward_config(made, capability) == triton.backward_default(made, capability)


def test_a_choice_that_a_problem_cannot_use_is_left_to_others(file: Path) -> None:
    """Three consumers of the forward have no registers for masks."""
    store(file, hopper.FORWARD_BY_THREE, replace(SHORT, columns=64))
    made = problem(d=64)
    assert hopper.forward_config(made) == hopper.FORWARD_BY_THREE
    assert hopper.forward_config(replace(made, band=Band(None, 0))) == hopper.FORWARD[64]


@pytest.mark.parametrize("wrong", ["gpu", "triton", "gdpa"])
def test_other_machines_and_versions_do_not_count(file: Path, wrong: str) -> None:
    parts = {"gpu": GPU, "triton": tuning.triton_version(), "gdpa": gdpa.__version__, wrong: "another"}
    store(file, key=f"{parts['gpu']}, Triton {parts['triton']}, gdpa {parts['gdpa']}")
    assert hopper.forward_config(problem()) == hopper.FORWARD[128]
    assert "has nothing for" in tuning.status(DEVICE)


def test_where_the_default_won_it_is_used(file: Path) -> None:
    store(file, None)
    assert hopper.forward_config(problem()) == hopper.FORWARD[128]
    assert "0 of 1 measured classes" in tuning.status(DEVICE)


def test_the_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(file)
    reads = []
    real = tuning.read
    monkeypatch.setattr(tuning, "read", lambda path: reads.append(path) or real(path))
    for keys in (100, 200, 300, 2000):
        hopper.forward_config(problem(keys))
        hopper.backward_config(problem(keys))
    assert reads == [file]


def test_the_environment_names_another_file_or_none(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path / "mine.json")
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    assert hopper.forward_config(problem()) == OTHER
    monkeypatch.setenv(tuning.VARIABLE, "off")
    tuning.forget()
    assert tuning.path() is None
    assert hopper.forward_config(problem()) == hopper.FORWARD[128]
    assert "GDPA_TUNING=off" in tuning.status(DEVICE)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "missing.json"))
    tuning.forget()
    with pytest.warns(UserWarning, match="missing.json is ignored: there is no such file"):
        assert hopper.forward_config(problem()) == hopper.FORWARD[128]


def test_few_queries_have_tiles_of_their_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(file)
    monkeypatch.setattr(hopper, "AT_ONCE", 128)
    assert hopper.forward_config(problem()) == replace(hopper.FORWARD[128], block_m=64, ping_pong=False)


def test_without_a_file_nothing_is_said(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper.forward_config(problem()) == hopper.FORWARD[128]
    assert not file.exists()


# ---- files that cannot be used ---------------------------------------------------------------------------------------
def broken(change: Callable[[dict[str, Any]], object]) -> str:
    """A good file after ``change`` of its only entry."""
    document = tuning.new()
    tuning.put(document, tuning.machine_key(GPU), SHORT, make_entry(OTHER))
    change(document["machines"][tuning.machine_key(GPU)]["classes"][str(SHORT)])
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "not a result of `gdpa tune`"),
        ('{"format": 99, "machines": {}}', "not a result of `gdpa tune`"),
        ('{"format": 1}', "no machines"),
        ('{"format": 1, "machines": {"a": {}}}', "has no classes"),
        ('{"format": 1, "machines": {"a": {"classes": {"b": {}}}}}', "is not a class"),
        (lambda: broken(lambda entry: entry.pop("config")), "has no config"),
        (lambda: broken(lambda entry: entry.update(measurements=3)), "has no measurements"),
        (lambda: broken(lambda entry: entry["config"].update(colour=1)), "unknown fields colour"),
        (lambda: broken(lambda entry: entry["config"].pop("stages")), "missing fields stages"),
        (
            lambda: broken(lambda entry: entry["config"].update(stages=7)),
            "not a configuration that these kernels can run",
        ),
        (
            lambda: broken(lambda entry: entry["config"].update(stages="2")),
            "not a configuration that these kernels can run",
        ),
    ],
)
def test_unusable_files_are_ignored_with_one_warning(file: Path, text: Any, why: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text if isinstance(text, str) else text())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert hopper.forward_config(problem()) == hopper.FORWARD[128]
            assert hopper.forward_config(problem(keys=2000)) == hopper.FORWARD[128]
    (warning,) = caught
    assert str(file) in str(warning.message)
    assert why in str(warning.message)


def test_writing_replaces_the_whole_file_and_keeps_other_entries(file: Path) -> None:
    store(file)
    document = tuning.read(file)
    tuning.put(document, tuning.machine_key(GPU), replace(SHORT, keys="long"), make_entry(None))
    tuning.put(document, "another GPU", SHORT, make_entry(None))
    tuning.write(document, file)
    assert tuning.read(file) == document
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


# ---- selection, with a clock of our own ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Toy:
    """A configuration that takes ``ms``, and computes ``value``."""

    ms: float
    value: float = 1.0


DEFAULT = Toy(10.0)


@dataclass
class Machine:
    """Runs toys on a clock that slows down with every call, as a GPU does that gets warm."""

    drift: float = 0.0
    now: float = 0.0
    slower: float = 1.0

    def job(self, case: str = "case", cost: Callable[[Toy], float] = lambda toy: toy.ms) -> Job:
        out = torch.ones(8, dtype=torch.bfloat16)

        def run(toy: Toy) -> None:
            if toy.value < 0:
                raise RuntimeError("ptxas fatal\nmore")
            out.fill_(toy.value)
            self.now += cost(toy) * self.slower
            self.slower *= 1 + self.drift

        return Job(case, "gelu", 4, DEFAULT, run, {"out": out})

    def clock(self, fn: Callable[[], object], n: int) -> list[float]:
        times = []
        for _ in range(n):
            start = self.now
            fn()
            times.append(self.now - start)
        return times


def measured(machine: Machine, *toys: Toy, **kwargs: Any) -> Measured:
    job = machine.job(**kwargs)
    return select.measure(job, (DEFAULT, *toys), machine.clock, Effort(5, 20.0, 3), lambda label: None)


def confirmed(toy: Toy) -> None:
    return None


def test_the_fastest_wins_if_it_gains_enough() -> None:
    assert select.choose([measured(Machine(), Toy(9.0), Toy(9.5))], confirmed) == (Toy(9.0), {})
    assert select.choose([measured(Machine(), Toy(9.9))], confirmed) == (None, {})  # 1 %
    assert select.choose([measured(Machine(), Toy(9.79))], confirmed) == (Toy(9.79), {})
    assert select.choose([measured(Machine())], confirmed) == (None, {})


def test_drift_cancels() -> None:
    """Every call is 0.3 % slower than the one before: over a run 30 %, a multiple of the gain that is asked for."""
    warming = Machine(drift=0.003)
    found = measured(warming, *(Toy(10.0 + 1e-6 * n) for n in range(6)), Toy(9.5))
    assert warming.slower > 1.3
    assert found.gain(Toy(9.5)) == pytest.approx(10 / 9.5, rel=2e-3)
    assert select.ranking([found]) == [Toy(9.5)]
    still = measured(Machine(drift=0.003), Toy(10.0 + 1e-6))
    assert select.ranking([still]) == []


def test_rounds_go_through_everyone_and_back() -> None:
    order: list[str] = []
    times = select.in_turns(order.append, ["a", "b", "c"], Machine().clock, Effort(2, 0.0, 1))
    assert order[6:] == ["a", "b", "c", "c", "b", "a"] * 2
    assert all([len(turns) for turns in rounds] == [2, 2] for rounds in times.values())


def test_no_case_may_pay_for_another() -> None:
    uneven = Toy(8.0)
    first = measured(Machine(), uneven, Toy(9.5))
    second = measured(Machine(), uneven, Toy(9.5), cost=lambda toy: 10.5 if toy == uneven else toy.ms)
    assert select.choose([first, second], confirmed) == (Toy(9.5), {})


def test_wrong_and_failing_candidates_are_refused_in_words() -> None:
    wrong, failing, nothing = Toy(1.0, 1.5), Toy(1.0, -1.0), Toy(1.0, float("nan"))
    found = measured(Machine(), wrong, failing, nothing, Toy(9.0))
    assert "out is wrong: largest error 0.5" in found.refused[wrong]
    assert found.refused[failing] == "RuntimeError: ptxas fatal"
    assert "out is wrong" in found.refused[nothing]
    assert select.choose([found], confirmed) == (Toy(9.0), {})


def test_one_refusal_is_enough() -> None:
    """Right on one case and wrong on another: out."""
    toy = Toy(5.0)
    first, second = measured(Machine(), toy), measured(Machine())
    second.refused[toy] = "out is wrong"
    assert select.choose([first, second], confirmed) == (None, {})


def test_rounding_is_no_disagreement() -> None:
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    other = exact * (1 + 2**-9)
    assert select.disagreement({"dq": other.bfloat16()}, {"dq": exact.bfloat16()}) is None
    missing = exact.clone()
    missing[exact.abs().argmax()] = 0.0
    assert select.disagreement({"dq": missing.bfloat16()}, {"dq": exact.bfloat16()}) is not None


def test_the_winner_must_be_confirmed() -> None:
    found = [measured(Machine(), Toy(5.0), Toy(8.0))]
    assert select.choose(found, lambda toy: "wrong on edges" if toy == Toy(5.0) else None) == (
        Toy(8.0),
        {Toy(5.0): "wrong on edges"},
    )


def test_a_gpu_that_fails_for_good_ends_the_run() -> None:
    job, broken_for_good = Machine().job(), []

    def run(toy: Toy) -> None:
        if toy.value < 0:
            broken_for_good.append(toy)
        if broken_for_good:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(ValueError, match="broke the GPU's state"):
        select.refusals(replace(job, run=run), [Toy(1.0, -1.0)])


def test_candidates_that_do_not_fit_are_not_run() -> None:
    job = replace(Machine().job(), fits=lambda toy: toy.ms > 5)
    assert select.refusals(job, [Toy(1.0)]) == {
        Toy(1.0): "does not fit case: shared memory, or registers for its masks or function"
    }


def test_the_entry_holds_every_number() -> None:
    found = measured(Machine(), Toy(9.0), Toy(1.0, 2.0))
    entry = search.entry([found], Toy(9.0), {})
    assert entry["config"] == asdict(Toy(9.0))
    assert entry["gain"] == pytest.approx(10 / 9)
    assert [m["config"]["ms"] for m in entry["measurements"]] == [10.0, 9.0]
    assert entry["measurements"][0]["repeats"] == 20
    assert len(entry["refused"]) == 1


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_every_class_is_planned_and_quick_is_less() -> None:
    backend = jobs.tunable("hopper", (9, 0))
    every, quick = search.targets(backend, (), False), search.targets(backend, (), True)
    assert len({t.shape for t in every}) == len(every) == 2 * 2 * 2 * 3  # dtypes, passes, head dimensions, key classes
    assert all(len(t.cases) == 2 for t in every)
    assert len(quick) == 12
    assert all(len(t.cases) == 1 for t in quick)
    (only_fwd, only_bwd) = search.targets(backend, ("self-512",), True)
    assert {only_fwd.shape.keys, only_bwd.shape.keys} == {"medium"}


def test_batches_shrink_until_they_fit() -> None:
    assert len(jobs.fitting("self-2048", 2, 200 * 2**30).len_q) == 1152
    small = jobs.fitting("self-2048", 2, 8 * 2**30)
    assert jobs.memory_needed(small, 2) <= 4 * 2**30
    assert len(jobs.fitting("self-2048", 2, 0).len_q) == 1


def toy_plan(machine: Machine, *toys: Toy) -> search.Plan:
    """Two classes of toys."""
    backend = jobs.Tunable(
        "hopper", hopper.padded, lambda shape: (DEFAULT, *toys), lambda p, which: DEFAULT, lambda p, which, toy: True
    )
    targets = search.targets(backend, ("self-256", "kv128-q256"), True)
    functions = (search.benchmark_function("silu"),)
    return search.Plan(backend, targets, functions, DEVICE, Effort(2, 10.0, 1), machine.clock)


@pytest.fixture
def toy_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose every case takes as long as its toy says; on edge cases toys faster than 6 ms are wrong."""
    machine = Machine()
    monkeypatch.setattr(search, "make_job", lambda backend, which, case, *rest: machine.job(case.name))

    def edges(*args: Any) -> Job:
        job = machine.job("edges")
        out = job.results["out"]
        return replace(job, run=lambda toy: out.fill_(2.0 if toy.ms < 6 else 1.0))

    monkeypatch.setattr(search, "edges_job", edges)
    monkeypatch.setattr(search.machine, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(search.machine, "clocks", lambda: None)
    monkeypatch.setattr(search, "make_plan", lambda *args: toy_plan(machine, Toy(5.0), Toy(8.0), Toy(7.0, 3.0)))
    return machine


def test_the_whole_command_on_toys(toy_machine: Machine, file: Path) -> None:
    result = gdpa_command("tune", "--quick")
    assert result.exit_code == 0, result.output
    assert "[16/16]" in result.output  # two classes of two cases: three checks and the timing each
    for word in ("ms 8.0", "1.250x", "refused: ms 5.0: out is wrong", "out is wrong: largest error 2", str(file)):
        assert word in result.output, word
    classes = tuning.read(file)["machines"][tuning.machine_key(GPU)]["classes"]
    assert list(classes) == ["hopper/fwd/bfloat16/128/short", "hopper/bwd/bfloat16/128/short"]
    for entry in classes.values():
        assert entry["config"] == asdict(Toy(8.0))
        assert entry["versions"]["gdpa"] == gdpa.__version__
        assert entry["gpu"] == GPU
        assert entry["date"]


def test_a_run_that_is_cut_short_keeps_its_classes(toy_machine: Machine, file: Path) -> None:
    def step(label: str) -> None:
        if "/bwd/" in label:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.run(toy_plan(toy_machine, Toy(8.0)), file, step)
    assert len(tuning.read(file)["machines"][tuning.machine_key(GPU)]["classes"]) == 1


def test_another_file_needs_the_variable(toy_machine: Machine, tmp_path: Path) -> None:
    result = gdpa_command("tune", "--out", str(tmp_path / "mine.json"))
    assert f"GDPA_TUNING={tmp_path / 'mine.json'}" in result.output


# ---- jobs ------------------------------------------------------------------------------------------------------------
class CpuLaunch:
    """The CPU backend with the signatures of a launch module."""

    def __init__(self) -> None:
        self.backend, self.configs = backends.get("cpu"), []

    def forward(self, problem: Problem, x: Operands, out: torch.Tensor, c: Any) -> None:
        self.configs.append(c)
        self.backend.forward(problem, x, out)

    def backward(self, problem: Problem, x: Operands, do, dq, dk, dv, dparams, c: Any) -> None:  # type: ignore[no-untyped-def]
        self.configs.append(c)
        self.backend.backward(problem, x, do, dq, dk, dv, dparams)


@pytest.mark.parametrize("case", ["self-512", "jagged-1024", "uniform-512", "pma"])
def test_jobs_run_the_case_that_they_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's output is that of the public API on the same inputs."""
    launch, cpu = CpuLaunch(), torch.device("cpu")
    monkeypatch.setattr(jobs, "launcher", lambda name: launch)
    made = replace(suite.make(case, suite.Scale(3, 16)), d=64)
    function, backend = search.benchmark_function("silu"), jobs.tunable("hopper", (9, 0))
    job = jobs.make_job(backend, "fwd", made, function, torch.float32, cpu)
    job.run(OTHER)
    assert launch.configs == [OTHER]
    x = cases.make_inputs(made)
    expected = cases.call(made, x, "silu", backend="cpu")
    found = job.results["out"].transpose(1, 2).flatten(0, 1) if made.varlen else job.results["out"]
    torch.testing.assert_close(found, expected.detach())
    backward = jobs.make_job(backend, "bwd", made, function, torch.float32, cpu)
    assert select.refusals(backward, [OTHER]) == {}
    assert set(backward.results) == {"dq", "dk", "dv"}


def test_edge_cases_run_at_the_width_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "launcher", lambda name: CpuLaunch())
    backend, function = jobs.tunable("hopper", (9, 0)), search.benchmark_function("silu")
    job = jobs.edges_job(backend, SHORT, function, torch.float32, torch.device("cpu"))
    assert select.refusals(job, [OTHER]) == {}
    assert job.results["out"].shape[3] == 128


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_launch_modules_take_a_configuration_after_the_tensors(name: str) -> None:
    pytest.importorskip("triton.experimental.gluon")
    launch = jobs.launcher(name)
    for function, place in ((launch.forward, 3), (launch.backward, 7)):
        found = list(inspect.signature(function).parameters.values())[place]
        assert (found.name, found.default) == ("c", None)


# ---- the command -----------------------------------------------------------------------------------------------------
def gdpa_command(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


@pytest.mark.parametrize("arguments", [(), ("--quick",), ("--backend", "triton"), ("--case", "self-512")])
def test_there_is_nothing_to_tune_without_a_gpu(arguments: tuple[str, ...], file: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = gdpa_command("tune", *arguments)
    assert result.exit_code == 1
    assert "there is no GPU here, and nothing to tune on a CPU" in result.output
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--backend", "cpu"), 2, "'cpu' is not one of"),
        (("--show", "--quick"), 2, "--quick does not apply with --show"),
        (("--reset", "--case", "pma"), 2, "--case does not apply with --reset"),
        (("--show", "--reset"), 2, "--reset does not apply with --show"),
    ],
)
def test_the_command_refuses_in_words(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = gdpa_command("tune", *arguments)
    assert result.exit_code == code
    assert message in result.output


def test_show_and_reset(file: Path) -> None:
    assert "there is no" in gdpa_command("tune", "--show").output
    assert gdpa_command("tune", "--reset").exit_code == 0
    store(file)
    shown = gdpa_command("tune", "--show")
    assert shown.exit_code == 0
    for word in (GPU, "hopper", "kv256-q1024", "ping_pong", "2.000x", "refused: stages 3: does not fit", str(file)):
        assert word in shown.output, word
    assert f"removed {file}" in gdpa_command("tune", "--reset").output
    assert not file.exists()


def test_show_and_reset_of_a_named_file(tmp_path: Path, file: Path) -> None:
    named = tmp_path / "named.json"
    store(named, None)
    assert "default" in gdpa_command("tune", "--show", "--out", str(named)).output
    gdpa_command("tune", "--reset", "--out", str(named))
    assert not named.exists()
    named.write_text("mine")
    assert "was not removed" in gdpa_command("tune", "--reset", "--out", str(named)).output
    assert named.read_text() == "mine"


def test_a_malformed_file_is_an_error_of_the_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("{")
    result = gdpa_command("tune", "--show")
    assert result.exit_code == 1
    assert str(file) in result.output.replace("\n", "")
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert "there is no file" in gdpa_command("tune", "--show").output
    assert gdpa_command("tune", "--reset").exit_code == 1
    assert file.exists()


def test_info_says_which_file_is_in_use(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no" in tuning.status(DEVICE)
    store(file)
    tuning.forget()
    assert tuning.status(DEVICE) == f"{file}, 1 of 1 measured classes differ from the built-in configurations"
    if not torch.cuda.is_available():
        assert f"tuning: {file}" in gdpa_command("info").output
