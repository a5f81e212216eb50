"""Your own function in place of softmax: written in torch, differentiated and compiled by gdpa.

The function has one learned value per head, the threshold. A student learns it from a teacher's outputs.
"""

import torch
import torch.nn.functional as F

import gdpa


@gdpa.activation
def soft_threshold(s, threshold):
    """Squared softplus, let through smoothly above a threshold."""
    return F.softplus(s) ** 2 * torch.sigmoid(4 * (s - threshold))


def main(steps: int = 60) -> tuple[float, float]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, 48, 16) for _ in range(3))  # (batch, heads, length, head dimension)
    teacher = gdpa.attention(q, k, v, soft_threshold, params=(torch.tensor([0.5, 1.5]),))

    threshold = torch.zeros(2, requires_grad=True)
    optimiser = torch.optim.Adam([threshold], lr=0.1)
    losses = []
    for _ in range(steps):
        out = gdpa.attention(q, k, v, soft_threshold, params=(threshold,))
        loss = F.mse_loss(out, teacher)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.6f}, thresholds {threshold.tolist()} (the teacher's: 0.5 and 1.5)")
    print(gdpa.explain(q, k, v, soft_threshold, params=(threshold,)))
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
