"""A whole model as a program of torch.export, for batches of any size and histories of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from gdpa.compat import symbolic_shapes_config as symbolic
from gdpa.data import Batch
from gdpa.serving import aoti


def export(model: nn.Module, batch: Batch) -> ExportedProgram:
    """``model``, in evaluation, as a program that takes the Inputs of any batch with the columns of ``batch``.

        program = gdpa.serving.export(model, batch)
        torch.export.save(program, "model.pt2")
        # in another process, which imports gdpa.serving for its operators:
        score = torch.export.load("model.pt2").module()
        logits = score(batch.inputs())

    ``batch`` is an example: only its numbers of columns, its types and its device stay. It needs at least two samples
    and some events of each sequence and ids of each bag, since what torch sees once as 0 or 1 it may take for a
    constant. The model itself is left as it is, in training or not.
    """
    _check(model, batch)
    training = model.training
    inputs = batch.inputs()
    try:
        # Without this torch.export keeps sizes 0 and 1 out: one request, or a user without events.
        with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):
            return torch.export.export(model.eval(), (inputs,), dynamic_shapes=(dynamic_shapes(inputs),))
    finally:
        model.train(training)


@overload
def package(model: nn.Module, batch: Batch, path: str | Path, options: dict[str, Any] | None = None) -> Path: ...


@overload
def package(model: ExportedProgram, *, path: str | Path, options: dict[str, Any] | None = None) -> Path: ...


def package(
    model: nn.Module | ExportedProgram, batch: Batch | None = None, path: str | Path | None = None,
    options: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """``model`` compiled by AOTInductor, weights included, in the file ``path`` (.pt2). Needs a C++ compiler.

        gdpa.serving.package(model, batch, "model.pt2")
        # in another process, which imports gdpa.serving for its operators:
        score = torch._inductor.aoti_load_package("model.pt2")
        logits = score(batch.inputs())

    Of any other module that uses gdpa, give what torch.export.export makes of it, without a batch:

        gdpa.serving.package(program, path="module.pt2")

    torch._inductor.aoti_compile_and_package itself makes a file that fails at its first call: it hands a call without
    tables None for them.
    """
    if path is None or Path(path).suffix != ".pt2":
        raise ValueError(
            f"path must end in .pt2, as AOTInductor's packages do, got {path if path is None else str(path)!r}"
        )
    if not isinstance(model, ExportedProgram):
        model = export(model, batch)  # type: ignore[arg-type]  # which refuses what is no batch
    elif batch is not None:
        raise TypeError(
            f"batch must be left out, since an ExportedProgram has its own example, got {type(batch).__name__}; "
            "package(program, path=...)"
        )
    from gdpa.compat import aoti_compile_and_package  # which takes a second

    with aoti.with_served_operators(model) as program:
        aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    return Path(path)


def dynamic_shapes(inputs: Any) -> Any:
    """What torch.export is told of the sizes of ``inputs`` (Batch, Inputs, PackedEvents or a tensor): the first
    dimension of every tensor is open, and so is every number."""
    if isinstance(inputs, Tensor):
        return {0: Dim.DYNAMIC}
    if isinstance(inputs, int):
        return Dim.DYNAMIC
    if isinstance(inputs, dict):
        return {name: dynamic_shapes(value) for name, value in inputs.items()}
    # Nodes of other types are lists to torch.export, without the fields that are None.
    return [dynamic_shapes(value) for value in vars(inputs).values() if value is not None]


def _check(model: Any, batch: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a gdpa.data.Batch, got {type(batch).__name__}")
    if len(batch) < 2:
        raise ValueError(f"batch is the example of an export, and needs at least 2 samples, got {len(batch)}")
    for name, events in (*batch.sequences.items(), *batch.bags.items()):
        if events.ids.shape[0] < 2:
            raise ValueError(
                f"batch is the example of an export, and needs at least 2 events of {name!r}, got {events.ids.shape[0]}"
            )
