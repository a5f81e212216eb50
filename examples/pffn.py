"""A personalised feed-forward network (PFFN): its two weight matrices are generated for each user, and are K and V.

For user u, head h and event x:  PFFN(x) = sum_j f(<x, K_uhj>) V_uhj,  a feed-forward layer with d_ff hidden units whose
weights come from the user's other features. The events are jagged, the weights dense. Heads use different functions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa

FEATURES, WIDTH, HEADS, HIDDEN, MAX_EVENTS = 8, 32, 2, 16, 10


class PersonalisedFFN(nn.Module):
    """events (rows, WIDTH) of all users end to end, features (users, FEATURES) -> (rows, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        d = WIDTH // HEADS
        self.norm, self.generate = nn.LayerNorm(WIDTH), nn.Linear(FEATURES, 2 * HIDDEN * HEADS * d)

    def forward(self, events: Tensor, features: Tensor, cu_seqlens: Tensor) -> Tensor:
        q = self.norm(events).view(-1, HEADS, WIDTH // HEADS)
        weights = self.generate(features).view(-1, 2, HIDDEN, HEADS, WIDTH // HEADS)
        k, v = weights.unbind(1)  # (users, HIDDEN, HEADS, D) each: the first and the second weight
        out = gdpa.attention_varlen(q, k, v, cu_seqlens, None, ["gelu", "silu"], max_seqlen_q=MAX_EVENTS)
        return events + out.flatten(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pffn, self.head = PersonalisedFFN(), nn.Linear(WIDTH, 1)

    def forward(self, events: Tensor, features: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.head(self.pffn(events, features, cu_seqlens)).squeeze(-1)


def batch(users: int, taste: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whether a user likes an event depends on both: no weights shared by all users can say."""
    counts = torch.randint(0, MAX_EVENTS + 1, (users,))
    features, events = torch.randn(users, FEATURES), torch.randn(int(counts.sum()), WIDTH)
    liked = ((features @ taste).repeat_interleave(counts, dim=0) * events).sum(-1) > 0
    return events, features, F.pad(counts.cumsum(0), (1, 0)).int(), liked.float()


def main(steps: int = 100) -> tuple[float, float]:
    torch.manual_seed(0)
    taste = torch.randn(FEATURES, WIDTH)
    model = Model()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        events, features, cu_seqlens, liked = batch(64, taste)
        loss = F.binary_cross_entropy_with_logits(model(events, features, cu_seqlens), liked)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
