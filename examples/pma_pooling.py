"""Pooling by attention (PMA): a few learned queries, shared by the batch, summarise sets of any size.

The task: how many different symbols does a set hold?
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa

SYMBOLS, WIDTH, HEADS, SEEDS, MAX_SIZE = 8, 32, 2, 4, 12


class Pool(nn.Module):
    """x (rows, WIDTH) of all sets end to end -> (sets, SEEDS * WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.empty(SEEDS, HEADS, WIDTH // HEADS))  # (queries, heads, D): one block for all
        nn.init.xavier_uniform_(self.seeds)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        k, v = self.kv(x).view(-1, 2, HEADS, WIDTH // HEADS).unbind(1)
        pooled = gdpa.attention_varlen(self.seeds, k, v, None, cu_seqlens, "gelu", max_seqlen_k=MAX_SIZE)
        return pooled.view(cu_seqlens.numel() - 1, -1)  # from (sets * SEEDS, HEADS, D); an empty set pools to zero


class CountKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.pool = nn.Embedding(SYMBOLS, WIDTH), Pool()
        self.head = nn.Sequential(nn.Linear(SEEDS * WIDTH, 64), nn.GELU(), nn.Linear(64, SYMBOLS + 1))

    def forward(self, symbols: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.head(self.pool(self.symbols(symbols), cu_seqlens))


def batch(sets: int) -> tuple[Tensor, Tensor, Tensor]:
    """(symbols, how many kinds each set has, cu_seqlens)."""
    sizes = torch.randint(0, MAX_SIZE + 1, (sets,))
    symbols = torch.randint(SYMBOLS, (int(sizes.sum()),))
    kinds = torch.tensor([len(part.unique()) for part in symbols.split(sizes.tolist())])
    return symbols, kinds, F.pad(sizes.cumsum(0), (1, 0)).int()


def main(steps: int = 100) -> tuple[float, float]:
    torch.manual_seed(0)
    model = CountKinds()
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        symbols, kinds, cu_seqlens = batch(sets=64)
        loss = F.cross_entropy(model(symbols, cu_seqlens), kinds)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
