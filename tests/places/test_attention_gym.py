"""The element-wise score mods and mask mods of attention-gym, each written as docs/positions.md says: softmax of them
against the same in eager float64, values and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gdpa
from gdpa import masks

B, H, L, D = 2, 2, 36, 8
GRID = 6  # rows are a canvas of 6 x 6
RNG = torch.Generator().manual_seed(0)
IDS = torch.arange(L).expand(B, L) // 9
INTERVALS = torch.tensor([[0, 20], [4, 30], [30, 36]])
LENGTHS = torch.tensor([5, 11])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RNG, dtype=torch.float64)


# ---- score mods: (the mod, its tables) -----------------------------------------------------------------------------
def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return 3.0 * torch.tanh(score / 3.0)


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + (kv_idx - q_idx) * torch.exp2(-((h + 1) * 8.0 / H))


def weird(s: Tensor, bias: Tensor, which: Tensor, *, b: Tensor, h: Tensor, q_idx: Tensor) -> Tensor:
    return s + bias[b, h, which[b * 0], q_idx]


MODS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "noop": (lambda score, b, h, q_idx, kv_idx: score, ()),
    "generate_tanh_softcap": (softcap, ()),
    "generate_alibi_bias": (alibi, ()),
    "relative_1d": (lambda s, t, *, q_idx, kv_idx: s + t[(q_idx - kv_idx).abs()], (random(2 * L),)),
    "absolute_2d": (lambda s, t, *, q_idx, kv_idx: s + t[q_idx, kv_idx], (random(L, L),)),
    "head_specific": (lambda s, t, *, h, q_idx, kv_idx: s + t[h, q_idx, kv_idx], (random(H, L, L),)),
    "batch_head": (lambda s, t, *, b, h, q_idx, kv_idx: s + t[b, h, q_idx, kv_idx], (random(B, H, L, L),)),
    "multiplicative": (lambda s, t, *, q_idx: s * t[q_idx], (random(L),)),
    "local_window": (lambda s, t, *, q_idx, kv_idx: s + t[(q_idx - kv_idx + 4).clamp(0, 8)], (random(9),)),
    "global_tokens": (lambda s, t, *, kv_idx: s + t[kv_idx], (random(L),)),
    "weird": (weird, (random(B, H, 4, L), torch.tensor([2]))),
    "offset": (lambda s, t, o, *, q_idx: s + t[o[q_idx]], (random(L), torch.randint(0, L, (L,), generator=RNG))),
}


# ---- mask mods: (what is given as mask=, the mod, its tables) ------------------------------------------------------
def natten(place: Callable[[Tensor], tuple[Tensor, Tensor]], kernel: int = 3) -> Callable[..., Tensor]:
    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = [
            (a.clamp(kernel // 2, GRID - 1 - kernel // 2) - c).abs() <= kernel // 2
            for a, c in zip(place(q_idx), place(kv_idx), strict=True)
        ]
        return seen[0] & seen[1]

    return near


def tiled(i: Tensor) -> tuple[Tensor, Tensor]:
    tile, inside = i // 4, i % 4
    return tile % 3 * 2 + inside % 2, tile // 3 * 2 + inside // 2


def morton(i: Tensor) -> tuple[Tensor, Tensor]:
    def every_other_bit(x: Tensor) -> Tensor:
        x = x & 0x55
        x = (x | (x >> 1)) & 0x33
        return (x | (x >> 2)) & 0x0F

    return every_other_bit(i), every_other_bit(i >> 1)


def sta(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """2-d: tiles of 2 x 2 on a canvas of 3 x 3 of them, kernels of 2 x 2 tiles, and the last rows are text."""
    (qy, qx), (ky, kx) = ((i // 4 // 3, i // 4 % 3) for i in (q_idx, kv_idx))
    inside = [(c >= a.clamp(1, 2) - 1) & (c <= a.clamp(1, 2)) & (a < 3) & (c < 3) for a, c in ((qy, ky), (qx, kx))]
    return (inside[0] & inside[1]) | (q_idx >= 32) | (kv_idx >= 32)


def sta_3d(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Frames of 3 x 4, tiles of one frame of 3 x 2, kernels of 3 x 1 x 1 tiles."""
    (qt, qx), (kt, kx) = ((i // 12, i // 6 % 2) for i in (q_idx, kv_idx))
    return ((qt.clamp(1, 1) - kt).abs() <= 1) & (qx == kx)


def spatial(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < 4) | (q_idx < 4) | ((q_idx - kv_idx).abs() < 8)


def temporal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx < 4) | (q_idx < 4) | (((q_idx - 4) % 8 - (kv_idx - 4) % 8).abs() < 2)


def dilated(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    gap = (q_idx - kv_idx).abs()
    return (gap <= 9) & (gap % 3 == 0)


def sinks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx <= 6) | (kv_idx < 2))


def vision(q_idx: Tensor, kv_idx: Tensor, intervals: Tensor) -> Tensor:
    image = kv_idx // 12
    return (q_idx >= intervals[image, 0]) & (q_idx < intervals[image, 1])


def documents(b: Tensor, q_idx: Tensor, kv_idx: Tensor, ids: Tensor) -> Tensor:
    return ids[b, q_idx] == ids[b, kv_idx]


def prefix_lm(b: Tensor, q_idx: Tensor, kv_idx: Tensor, lengths: Tensor) -> Tensor:
    return (kv_idx < lengths[b]) | (q_idx >= kv_idx)


def batchify(b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(b == 0, q_idx >= kv_idx, (q_idx - kv_idx).abs() < 5)


causal: Callable[..., Tensor] = lambda q_idx, kv_idx: q_idx >= kv_idx
MASKS: dict[str, tuple[Any, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "causal_mask": (masks.causal(), causal, ()),
    "generate_sliding_window": (
        masks.window(7, 0), lambda q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 7), (),
    ),
    "generate_dilated_sliding_window": (dilated, dilated, ()),
    "generate_prefix_lm_mask": (masks.prefix(LENGTHS) | masks.causal(), prefix_lm, (LENGTHS,)),
    "generate_doc_mask_mod": (
        masks.document(IDS) & masks.causal(),
        lambda b, q_idx, kv_idx, ids: documents(b, q_idx, kv_idx, ids) & (q_idx >= kv_idx), (IDS,),
    ),
    "generate_vision_cross_attention_mask_mod": (gdpa.Mask(vision, (INTERVALS,)), vision, (INTERVALS,)),
    "generate_natten": (natten(lambda i: (i // GRID, i % GRID)), natten(lambda i: (i // GRID, i % GRID)), ()),
    "generate_tiled_natten": (natten(tiled), natten(tiled), ()),
    "generate_morton_natten": (natten(morton), natten(morton), ()),
    "generate_sta_mask_mod_2d": (sta, sta, ()),
    "generate_sta_mask_mod_3d": (sta_3d, sta_3d, ()),
    "generate_spatial_head_mask_mod": (masks.from_flex(spatial), spatial, ()),
    "generate_temporal_head_mask_mod": (temporal, temporal, ()),
    "generate_sink_mask": (sinks, sinks, ()),
    "batchify_mask_mod": (batchify, batchify, ()),
}  # fmt: skip


def inputs() -> list[Tensor]:
    return [random(B, H, L, D).requires_grad_() for _ in range(3)]


def positions() -> dict[str, Tensor]:
    i = torch.arange(L)
    return {"b": torch.arange(B)[:, None, None, None], "h": torch.arange(H)[:, None, None], "q_idx": i[:, None],
            "kv_idx": i}  # fmt: skip


def called(fn: Callable[..., Tensor], first: tuple[Any, ...], last: tuple[Any, ...] = ()) -> Tensor:
    """``fn`` on whole grids of positions; tables are what its other arguments take, behind the score or at the end."""
    code = fn.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    at = {name: value for name, value in positions().items() if name in names}
    others = [name for name in names if name not in at]
    return fn(**dict(zip(others, (*first, *last), strict=True)), **at)


def agree(got: Tensor, want: Tensor, leaves: list[Tensor]) -> None:
    weights = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view_as(got)
    grads = [torch.autograd.grad((y * weights).sum(), leaves) for y in (got, want)]
    torch.testing.assert_close([got, *grads[0]], [want, *grads[1]], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MODS)
def test_score_mods(name: str) -> None:
    mod, tables = MODS[name]
    q, k, v = inputs()
    learned = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tables]
    flex = mod.__code__.co_varnames[1:5] == ("b", "h", "q_idx", "kv_idx") and not tables
    if flex:
        fn: Callable[..., Tensor] = lambda score, b, h, q_idx, kv_idx: torch.exp(mod(score, b, h, q_idx, kv_idx))
    else:
        fn = _with_exp(mod)
    got = gdpa.attention(q, k, v, fn, tables=learned, normalize="sum")
    s = q @ k.mT / D**0.5
    want = called(mod, (s,), tuple(learned)).softmax(-1) @ v
    agree(got, want, [q, k, v, *(t for t in learned if t.is_floating_point())])


def _with_exp(mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """exp of a mod, with the positions that the mod asks for."""
    import inspect

    def fn(*args: Any, **at: Any) -> Tensor:
        return torch.exp(mod(*args, **at))

    fn.__wrapped__ = mod  # type: ignore[attr-defined]
    fn.__signature__ = inspect.signature(mod)  # type: ignore[attr-defined]
    return fn


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str) -> None:
    mask, mod, tables = MASKS[name]
    q, k, v = inputs()
    seen = called(mod, tables).expand(B, H, L, L)
    assert seen.any(-1).any()
    assert not seen.all()
    s = (q @ k.mT / D**0.5).masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    want = torch.where(some, s.masked_fill(~some, 0.0).softmax(-1), 0.0) @ v
    agree(gdpa.attention(q, k, v, "softmax", mask=mask), want, [q, k, v])


def test_the_table_of_the_docs_has_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs" / "positions.md").read_text()
    table = text.partition("| attention-gym |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(MODS) | set(MASKS) <= named
