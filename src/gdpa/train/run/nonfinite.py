"""The step that produced inf or NaN, saved whole: the batch of each rank and the weights before it; and its replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from gdpa.data import Batch, PackedEvents
from gdpa.models import Features
from gdpa.train.config import ModelConfig
from gdpa.train.run.building import Build, build_own, build_saved
from gdpa.train.run.step import autocast, check_logits, losses
from gdpa.train.storage.checkpoint import write_whole

MODEL = "model.pt"


def folder_of(out: Path, step: int) -> Path:
    return out / f"nonfinite-step-{step:08d}"


def save_model(folder: Path, state: dict[str, Any]) -> None:
    """step, problem, config, features and the weights before the step."""
    write_whole(folder / MODEL, lambda file: torch.save(state, file))


def save_batches(folder: Path, rank: int, parts: tuple[Batch, ...]) -> None:
    plain = [to_plain(part) for part in parts]
    write_whole(folder / f"batch-rank{rank}.pt", lambda file: torch.save(plain, file))


def to_plain(batch: Batch) -> dict[str, Any]:
    """Tensors and dictionaries only, which torch.load takes with weights_only."""
    sequences, bags = ({k: dict(vars(v)) for k, v in held.items()} for held in (batch.sequences, batch.bags))
    return {**vars(batch), "sequences": sequences, "bags": bags}


def from_plain(values: dict[str, Any]) -> Batch:
    jagged = (values["sequences"], values.get("bags", {}))
    sequences, bags = ({k: PackedEvents(**events) for k, events in held.items()} for held in jagged)
    return Batch(**{**values, "sequences": sequences, "bags": bags})


def replay(folder: str | Path, build: Build | None = None, *, trust: bool = False) -> Table:
    """Forward and backward of each saved batch with the weights before the step, and where inf or NaN appears first.

    ``trust``: run what the folder names as module:function, see :func:`load_model`.
    """
    folder = Path(folder)
    if not (folder / MODEL).is_file():
        raise ValueError(f"{str(folder)!r} contains no stopped step ({MODEL} is missing)")
    state = torch.load(folder / MODEL, map_location="cpu", weights_only=True)
    features = Features.from_dict(state["features"])
    config = ModelConfig(**state["config"]["model"])
    table = Table(title=f"step {state['step']}: {state['problem']}", title_justify="left")
    for column in ("batch", "samples", "loss", "samples with inf or NaN", "first layer", "gradients with inf or NaN"):
        table.add_column(column)
    for path in sorted(folder.glob("batch-rank*.pt")):
        for i, plain in enumerate(torch.load(path, map_location="cpu", weights_only=True)):
            model = build_own(build, features) if build else build_saved(config, features, trust, folder)
            model.load_state_dict(state["model"])
            batch = from_plain(plain)
            table.add_row(f"{path.name}[{i}]", str(len(batch)), *_replay(model, batch, state["config"]["dtype"]))
    return table


def _replay(model: nn.Module, batch: Batch, dtype: str) -> tuple[str, ...]:
    first: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not first and isinstance(output, Tensor) and not output.isfinite().all():
                first.append(name)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name or type(module).__name__))
    with autocast(torch.device("cpu"), dtype):
        logits = model(batch)
    check_logits(logits, batch)
    found = losses(logits, batch)
    found.mean().backward()
    bad = (~found.isfinite()).nonzero().flatten().tolist()
    gradients = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    return f"{found.mean():.6g}", _few(bad), first[0] if first else "-", _few(gradients)


def _few(found: list[Any]) -> str:
    return (", ".join(map(str, found[:5])) + (f", ... ({len(found)})" if len(found) > 5 else "")) or "-"
