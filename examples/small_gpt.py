"""A small GPT-like model on short sequences, where the host decides the speed: gdpa beside softmax attention.

Both models are the same but for one line. On a GPU it prints training steps per second of each, eager and with
``torch.compile(mode="reduce-overhead")``, which captures the whole step of the model in CUDA graphs.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdpa


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def silu_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gdpa.attention(q, k, v, "silu", out_scale=1 / 16, causal=True)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (B, L, H, D) each
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, L, D)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class SmallGPT(nn.Module):
    def __init__(self, attend, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


def make_batch(vocabulary: int, batch: int, length: int, device: str) -> Tensor:
    """Each token follows from the one before: tokens[i + 1] = 5 tokens[i] + 7, from a random first one."""
    tokens = torch.randint(vocabulary, (batch, 1))
    for _ in range(length):
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 7) % vocabulary], dim=1)
    return tokens.to(device)


def train(attend, device: str, steps: int, compiled: bool, **sizes: int) -> tuple[list[float], float]:
    """The losses, and steps per second over the second half."""
    torch.manual_seed(0)
    batch, vocabulary = sizes.pop("batch"), 64
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = SmallGPT(attend, vocabulary, **sizes).to(device, dtype)
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=device == "cuda")
    tokens = make_batch(vocabulary, batch, sizes["length"], device)
    losses = []
    for step in range(steps):
        if step == steps // 2:
            losses[-1].item()  # waits for the GPU
            start = time.perf_counter()
        loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach().clone())  # the next step of a CUDA graph writes where this one did
    last = losses[-1].item()
    rate = (steps - steps // 2) / (time.perf_counter() - start)
    return [float(losses[0]), last], rate


def main() -> tuple[float, float]:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    sizes = {"width": 256, "layers": 4, "heads": 4, "length": 256, "batch": 8} if on_gpu else {
        "width": 32, "layers": 2, "heads": 2, "length": 24, "batch": 4
    }  # fmt: skip
    steps = 200 if on_gpu else 24
    for compiled in (False, True) if on_gpu else (False,):
        (first, last), rate = train(silu_attention, device, steps, compiled, **sizes)
        _, softmax_rate = train(softmax_attention, device, steps, compiled, **sizes)
        way = "reduce-overhead" if compiled else "eager"
        print(f"{way}: loss {first:.3f} -> {last:.3f}; steps/s: gdpa {rate:.1f}, softmax {softmax_rate:.1f}")
    return first, last


if __name__ == "__main__":
    main()
