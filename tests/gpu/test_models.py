"""Layers, models and training as they are meant to run: bfloat16 on a GPU, through Inductor, without waiting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import gdpa.nn as gnn
from gdpa.cli import main
from gdpa.data import Batch
from gdpa.models import Model, build
from gdpa.models.cores import PaddedEager, replace
from models.cases import FEATURES, batch

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DIM, HEADS = 128, 2  # heads of 64 columns, which every backend takes
LENGTHS = [(300, 0, 3, 1, 129, 64), (1, 200, 265, 0, 40, 7), (2, 2, 128, 500, 0, 0)]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "self": lambda: gnn.SelfAttention(DIM, HEADS),
    "self-window": lambda: gnn.SelfAttention(DIM, HEADS, "silu", window=(20, 10), rotary=1e4, qk_norm=True),
    "self-params": lambda: gnn.SelfAttention(DIM, HEADS, lambda s, a: torch.where(s > 0, s, a * s), params=(0.2,)),
    "pma": lambda: gnn.PMA(DIM, HEADS, 8),
    "seeds": lambda: gnn.SeedPooling(DIM, HEADS, 8, ["gelu", "relu"]),
    "hierarchical": lambda: gnn.HierarchicalSeedPooling(DIM, HEADS, 16, 4, 2),
    "pffn": lambda: gnn.PFFN(DIM, HEADS, 64, 2, 16),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "interformer": ("interformer", {"dim": DIM, "num_heads": HEADS, "num_layers": 2, "hidden": (32,)}),
    "kunlun": (
        "kunlun",
        {"dim": 16, "hidden": (32,), "sequences": {"clicks": {"dim": DIM, "num_heads": HEADS, "num_layers": 2}}},
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def close(got: Tensor, want: Tensor, allowed: float) -> None:
    error = float((got.double().cpu() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    assert error <= allowed, f"{error:.3g} apart"


# ---- layers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", LAYERS)
def test_layers_in_bfloat16(name: str) -> None:
    """Under autocast, against float64 on the CPU: values and gradients."""
    torch.manual_seed(0)
    exact = LAYERS[name]().double()
    lengths = torch.tensor(LENGTHS[0])
    rows = torch.randn(int(lengths.sum()), DIM, dtype=torch.float64)
    extra = (torch.randn(len(lengths), 2, 16, dtype=torch.float64),) if name == "pffn" else ()

    def run(layer: nn.Module, device: str, dtype: torch.dtype) -> list[Tensor]:
        layer = layer.to(device, dtype)
        x = rows.detach().to(device, dtype).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
            y = layer(gnn.Jagged.from_lengths(x, lengths.to(device), 300), *(e.to(device, dtype) for e in extra))
        y = y.values if isinstance(y, gnn.Jagged) else y
        return [y.detach(), *torch.autograd.grad((y * y).sum(), [x, *layer.parameters()])]

    want = [t.clone() for t in run(exact, "cpu", torch.float64)]
    for got, expected in zip(run(exact, DEVICE, torch.float32), want, strict=True):
        close(got, expected, 0.05)


# ---- models ----------------------------------------------------------------------------------------------------------
def made(name: str, device: str = DEVICE) -> Model:
    torch.manual_seed(0)
    kind, options = MODELS[name]
    return build(kind, FEATURES["usual"], **options).to(device)


def loss_of(model: Model, b: Batch) -> Tensor:
    with torch.autocast(b.labels.device.type, torch.bfloat16):
        logits = model(b)
    return F.binary_cross_entropy_with_logits(logits.float(), b.labels)


def gradient(loss: Tensor, model: Model) -> Tensor:
    """Of all parameters, as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@every_model
def test_models_agree_with_padded_ones(name: str) -> None:
    """The same weights with the formula in PyTorch on padded tensors."""
    b = batch("usual", LENGTHS[0]).to(DEVICE)
    ours, theirs = made(name), replace(made(name), PaddedEager)
    losses = [loss_of(model, b) for model in (ours, theirs)]
    close(losses[0].detach(), losses[1].detach().cpu(), 1e-2)
    close(gradient(losses[0], ours), gradient(losses[1], theirs).cpu(), 0.05)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


@every_model
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_training_step_through_inductor(name: str) -> None:
    """One graph for all lengths, and the losses and gradients of the plain model. (All lengths of real batches: what
    Inductor decides, such as padding the operands of a product, it decides for a range of sizes, here from 386 rows to
    40951.)"""
    model = made(name)
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True)
    for i, lengths in enumerate(LENGTHS):
        b = batch("usual", lengths, seed=i).to(DEVICE)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            loss = compiled(model, b)
            found = gradient(loss, model)
        plain = loss_of(model, b)
        close(loss.detach(), plain.detach().cpu(), 1e-2)
        close(found, gradient(plain, model).cpu(), 0.05)


@every_model
def test_a_training_step_does_not_wait(name: str) -> None:
    model, b = made(name), batch("usual", LENGTHS[0]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss_of(model, b).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- training --------------------------------------------------------------------------------------------------------
SMALL = ("--batch-size", "16", "--data-size", "160", "--data-valid-size", "32", "--data-test-size", "32")


@pytest.mark.parametrize("compiled", ["--no-compile", "--compile"])
def test_train_and_resume(compiled: str, tmp_path: Path) -> None:
    """bfloat16 with gradient clipping; a run in two halves has as many steps as one, and losses that are numbers."""
    pytest.importorskip("tomli_w")  # of the extra "train"
    arguments = ("train", "--model", "interformer", "--set", "dim=64", "--set", "num_heads=1", *SMALL, compiled)
    arguments += ("--device", DEVICE, "--dtype", "bf16", "--clip", "1.0", "--checkpoint-every", "4")
    for steps in ("4", "8"):
        more = ("--resume",) if steps == "8" else ()
        done = CliRunner().invoke(main, [*arguments, "--steps", steps, "--out", str(tmp_path / "run"), *more])
        assert done.exit_code == 0, done.output + repr(done.exception)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {e["step"]: e["loss"] for e in entries if "loss" in e}
    assert set(losses) == set(range(1, 9))
    assert all(0 < loss < 10 for loss in losses.values())
