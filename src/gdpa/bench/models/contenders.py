"""Who is measured on a whole model: gdpa, and ways to train the same model on padded tensors.

    gdpa            the model as it is, on jagged batches
    padded-eager    q, k and v padded around each attention, the formula in PyTorch, the result packed again
    padded-sdpa     the same with F.scaled_dot_product_attention: softmax, so another function, but the fastest dense
                    kernels there are; cuDNN first, then flash, then memory-efficient, whichever takes the mask
    batch-eager     the whole batch padded, as most training code does: linear layers and norms work on padding too
    batch-sdpa      the same with F.scaled_dot_product_attention

Only by name: gdpa-BACKEND (gdpa-triton); gdpa-rowwise_adagrad and gdpa-rowwise_adam, whose tables have gradients of the
rows that were read alone, and those updates; padded-sdpa-KERNEL and batch-sdpa-KERNEL, which try that kernel first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from gdpa import backends
from gdpa.api import autocast
from gdpa.bench.models.cases import ModelCase, features, make_model
from gdpa.bench.models.padded import BatchEager, BatchSoftmax, WholeBatch, pad
from gdpa.data import Batch
from gdpa.models import cores
from gdpa.nn.attention import unpacked
from gdpa.spec import Loaded
from gdpa.train.run.rowwise import ROWWISE

SOFTMAX = "softmax"
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
EVERY_KERNEL = tuple(KERNELS.values())  # in the order in which they are tried


class PaddedEager(cores.PaddedEager):
    """Casts before it pads, as gdpa casts before it computes."""

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*autocast(*unpacked(q, k, v)), *args, **kwargs)


class PaddedSoftmax(cores.PaddedSoftmax):
    """Casts before it pads, as gdpa casts before it computes."""

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*autocast(*unpacked(q, k, v)), *args, **kwargs)


@dataclass(frozen=True)
class ModelContender:
    """``core``: what computes attention in place of gdpa. ``kernels``: those that SDPA may use, best first.
    ``table_updates``: as of `gdpa train`; None for AdamW of dense gradients."""

    name: str
    core: Any = None
    backend: str | None = None
    whole_batch: bool = False
    kernels: tuple[SDPBackend, ...] = EVERY_KERNEL
    table_updates: str | None = None

    @property
    def ours(self) -> bool:
        return self.core is None

    def computes(self, function: Loaded) -> str:
        """The function it really computes."""
        return SOFTMAX if self.core in (PaddedSoftmax, BatchSoftmax) else function.name

    def make_model(self, case: ModelCase, function: Loaded, device: torch.device) -> nn.Module:
        """The model of ``case`` with this contender's attention."""
        model = make_model(case.model, case.scale, function, device, self.backend)
        if self.whole_batch:
            return WholeBatch(model, self.core, case.scale.batch, case.before)
        return model if self.core is None else cores.replace(model, self.core)

    def inputs(self, case: ModelCase, batches: list[Batch]) -> list[Any]:
        """What its model takes, made of ``batches`` once and untimed."""
        return [pad(batch, features(case.scale)) for batch in batches] if self.whole_batch else list(batches)


USUAL = (
    ModelContender("gdpa"),
    ModelContender("padded-eager", PaddedEager),
    ModelContender("padded-sdpa", PaddedSoftmax),
    ModelContender("batch-eager", BatchEager, whole_batch=True),
    ModelContender("batch-sdpa", BatchSoftmax, whole_batch=True),
)


def known() -> dict[str, ModelContender]:
    """Everybody, by name."""
    named = [ModelContender(f"gdpa-{name}", backend=name) for name in backends.BACKENDS]
    named += [ModelContender(f"gdpa-{updates}", table_updates=updates) for updates in ROWWISE]
    for label, kernel in KERNELS.items():
        named.append(ModelContender(f"padded-sdpa-{label}", PaddedSoftmax, kernels=_first(kernel)))
        named.append(ModelContender(f"batch-sdpa-{label}", BatchSoftmax, whole_batch=True, kernels=_first(kernel)))
    return {c.name: c for c in (*USUAL, *named)}


def _first(kernel: SDPBackend) -> tuple[SDPBackend, ...]:
    """That kernel wherever it takes the arguments; where it does not (flash takes no mask), any other."""
    return (kernel, *(other for other in EVERY_KERNEL if other != kernel))


def find(only: tuple[str, ...]) -> list[ModelContender]:
    """Those named in ``only``, or the usual ones."""
    everybody = known()
    for name in only:
        if name not in everybody:
            raise ValueError(f"contender {name!r} of --model is unknown; known: {', '.join(everybody)}")
    return [everybody[name] for name in only] or list(USUAL)
