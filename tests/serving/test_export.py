"""Exported models: equal to the model at sizes never seen, in a process that has never seen the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import gdpa
from gdpa import data, models, serving
from gdpa.nn import Jagged, SeedPooling, SelfAttention
from processes import run_program
from support import FULL

LOG = data.SyntheticLog(seed=1, longest=12, items=40, categories=5, users=20)
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"depth": 1},  # softmax
    "kunlun": {"activation": "softplus"},
    "hstu": {"depth": 1, "num_layers": 1},  # a function of positions and tables
}
if FULL:  # their layers are among those of the others
    MODELS |= {"dlrm": {}, "din": {}, "interformer": {"window": 5, "both_ways": False}}
COMPILER = shutil.which("g++") or shutil.which("clang++")


def near(s: torch.Tensor, a: torch.Tensor, *, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return torch.relu(s) ** 2 * a / (1 + (q_idx - kv_idx).abs())


def others(q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    return q_idx != kv_idx


class Small(nn.Module):
    """A model of one's own, with a function and a mask of one's own; AOTInductor compiles it in some seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(40, 8)
        self.attention = SelfAttention(8, 2, near, params=(0.7,), out_scale=0.1, mask=others)
        self.pool = SeedPooling(8, 2, 1, "silu", out_scale=0.1)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: data.Inputs) -> torch.Tensor:
        history = batch.sequences["history"]
        events = Jagged(self.items(history.ids[:, 0]), history.cu_seqlens, history.longest)
        return self.head(self.pool(self.attention(events))[:, 0] * self.items(batch.sparse[:, 0])).squeeze(1)


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return Small() if name == "small" else models.build(name, models.Features.of(LOG), **MODELS.get(name, {}))


def batch_of(size: int, longest: int) -> data.Batch:
    log = data.SyntheticLog(seed=5, longest=longest, items=40, categories=5, users=20)
    return next(data.batches(log, size))


def cut(batch: data.Batch, most: int) -> data.Batch:
    """The first ``most`` events of each history."""
    events = [{n: data.Events(e.ids[:most], e.values[:most]) for n, e in s.sequences.items()} for s in batch]
    return data.collate([replace(s, sequences=e) for s, e in zip(batch, events, strict=True)])


EXAMPLE = batch_of(6, 9)
UNSEEN = (batch_of(1, 7), batch_of(33, 40), cut(batch_of(1, 7), 1), cut(batch_of(1, 7), 0), cut(batch_of(3, 7), 0))


@pytest.fixture(scope="module")
def programs() -> dict[str, tuple[nn.Module, torch.export.ExportedProgram]]:
    built = {name: build(name) for name in ("small", *MODELS)}
    return {name: (model, serving.export(model, EXAMPLE)) for name, model in built.items()}


@pytest.mark.parametrize("name", MODELS)
def test_equal_at_sizes_never_seen(programs: Any, name: str) -> None:
    model, program = programs[name]
    assert model.training  # export leaves it as it was
    score = program.module()
    with torch.no_grad():
        expected = [model.eval()(batch) for batch in UNSEEN]
        model.train()
        for batch, want in zip(UNSEEN, expected, strict=True):
            torch.testing.assert_close(score(batch.inputs()), want, rtol=0, atol=1e-6)


def test_inputs_keep_their_names(programs: Any) -> None:
    specs = programs["kunlun"][1].graph_signature.input_specs
    names = [spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"]
    events = [f"batch_sequences_history_{name}" for name in ("ids", "values", "cu_seqlens")]
    assert names == ["batch_dense", "batch_sparse", *events]


FRESH = """
import sys, torch, gdpa.serving
from pathlib import Path
folder = Path(sys.argv[1])
inputs = torch.load(folder / "batches.pt")
found = {}
for path in sorted(folder.glob("*.pt2")):
    compiled = path.stem.startswith("aoti")
    score = torch._inductor.aoti_load_package(str(path)) if compiled else torch.export.load(path).module()
    with torch.no_grad():
        found[path.stem] = [score(one) for one in inputs]
torch.save(found, folder / "scores.pt")
"""


@pytest.fixture(scope="module")
def elsewhere(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """The scores that a fresh process gives to what is saved here."""
    folder = tmp_path_factory.mktemp("programs")
    if COMPILER:
        # Headers that are compiled ahead pay from the second model on.
        fast = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
        program = programs["small"][1]  # saved below as it was
        assert serving.package(program, path=folder / "aoti.pt2", options=fast) == folder / "aoti.pt2"
    for name, (_, program) in programs.items():
        torch.export.save(program, folder / f"{name}.pt2")
    torch.save([batch.inputs() for batch in UNSEEN], folder / "batches.pt")
    run_program(FRESH, str(folder))
    return torch.load(folder / "scores.pt")


@pytest.mark.parametrize("name", ["small", *MODELS])
def test_saved_and_loaded_in_a_fresh_process(programs: Any, elsewhere: Any, name: str) -> None:
    _same(elsewhere[name], programs[name][0])


@pytest.mark.skipif(not COMPILER, reason="AOTInductor needs a C++ compiler")
def test_packaged_and_loaded_in_a_fresh_process(programs: Any, elsewhere: Any) -> None:
    _same(elsewhere["aoti"], programs["small"][0])


class Own(nn.Module):
    """No model for batches, and with a branch, whose graph is one of its own."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        def attend(q: torch.Tensor) -> torch.Tensor:
            return gdpa.attention(q, q, q, "silu")

        return attend(q) + torch.cond(q.sum() > 0, attend, torch.zeros_like, (q,))


def test_packages_call_operators_that_take_none_for_no_tables(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def compiled(program: torch.export.ExportedProgram, **options: Any) -> None:
        called.append(operators(program))

    monkeypatch.setattr("gdpa.compat.aoti_compile_and_package", compiled)
    serving.package(programs["small"][0], EXAMPLE, tmp_path / "model.pt2")
    own = torch.export.export(Own(), (torch.randn(2, 2, 6, 4),))
    serving.package(own, path=tmp_path / "own.pt2")
    assert called == [["attention_packed_served"] * 2, ["attention_served"] * 2]
    assert operators(own) == ["attention"] * 2  # the caller's program is left as it was


def operators(program: torch.export.ExportedProgram) -> list[str]:
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    names = [str(node.target).split(".") for part in parts for node in part.graph.nodes]
    return [name for room, name, *_ in (name for name in names if len(name) > 1) if room == "gdpa"]


def _same(scores: list[torch.Tensor], model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for got, batch in zip(scores, UNSEEN, strict=True):
            torch.testing.assert_close(got, model(batch), rtol=0, atol=1e-6)
    model.train()


def test_a_whole_batch_is_a_tree_with_keys() -> None:
    """As torch.export.export itself takes it, hints and labels included."""
    batch = batch_of(4, 9)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert keys[:3] == [".dense", ".sparse", ".sequences['history'].ids"]
    again = pytree.tree_map(lambda leaf: leaf, batch)
    assert again.sequences["history"].longest == batch.sequences["history"].longest
    assert again.labels is batch.labels
    model = build("din").eval()
    program = torch.export.export(model, (batch,), dynamic_shapes=(serving.dynamic_shapes(batch),))
    other = batch_of(9, 30)
    torch.testing.assert_close(program.module()(other), model(other), rtol=0, atol=1e-6)


def test_a_layer_on_jagged_rows() -> None:
    layer = SelfAttention(8, 2, "silu", rotary=100.0).eval()
    x = Jagged.from_lengths(torch.randn(9, 8), torch.tensor([5, 0, 4]))
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]] == [".values", ".cu_seqlens"]
    shapes = [serving.dynamic_shapes(x.values), serving.dynamic_shapes(x.cu_seqlens)]
    program = torch.export.export(layer, (x,), dynamic_shapes=(shapes,))
    y = Jagged.from_lengths(torch.randn(30, 8), torch.tensor([5, 20, 4, 1, 0]))
    torch.testing.assert_close(program.module()(y).values, layer(y).values, rtol=0, atol=1e-6)


def test_bags_of_any_number_and_several_labels() -> None:
    def with_bags(batch: data.Batch, most: int) -> data.Batch:
        bags = [data.Events(np.arange(i % (most + 1))[:, None] % 5, np.empty((i % (most + 1), 0), np.float32))
                for i in range(len(batch))]  # fmt: skip
        samples = [replace(s, bags={"genres": bag}, label=(1.0, 0.0)) for s, bag in zip(batch, bags, strict=True)]
        return data.collate(samples)

    bag = models.BagFeatures("genres", "category")
    features = replace(models.Features.of(LOG), bags=(bag,), labels=("click", "like"))
    model = models.build("din", features).eval()
    score = serving.export(model, with_bags(EXAMPLE, 3)).module()
    with torch.no_grad():
        for batch in (with_bags(batch, 4) for batch in UNSEEN):
            torch.testing.assert_close(score(batch.inputs()), model(batch), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="at least 2 events of 'genres', got 0"):
        serving.export(model, with_bags(EXAMPLE, 0))


class Context(nn.Module):
    """Two sequences as models join them, and a context without features, in the fraction of a model's time."""

    def __init__(self, features: models.Features) -> None:
        super().__init__()
        self.tables = models.embedding.Tables(features, 4, {})
        self.context = models.embedding.ContextTokens(features, 4, (4,), {})

    def forward(self, batch: data.Inputs) -> torch.Tensor:
        looked = self.tables(batch)
        x = self.context(batch.dense, looked)
        events = [Jagged(looked.columns(name)[0], e.cu_seqlens, e.longest) for name, e in batch.sequences.items()]
        rows, starts = models.joining.join([models.joining.every(x), *events])
        _, first, recent = models.joining.ends(rows, 1, starts[1:], 2)
        return torch.cat([first, recent], dim=1).flatten(1).sum(1)


def two_sequences(n: int) -> data.Batch:
    """Without any features beside two sequences."""
    history = data.Events(np.arange(3)[:, None], np.empty((3, 0), np.float32))
    nothing = np.empty(0, np.float32), np.empty(0, np.int64)
    return data.collate([data.Sample(*nothing, {"a": history, "b": history}, 1.0, 0)] * n)


TWO = models.Features((), (), tuple(models.SequenceFeatures(name, ("item",)) for name in "ab"), {"item": 9})


@pytest.mark.parametrize("name", ["context", *(("transformer", "interformer", "hstu", "dlrm") if FULL else ())])
def test_one_sample_of_two_sequences_without_other_features(name: str, tmp_path: Path) -> None:
    """Strides of a single sample mean nothing: programs must not be held to those of several. Nor may they hold nodes
    without outputs, which are saved and cannot be loaded."""
    options = {"depth": 1, "num_layers": 1} if name == "transformer" else {}
    model = (Context(TWO) if name == "context" else models.build(name, TWO, **options)).eval()
    torch.export.save(serving.export(model, two_sequences(4)), tmp_path / "model.pt2")
    score = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        for n in (1, 3):
            torch.testing.assert_close(score(two_sequences(n).inputs()), model(two_sequences(n)), rtol=0, atol=1e-6)


def test_refusals(tmp_path: Path) -> None:
    model, batch = build("din"), batch_of(4, 9)
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        serving.export(model, batch_of(1, 9))
    with pytest.raises(ValueError, match="at least 2 events of 'history', got 0"):
        serving.export(model, cut(batch, 0))
    with pytest.raises(TypeError, match=r"batch must be a gdpa\.data\.Batch, got Inputs"):
        serving.export(model, batch.inputs())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must end in \.pt2"):
        serving.package(model, batch, tmp_path / "model.so")
    program = torch.export.export(Own(), (torch.randn(2, 2, 6, 4),))
    with pytest.raises(TypeError, match=r"batch must be left out.*package\(program, path="):
        serving.package(program, batch, tmp_path / "model.pt2")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"must end in \.pt2, .* got None"):
        serving.package(program)  # type: ignore[call-overload]
