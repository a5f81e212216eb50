"""A contender in the turns of a case: a load, or a GPU's heat, that comes and goes meets all contenders.

Each has TURNS turns of a part of its time. Between them it holds no memory of the device, so that everybody has as much
as it would have alone; its model and what torch.compile made of it stay, so that it compiles once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gdpa.bench.contenders.contender import in_one_line
from gdpa.bench.models.cases import ModelCase
from gdpa.bench.models.contenders import ModelContender
from gdpa.bench.models.profile import profile_steps
from gdpa.bench.models.step import Measured, StepEffort, StepWatch, Trainer
from gdpa.data import Batch

TURNS = 3


class Entrant:
    """``failed``: why it takes no more turns in this case."""

    def __init__(
        self,
        contender: ModelContender,
        make_trainer: Callable[[ModelCase, ModelContender], Trainer],
        effort: StepEffort,
    ) -> None:
        self.contender, self.make_trainer, self.effort = contender, make_trainer, effort
        self.trainer: Trainer | None = None
        self.begin()

    def begin(self) -> None:
        """Another case of the same model."""
        self.watch: StepWatch | None = None
        self.profile: dict[str, Any] | None = None
        self.failed: str | None = None

    def turn(self, case: ModelCase, batches: list[Batch], device: torch.device) -> None:
        """One of the turns. ``batches`` may lie on the host."""
        try:
            self._turn(case, batches, device)
        except Exception as e:
            self.failed = reason(e)

    def _turn(self, case: ModelCase, batches: list[Batch], device: torch.device) -> None:
        if self.trainer is None:
            self.trainer = self.make_trainer(case, self.contender)
        if self.watch is None:
            self.watch = StepWatch(self.trainer, self.effort, TURNS)
        self.watch.turn(self.contender.inputs(case, [batch.to(device) for batch in batches]))
        if self.profile is None:  # a CPU's has more entries, one for each operator, and takes longer to read
            self.profile = profile_steps(self.trainer, len(batches) if device.type == "cuda" else 1, device)

    def rest(self) -> None:
        if self.trainer is not None:
            self.trainer.rest()

    def found(self) -> tuple[Measured, dict[str, Any]] | str | None:
        """Times and profile of the turns so far, or why there are none; None before the first."""
        if self.failed is not None:
            return self.failed
        return None if self.watch is None or self.profile is None else (self.watch.measured(), self.profile)


def reason(error: Exception) -> str:
    """An error in a line. Compilers wrap what went wrong: the innermost has it. Memory may run out inside them too."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return "out of memory"
    return f"failed: {in_one_line(error)}"
