"""The whole-model benchmark: contenders that compute the same, work that is counted right, and a run on a CPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from gdpa.bench import rates, results
from gdpa.bench.functions import benchmark_function
from gdpa.bench.models import cases as model_cases
from gdpa.bench.models import contenders, floors, flops, profile, report, run, turns
from gdpa.bench.models import page as model_page
from gdpa.bench.models import step as model_step
from gdpa.bench.models.padded import PaddedBatch, pad
from gdpa.bench.report import documents
from gdpa.cli import main
from gdpa.data import Batch
from gdpa.testing.cases import kept_pairs
from support import FULL

CPU = torch.device("cpu")
GELU = benchmark_function("gelu")
FASTEST = model_step.StepEffort(warmup_ms=0, measure_ms=0, least=1, most=1)
TINY = replace(
    model_cases.CPU_SCALE, batch=4, rows=16, dim=16, units=4, window=3, seeds=4, tokens=2, context=8, hidden=8,
    items=100, batches=2,
)  # fmt: skip


def case_of(name: str, scale: model_cases.Scale = TINY) -> model_cases.ModelCase:
    (found,) = model_cases.find((name,), scale)
    return found


# ---- cases -----------------------------------------------------------------------------------------------------------
def test_cases() -> None:
    names = ["interformer-uniform", "interformer-lognormal", "kunlun-uniform", "kunlun-lognormal"]
    assert [case.name for case in model_cases.find((), model_cases.FULL_SCALE)] == names
    assert [case.name for case in model_cases.find(("*-uniform", "kunlun-*"), TINY)] == [names[0], *names[2:]]
    with pytest.raises(ValueError, match="no case of --model is called 'din-uniform'; cases: interformer-uniform"):
        model_cases.find(("din-uniform",), TINY)


def test_full_sizes_are_those_of_the_issue() -> None:
    for case in model_cases.find((), model_cases.FULL_SCALE):
        found = model_cases.describe(case)
        assert (found["batch"], found["rows"], case.longest + case.before) == (1152, 1024, 1024)
        draws = case.draws()
        assert len({sum(drawn) for drawn in draws}) == len(draws) == 4  # other lengths every time
        assert all(min(drawn) >= 1 and case.longest * 0.98 < max(drawn) <= case.longest for drawn in draws)
        options = model_cases.options(case.model, case.scale)
        size = options if case.model == "interformer" else options["sequences"]["history"]
        assert (size["dim"] // size["num_heads"], size["num_heads"]) == (128, 4)


def test_batches_are_what_models_take() -> None:
    case = case_of("kunlun-uniform")
    for batch, drawn in zip(model_cases.make_batches(case, "cpu"), case.draws(), strict=True):
        events = batch.sequences["history"]
        assert events.lengths().tolist() == list(drawn)
        assert events.ids.shape == (sum(drawn), 2)
        model_cases.features(TINY).check(batch)
        for i in range(len(batch)):
            age = batch[i].sequences["history"].values[:, 0]
            assert (age[:-1] > age[1:]).all()
            assert 0 <= age[-1] < 2


# ---- contenders ------------------------------------------------------------------------------------------------------
def loss_and_gradients(name: str, case: model_cases.ModelCase) -> list[torch.Tensor]:
    (contender,) = contenders.find((name,))
    model = contender.make_model(case, GELU, CPU).double()
    inputs = contender.inputs(case, model_cases.make_batches(case, "cpu"))
    total = torch.zeros((), dtype=torch.float64)
    for i, one in enumerate(inputs):
        batch = one.batch if isinstance(one, PaddedBatch) else one
        total = total + (i + 1) * F.binary_cross_entropy_with_logits(model(one), batch.labels.double())
    return [total.detach(), *torch.autograd.grad(total, list(model.parameters()))]


@pytest.mark.parametrize("name", model_cases.names())
def test_contenders_train_the_same_model(name: str) -> None:
    """Padding changes no loss and no gradient, whether q, k and v are padded or the whole batch."""
    case = case_of(name)
    wanted = loss_and_gradients("gdpa", case)
    for contender in ("padded-eager", "batch-eager"):
        torch.testing.assert_close(loss_and_gradients(contender, case), wanted)
    softmax = loss_and_gradients("padded-sdpa", case)
    torch.testing.assert_close(loss_and_gradients("batch-sdpa", case), softmax)
    assert not torch.equal(softmax[0], wanted[0])


def test_padding() -> None:
    case = case_of("interformer-uniform")
    f = model_cases.features(TINY)
    batch = model_cases.make_batches(case, "cpu")[0]
    padded = pad(batch, f)
    events = padded.batch.sequences["history"]
    assert events.lengths().tolist() == [case.longest] * len(batch)
    assert (events.ids < torch.tensor([f.vocabularies["item"], f.vocabularies["category"]])).all()
    for i, missing in enumerate(padded.padding.tolist()):
        got, want = padded.batch[i].sequences["history"], batch[i].sequences["history"]
        assert (got.ids[missing:] == want.ids).all()
        assert (got.values[missing:] == want.values).all()
        assert (got.values[:missing] == 0).all()


def test_contenders_by_name() -> None:
    usual = ["gdpa", "padded-eager", "padded-sdpa", "batch-eager", "batch-sdpa"]
    assert [c.name for c in contenders.find(())] == usual
    (triton,) = contenders.find(("gdpa-triton",))
    assert triton.backend == "triton"
    (cudnn,) = contenders.find(("padded-sdpa-efficient",))
    assert cudnn.kernels[0] == contenders.KERNELS["efficient"]
    with pytest.raises(ValueError, match="contender 'nobody' of --model is unknown; known: gdpa, "):
        contenders.find(("nobody",))


@pytest.mark.skipif(not FULL, reason="only with the full grid; one of train's tests has such a step as well")
@pytest.mark.parametrize("name", ["gdpa", "batch-sdpa", "padded-eager"])
def test_lengths_do_not_recompile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all batches, of both distributions."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiler(fn, backend="eager", **options))
    cases = model_cases.find(("interformer-*",), replace(TINY, batches=3))
    (contender,) = contenders.find((name,))
    model = contender.make_model(cases[0], GELU, CPU)
    trainer = model_step.Trainer(model, CPU, torch.float32, True, contender.kernels)
    graphs = []
    for case in cases:
        watch = model_step.StepWatch(trainer, FASTEST, 2)
        for _ in range(2):
            watch.turn(contender.inputs(case, model_cases.make_batches(case, "cpu")))
            trainer.rest()
        graphs.append(watch.measured().graphs)
    torch._dynamo.reset()
    assert graphs == [1, 0]


class Dense(nn.Module):
    """The smallest model: it reads no history."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.linear(batch.dense).squeeze(1)


def test_contenders_in_turns_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are more of them than torch.compile would recompile a function for."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiler(fn, backend="eager", **options))
    batches = model_cases.make_batches(case_of("interformer-uniform"), "cpu")
    trainers = [model_step.Trainer(Dense(), CPU, torch.float32, True, contenders.EVERY_KERNEL) for _ in range(3)]
    watches = [model_step.StepWatch(trainer, FASTEST, 2) for trainer in trainers]
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            for trainer, watch in zip(trainers, watches, strict=True):
                watch.turn(batches)
                trainer.rest()
    torch._dynamo.reset()
    assert [watch.measured().graphs for watch in watches] == [1, 1, 1]


def test_a_contender_at_rest_holds_nothing_and_begins_anew() -> None:
    case = case_of("kunlun-uniform")
    (contender,) = contenders.find(("batch-eager",))
    inputs = contender.inputs(case, model_cases.make_batches(case, "cpu"))
    trainer = model_step.Trainer(contender.make_model(case, GELU, CPU), CPU, torch.float32, False, contender.kernels)
    losses = []
    for _ in range(2):
        weights = list(trainer.model.parameters())
        assert sum(p.untyped_storage().nbytes() for p in weights) == 0
        assert all(p.grad is None for p in weights)
        trainer.start(inputs)
        losses.append([float(trainer()) for _ in range(3)])
        trainer.rest()
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]  # the first batch again, after training on it


def test_tables_by_row() -> None:
    """Rows that no batch reads stay; those that are read, and all other weights, learn."""
    case = case_of("kunlun-uniform")
    (contender,) = contenders.find(("gdpa-rowwise_adam",))
    batches = model_cases.make_batches(case, "cpu")
    plan = run.make_plan((case.name,), (contender.name,), scale=TINY, device=CPU)
    trainer = run._Run(plan, print, print).make_trainer(case, contender)
    trainer.start(batches[:1])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer()
    read = torch.zeros(before["tables.of_item"].shape[0], dtype=torch.bool)
    read[batches[0].sparse[:, 0]] = read[batches[0].sequences[model_cases.HISTORY].ids[:, 0]] = True
    after = dict(trainer.model.named_parameters())
    changed = (after["tables.of_item"] != before["tables.of_item"]).any(1)
    assert torch.equal(changed, read)
    assert not read.all()
    assert not torch.equal(after["head.0.weight"], before["head.0.weight"])


# ---- the work --------------------------------------------------------------------------------------------------------
def test_work_is_what_torch_counts() -> None:
    """InterFormer has no window: torch's counter on real tensors finds the same with gdpa's own formulas."""
    case = case_of("interformer-lognormal")
    model = model_cases.make_model(case.model, TINY, GELU, CPU)
    for batch, found in zip(model_cases.make_batches(case, "cpu"), flops.step_flops(case, GELU), strict=True):
        with FlopCounterMode(display=False) as counter:
            F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        assert counter.get_total_flops() == found


def test_work_outside_a_window_is_not_counted() -> None:
    drawn, window, heads, d = (5, 1, 9), 2, 2, 8
    q = torch.empty(1, heads, sum(drawn) + 3, d, device="meta")
    cu = torch.empty(4, device="meta")
    forward, backward, packed_forward, packed_backward = flops.formulas(drawn).values()
    rest = (None, None, None, [], ["gelu"], 1.0, 1.0, window, window, None, None, "exact", None)
    pairs = sum(kept_pairs(n + 1, n + 1, window, window) for n in drawn)
    assert forward(q, q, q, cu, cu, *rest) == 4 * heads * d * pairs
    assert backward(q, q, q, q, cu, cu, *rest) == 10 * heads * d * pairs
    qkv = torch.empty(1, sum(drawn) + 3, 3, heads, d, device="meta")
    assert packed_forward(None, qkv, cu, cu, *rest) == 4 * heads * d * pairs
    assert packed_backward(q, None, qkv, cu, cu, *rest) == 10 * heads * d * pairs


# ---- floors ----------------------------------------------------------------------------------------------------------
def test_floors_of_a_small_step() -> None:
    """relu(x w) + 1, times v, by hand: between the products one region reads a and writes r; backward reads a again,
    and what comes from v, and writes the gradient of a."""
    n, x, w, v = 64, torch.empty(64, 64), torch.empty(64, 64), torch.empty(64, 64)
    matrix = 4 * n * n
    with FakeTensorMode() as fake:
        x, w, v = (fake.from_tensor(t).requires_grad_() for t in (x, w, v))
        with floors.Seen({}) as seen:
            y = (torch.relu(x @ w) + 1) @ v
            seen.begin_backward()
            torch.autograd.grad(y, (x, w, v), fake.from_tensor(torch.empty(64, 64)))
    found = seen.work()
    products = [work for work in found if work.group == "matrix products"]
    assert [work.flops for work in products] == [2 * n**3] * 6
    assert {work.traffic for work in products} == {3 * matrix}
    between = sorted(work.traffic for work in found if work.group == floors.BETWEEN)
    assert between == [2 * matrix, 3 * matrix]
    rates_ = rates.Rates(1e-6, 1e-6)  # a million operations and bytes a second
    assert floors.floors(found, rates_)[floors.BETWEEN] == pytest.approx(5 * matrix / 1e3)


@pytest.mark.parametrize("name", model_cases.MODELS)
def test_floors_of_models(name: str) -> None:
    case = case_of(f"{name}-uniform")
    work = floors.step_work(case, GELU, torch.bfloat16)
    assert sum(w.flops for w in work) == flops.step_flops(case, GELU)[0]
    assert {w.group for w in work} <= set(profile.NAMES)
    assert {w.group for w in work} >= {"attention kernels", "rotary", "embedding", "optimizer", floors.BETWEEN}
    rows = sum(case.draws()[0]) + case.before * TINY.batch
    layers = {"interformer": 2, "kunlun": 1}[
        name
    ]  # that turn q and k, forward and backward: read and written in 2 bytes
    assert sum(w.traffic for w in work if w.group == "rotary") == layers * 2 * (2 * 2 * 2 * rows * TINY.dim)


# ---- the profile -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kernel", "operators", "group"),
    [
        ("backward_kernel", (), "attention kernels"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", ("gdpa::attention",), "attention kernels"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", (), "attention kernels"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", (), "attention kernels"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", ("aten::bmm",), "batched products"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", ("aten::addmm",), "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", (), "matrix products"),
        ("triton_red_fused_add_native_layer_norm_native_layer_norm_backward_7", (), "norms, element-wise"),
        ("norm_backward_kernel", (), "norms, element-wise"),
        ("turn_kernel", (), "rotary"),
        ("triton_poi_fused__to_copy_add_arange_cat_cos_div_mul_neg_pow_sin_slice_50", (), "rotary"),
        ("triton_poi_fused_embedding_dense_backward_3", (), "embedding"),
        ("triton_poi_fused_index_copy_new_zeros_12", (), "copies"),
        ("Memset (Device)", (), "copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", (), "optimizer"),
        ("ampere_sgemm", ("aten::mm", "Optimizer.step#AdamW.step"), "optimizer"),
        ("something_else", (), "other"),
    ],
)
def test_groups_of_kernels(kernel: str, operators: tuple[str, ...], group: str) -> None:
    assert profile.group_of(kernel, operators) == group


def test_kernels_without_an_operator_count_once() -> None:
    """As torch's profiler gives a GPU's events: kernels by operator, and again as events of the device."""

    def device(name: str, us: float, annotation: bool = False) -> Any:
        elapsed = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(
            device_type=DeviceType.CUDA, name=name, time_range=elapsed, is_user_annotation=annotation
        )

    def operator(name: str, kernels: list[tuple[str, float]], parent: Any = None) -> Any:
        found = [SimpleNamespace(name=k, duration=us) for k, us in kernels]
        return SimpleNamespace(device_type=DeviceType.CPU, name=name, kernels=found, cpu_parent=parent)

    attention = operator("gdpa::attention", [("forward_kernel", 50.0)])
    events = [
        attention,
        operator("aten::zero_", [("fill", 5.0)], attention),
        operator("aten::bmm", [("nvjet", 20.0)]),
        *(device("forward_kernel", us) for us in (50.0, 30.0)),
        device("fill", 5.0),
        device("nvjet", 20.0),
        device("nvjet", 40.0),
        device("Torch-Compiled Region: 0/0", 145.0, annotation=True),
        operator("cudaFuncGetAttributes", [("elementwise_kernel", 7.0)]),  # by chance it has the operator's number
        *(operator("aten::_fused_adamw_", [("elementwise_kernel", 7.0)]) for _ in range(3)),  # one kernel on three
        operator("aten::embedding", [("elementwise_kernel", 9.0)]),
        device("elementwise_kernel", 7.0),
        device("elementwise_kernel", 9.0),
    ]
    found = profile.summary((g, n, us) for g, n, us in profile._on_gpu(events))["groups_ms"]
    assert {name: round(us, 9) for name, us in found.items() if us} == {
        "attention kernels": 85.0,
        "batched products": 20.0,
        "matrix products": 40.0,
        "optimizer": 7.0,
        "embedding": 9.0,
    }


# ---- runs ------------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_rates", lambda device, dtype, effort: rates.Rates(0.1, 0.01))


def plan_of(*patterns: str, only: tuple[str, ...] = ()) -> run.ModelPlan:
    return replace(run.make_plan(patterns, only, device=CPU, scale=TINY), effort=FASTEST)


PROFILES: list[Any] = []


def profile_once(patch: pytest.MonkeyPatch) -> None:
    """Contenders after the first get its profile, in other tests too: torch takes seconds to read one."""
    profile_steps = turns.profile_steps

    def first(*args: Any) -> Any:
        if not PROFILES:
            PROFILES.append(profile_steps(*args))
        return PROFILES[0]

    patch.setattr(turns, "profile_steps", first)


def count_no_work(patch: pytest.MonkeyPatch) -> None:
    """For tests of something else: models of fake tensors take seconds."""
    patch.setattr(run, "step_flops", lambda case, function: [1e9])
    patch.setattr(run, "step_work", lambda case, function, dtype: [])


@pytest.fixture(scope="module")
def document() -> dict:
    """A real run of one case."""
    kept: list[dict] = []
    with pytest.MonkeyPatch.context() as patch:
        profile_once(patch)
        patch.setattr(run, "measure_rates", lambda device, dtype, effort: rates.Rates(0.1, 0.01))
        labels: list[str] = []
        plan = plan_of("kunlun-uniform")
        found = run.run(plan, labels.append, kept.append)
    assert len(labels) == run.steps(plan) == 5 * 3 + 4
    assert "kunlun-uniform gdpa, turn 1 of 3" in labels
    first, second = (
        [label.split()[1].rstrip(",") for label in labels if label.endswith(f"turn {turn} of 3")] for turn in (1, 2)
    )
    assert first == second[::-1] == [c.name for c in plan.contenders]
    assert [len(so_far["records"]) for so_far in kept] == [5]
    return json.loads(json.dumps(found))


def test_run(document: dict) -> None:
    assert [r["backend"] for r in document["records"]] == [c.name for c in contenders.USUAL]
    assert document["skipped"] == []
    for r in document["records"]:
        assert r["samples_s"] == pytest.approx(4e3 / r["median_ms"])
        assert r["mfu"] == pytest.approx(r["tflops"] / 0.1)
        assert sum(r["profile"]["groups_ms"].values()) > 0
        assert r["peak_mib"] is None
        assert r["graphs"] is None
        assert len(r["turns_ms"]) == 3
    losses = {r["backend"]: r["loss"] for r in document["records"]}
    assert losses["padded-eager"] == pytest.approx(losses["gdpa"], rel=1e-5)
    assert losses["batch-eager"] == pytest.approx(losses["gdpa"], rel=1e-5)
    assert {"date", "commit", "versions", "gpu", "cpu", "clocks", "rates", "cases", "dtype", "kind"} <= set(document)
    assert len(document["rates"]["readings"]) == 3
    assert document["cases"]["kunlun-uniform"]["gflop"] > 0


def test_failures_are_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(watch: model_step.StepWatch, inputs: Any) -> None:
        problems = {"WholeBatch": torch.OutOfMemoryError("no"), "InterFormer": RuntimeError("first line\nsecond")}
        raise problems[type(watch._trainer.model).__name__]

    monkeypatch.setattr(model_step.StepWatch, "turn", turn)
    count_no_work(monkeypatch)
    document = run.run(plan_of("interformer-uniform", only=("gdpa", "batch-eager")))
    assert [s["why"] for s in document["skipped"]] == ["failed: RuntimeError: first line", "out of memory"]
    assert run.failures(document) == ["interformer-uniform gdpa: failed: RuntimeError: first line"]
    text = report.markdown(document)
    assert "| interformer-uniform | batch-eager | out of memory |" in text
    assert "| interformer-uniform | gdpa | failed |" in text
    assert report.conclusions(document) == []
    assert "gdpa gelu, not run: failed: RuntimeError: first line" in model_page.page(document)


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(entrant: turns.Entrant, *args: Any) -> None:
        if entrant.contender.name == "padded-sdpa":
            entrant.failed = "failed: RuntimeError: an illegal memory access"
        else:
            first(entrant, *args)

    first = turns.Entrant.turn
    kept: list[dict] = []
    profile_once(monkeypatch)
    monkeypatch.setattr(turns.Entrant, "turn", turn)
    count_no_work(monkeypatch)
    monkeypatch.setattr(run, "alive", lambda device: False)
    with pytest.raises(run.DeviceLostError, match="sdpa: failed: RuntimeError: an illegal memory access; the GPU"):
        run.run(plan_of("interformer-uniform", only=("gdpa", "padded-sdpa")), keep=kept.append)
    assert [s["backend"] for s in kept[-1]["skipped"]] == ["padded-sdpa"]
    assert [(r["backend"], len(r["turns_ms"])) for r in kept[-1]["records"]] == [("gdpa", 1)]


def test_reasons() -> None:
    assert turns.reason(RuntimeError("CUDA error: out of memory")) == "out of memory"
    wrapped = RuntimeError("the compiler failed")
    wrapped.__cause__ = ValueError("inside")
    assert turns.reason(wrapped) == "failed: ValueError: inside"
    assert len(turns.reason(RuntimeError("x" * 1000))) < 220


def test_nothing_but_finite_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"device": CPU, "compiled": False, "start": lambda self, inputs: None}
    step: Any = type("Step", (), {**given, "__call__": lambda self: torch.tensor(float("nan"))})()
    with pytest.raises(ArithmeticError, match="losses of the first steps are"):
        model_step.StepWatch(step, FASTEST, 1).turn([None, None])


def test_turns() -> None:
    """Each has its share of the steps, every batch as often as the others; the median is of all, and of each."""
    made: list[str] = []

    class Step:
        device, compiled = CPU, False

        def start(self, inputs: list[str]) -> None:
            self.inputs = itertools.cycle(inputs)

        def __call__(self) -> torch.Tensor:
            made.append(next(self.inputs))
            return torch.tensor(0.5)

    watch = model_step.StepWatch(Step(), model_step.StepEffort(0, 1e9, least=1, most=10), 3)  # type: ignore[arg-type]
    for _ in range(3):
        watch.turn(["a", "b"])
    found = watch.measured()
    assert found.timing.repeats == 3 * 4
    assert len(found.turns_ms) == 3
    assert min(found.turns_ms) <= found.timing.median_ms <= max(found.turns_ms)
    assert abs(made.count("a") - made.count("b")) <= 1
    assert (found.loss, found.peak, found.graphs) == (0.5, None, None)


# ---- reports ---------------------------------------------------------------------------------------------------------
def test_reports(document: dict, tmp_path: Path) -> None:
    assert report.table(document).row_count == 5
    assert report.profile_table(document, "kunlun-uniform").row_count > 3
    line, *_ = report.conclusions(document)
    assert line.startswith("kunlun-uniform: gdpa trains ")
    model_page.write_page(document, tmp_path / "deep" / "x.html")
    source = (tmp_path / "deep" / "x.html").read_text(encoding="utf-8")
    turn_medians = " ".join(f"{ms:.1f}" for ms in document["records"][0]["turns_ms"])
    words = ("kunlun-uniform", "padded-sdpa", "attention kernels", "The longest kernels", document["date"])
    for word in (*words, turn_medians, "contenders took turns, 3 each"):
        assert word in source, word
    first, *others = document["records"]
    fewer = [{**first, "turns_ms": first["turns_ms"][:2]}, *others]
    assert "contenders took turns, 2 or 3 each" in report.notes({**document, "records": fewer})
    older = [{k: v for k, v in r.items() if k != "turns_ms"} for r in document["records"]]
    assert "turn" not in model_page.page({**document, "records": older}).partition("<h1>")[2]


def test_a_profile_on_a_gpu_has_floors(document: dict) -> None:
    """Of gdpa's time; results from before there were floors have none."""
    gpu = {**document, "gpu": "some GPU"}
    head, rows = report.profile_rows(gpu, "kunlun-uniform")
    assert head[-2:] == ["roofline", "gdpa of it"]
    groups = next(r for r in document["records"] if r["backend"] == "gdpa")["profile"]["groups_ms"]
    least = document["floors_ms"]["kunlun-uniform"]
    for name, *_, floor, fraction in rows:
        if least.get(name):
            assert float(floor) == pytest.approx(least[name], abs=0.006)
            assert fraction == (f"{least[name] / groups[name]:.2f}" if groups[name] else "-")
        else:
            assert (floor, fraction) == ("-", "-")
    assert model_page._case(gpu, "kunlun-uniform")["profile"].rows[0].cells[-2:] == rows[0][-2:]  # and no heat there
    for older in (document, {k: v for k, v in gpu.items() if k != "floors_ms"}):
        assert "roofline" not in report.profile_rows(older, "kunlun-uniform")[0]


def _steady(ms: float) -> dict[str, float]:
    return {"median_ms": ms, "p20_ms": ms, "p80_ms": ms}


def test_conclusion_with_memory(document: dict) -> None:
    memory = {"gdpa": 10.0, "padded-eager": 40.0, "padded-sdpa": 30.0, "batch-eager": 80.0, "batch-sdpa": 60.0}
    speed = {"gdpa": 200.0, "padded-eager": 80.0, "padded-sdpa": 100.0, "batch-eager": 40.0, "batch-sdpa": 50.0}
    records = [
        {**r, "samples_s": speed[r["backend"]], "peak_mib": memory[r["backend"]], **_steady(1e3 / speed[r["backend"]])}
        for r in document["records"]
    ]
    assert report.conclusions({**document, "records": records}) == [
        "kunlun-uniform: gdpa trains 2.0x faster than padded-sdpa, the fastest of the others, with 33 % of its memory"
    ]
    slow = [{**r, "samples_s": 1e3 / speed[r["backend"]], **_steady(speed[r["backend"]])} for r in records]
    slow = [{**r, "p80_ms": 9 * r["median_ms"]} for r in slow]
    line, warning = report.conclusions({**document, "records": slow})
    assert "gdpa trains 5.0x slower than batch-eager" in line
    assert "exceeds that difference" in warning


def test_tables_in_documents(document: dict, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    page = tmp_path / "README.md"
    page.write_text(
        "<!-- table: model results/m.json -->\n<!-- end -->\n"
        "<!-- table: model-profile results/m.json k* -->\n<!-- end -->\n"
    )
    before = page.read_text()
    with pytest.raises(FileNotFoundError):
        documents.refresh(page)
    assert page.read_text() == before
    results.save(document, tmp_path / "results" / "m.json")
    assert documents.refresh(page) == 2
    text = page.read_text()
    assert "| kunlun-uniform | batch-sdpa |" in text
    assert "| attention kernels |" in text
    with pytest.raises(ValueError, match="no case of the result matches din-\\*; it has kunlun-uniform"):
        documents.make("model results/m.json din-*", tmp_path)


# ---- the command -----------------------------------------------------------------------------------------------------
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cases, "CPU_SCALE", TINY)
    monkeypatch.setattr(run, "QUICK", FASTEST)
    profile_once(monkeypatch)
    count_no_work(monkeypatch)
    out = tmp_path / "m.json"
    arguments = ["--case", "kunlun-uniform", "--backend", "gdpa", "--backend", "padded-eager", "--function", "silu"]
    done = CliRunner().invoke(main, ["bench", "--model", "--quick", "--device", "cpu", *arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "gdpa trains" in done.output
    assert {r["function"] for r in results.read(out)["records"]} == {"silu"}
    assert out.with_suffix(".html").exists()
    shown = CliRunner().invoke(main, ["bench", "--from", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "gdpa trains" in shown.output
    refused = CliRunner().invoke(main, ["bench", "--from", str(out), "--compare", str(out)])
    assert refused.exit_code == 2
    assert "--compare compares results of kernels" in refused.output


def test_listing() -> None:
    done = CliRunner().invoke(main, ["bench", "--model", "--list"])
    assert done.exit_code == 0
    for word in ("interformer-lognormal", "padded-sdpa", "gdpa-triton"):
        assert word in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "--compare", __file__), "--compare does not apply with --model"),
        (("--compile",), "--compile and --no-compile only apply with --model"),
        (("--model", "--list", "--quick"), "--quick does not apply with --list"),
        (("--model", "--from", __file__), "--model does not apply with --from"),
        (("--model", "--function", "gelu", "--function", "silu"), "trains with one function"),
        (("--model", "--params", "1"), "--params needs --function"),
        (("--model", "--dtype", "float16"), "torch.float16 would need the loss to be scaled"),
        (("--model", "--case", "self-512"), "no case of --model is called 'self-512'"),
        (("--model", "--backend", "eager"), "contender 'eager' of --model is unknown"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    assert message in done.output
