"""Jagged self-attention in a training loop: HSTU's silu(s) / N over user histories of different lengths, no padding.

The task needs the history: has this user seen this item before?
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa

ITEMS, WIDTH, HEADS, MAX_LENGTH = 12, 32, 2, 20


class JaggedBlock(nn.Module):
    """x (rows, WIDTH) of all users end to end -> the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)  # views, no copies
        mixed = gdpa.attention_varlen(
            q, k, v, cu_seqlens, cu_seqlens, "silu", causal=True, out_scale=1 / MAX_LENGTH, max_seqlen_q=MAX_LENGTH,
            max_seqlen_k=MAX_LENGTH,
        )  # fmt: skip
        return x + self.out(mixed.flatten(1))


class SeenBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.block, self.head = nn.Embedding(ITEMS, WIDTH), JaggedBlock(), nn.Linear(WIDTH, 1)

    def forward(self, items: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.head(self.block(self.items(items), cu_seqlens)).squeeze(-1)


def batch(users: int) -> tuple[Tensor, Tensor, Tensor]:
    """(items, whether each occurs earlier in its history, cu_seqlens); some users have no history yet."""
    lengths = torch.randint(0, MAX_LENGTH + 1, (users,))
    items = torch.randint(ITEMS, (int(lengths.sum()),))
    seen = [(part[:, None] == part).tril(-1).any(-1) for part in items.split(lengths.tolist())]
    return items, torch.cat(seen).float(), F.pad(lengths.cumsum(0), (1, 0)).int()


def main(steps: int = 100) -> tuple[float, float]:
    torch.manual_seed(0)
    model = SeenBefore()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        items, seen, cu_seqlens = batch(users=32)
        loss = F.binary_cross_entropy_with_logits(model(items, cu_seqlens), seen)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
