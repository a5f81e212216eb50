"""Recompute: the same losses and gradients, of fewer kept tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gdpa import data, models

LOG = data.SyntheticLog(seed=1, longest=20, items=40, categories=5, users=20)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dlrm", {}),
    ("din", {}),
    ("transformer", {"both_ways": False}),
    ("interformer", {"num_layers": 2, "activation": lambda s, a: torch.nn.functional.silu(a * s), "params": (1.0,)}),
    ("kunlun", {}),
]


def gradients(model: models.Model, batch: data.Batch) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
    """The loss, the gradients, and how many bytes autograd keeps in between."""
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    for parameter in model.parameters():
        parameter.grad = None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    bytes_kept = sum(size for place, size in kept.items() if place not in parameters)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], bytes_kept


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_same_loss_and_gradients(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.build(name, models.Features.of(LOG), **options)
    batch = next(data.batches(LOG, 16))
    loss, grads, kept = gradients(model, batch)
    model.recompute = True
    again, grads_again, kept_again = gradients(model, batch)
    assert torch.equal(loss, again)
    for one, other in zip(grads, grads_again, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert kept_again < 0.8 * kept


def test_nothing_is_recomputed_without_gradients() -> None:
    model = models.build("interformer", models.Features.of(LOG))
    model.recompute = True
    calls: list[int] = []
    model.sequence[0].register_forward_pre_hook(lambda *_: calls.append(1))
    batch = next(data.batches(LOG, 4))
    with torch.no_grad():
        model(batch)
    assert len(calls) == 1
    model(batch).sum().backward()
    assert len(calls) == 3


@pytest.mark.parametrize(("name", "compiled"), [("interformer", False), ("din", True)])
def test_training_with_it(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses, compiled or not; torch.compile makes its graphs and runs those, code would need a compiler."""
    from gdpa.train import train

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **more: compile_module(self, backend="aot_eager", **more))
    settings = {
        "data": {"size": 40, "valid_size": 0, "test_size": 0, "longest": 6, "items": 20, "categories": 4, "users": 5},
        "model": {"name": name, "options": {"dim": 8}}, "batch_size": 8, "steps": 3, "device": "cpu",
    }  # fmt: skip
    plain = train(settings)
    again = train({**settings, "recompute": True, "compile": compiled})
    assert again.history.losses == pytest.approx(plain.history.losses, rel=1e-6)


def test_only_for_models_that_know_their_blocks() -> None:
    from gdpa.train import ConfigError, train

    def build(features: models.Features) -> nn.Module:
        return nn.Linear(1, 1)

    with pytest.raises(ConfigError, match=r"recompute=true is for the models of gdpa\.models, not for Linear"):
        train({"recompute": True, "steps": 1}, build=build)
