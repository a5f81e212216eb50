"""The baseline without sequences: embeddings, an MLP of the dense features, layers of DOT and DCN, an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gdpa.data import Inputs
from gdpa.models import options
from gdpa.models.base import Interaction, Model, make_head
from gdpa.models.embedding import ContextTokens, Tables
from gdpa.models.features import Features


@dataclass(frozen=True)
class DLRMConfig:
    """Options of :class:`DLRM`.

    Args:
        dim: the width of embeddings and tokens.
        num_layers: interaction layers.
        cross_layers, cross_rank: of the cross network in each of them.
        hidden: the hidden widths of all MLPs.
    """

    dim: int = 64
    num_layers: int = 2
    cross_layers: int = 1
    cross_rank: int = 16
    hidden: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        options.sizes(self, "dim", "num_layers", "cross_layers", "cross_rank")
        options.widths(self, "hidden")


class DLRM(Model):
    """No sequence: DLRM's features with DHEN's interaction (arXiv 1906.00091, 2203.11014).

        X = tokens(dense, sparse)      X <- Interaction(X), num_layers times      logit = MLP(flatten(X))

    >>> log = gdpa.data.SyntheticLog()
    >>> DLRM(Features.of(log))(next(gdpa.data.batches(log, 8))).shape
    torch.Size([8])
    """

    Config: ClassVar[type] = DLRMConfig
    config: DLRMConfig

    def __init__(
        self,
        features: Features,
        config: DLRMConfig | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, config)
        c, factory = self.config, {"device": device, "dtype": dtype}
        self.tables = Tables(features, c.dim, factory, columns={})
        self.context = ContextTokens(features, c.dim, c.hidden, factory)
        n = self.context.num_tokens
        self.layers = nn.ModuleList(interaction(n, n, c, factory) for _ in range(c.num_layers))
        self.head = make_head(features, [n * c.dim, *c.hidden], factory)

    def ignored(self) -> tuple[str, ...]:
        """All of them: it has no part that reads sequences."""
        return tuple(f"{s.name}.{name}" for s in self.features.sequences for name in (*s.vocabularies, *s.values))

    def forward(self, batch: Inputs) -> Tensor:
        self.features.check(batch)
        x = self.context(batch.dense, self.tables(batch))
        for layer in self.layers:
            x = self._run(layer, x)
        return self.head(x.flatten(1)).squeeze(1)

    def _needs_candidates(self) -> str | None:
        return "it reads no history, so that its forward is all there is"


def interaction(num_tokens: int, out_tokens: int, c: Any, factory: dict[str, Any]) -> Interaction:
    """A layer by the options that the models' configs share."""
    return Interaction(
        num_tokens, out_tokens, c.dim, cross_layers=c.cross_layers, cross_rank=c.cross_rank, hidden=c.hidden,
        factory=factory,
    )  # fmt: skip
