"""parallelize: every layer with heads against itself on one process, its weights, training, checkpoints."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gdpa.distributed as gd
import gdpa.nn as gnn
from distributed.compare import (
    LAYERS,
    LEARNING_RATE,
    close,
    loss,
    mesh,
    same_losses,
    same_parameters,
    same_step,
    sequences,
    train,
    untouched,
)
from nn import cases
from support import FULL, in_turn

FORMS = ("jagged", "dense")
SOME = ["self-heads", "seeds-norm", "pma-norm", "pffn"]  # of each kind one


def names(world: int) -> list[str]:
    """self-norm has two heads of keys."""
    return [name for name in (LAYERS if FULL or world == 2 else SOME) if name != "self-norm" or world == 2]


def batches(name: str, dtype: torch.dtype = torch.float64, steps: int = 5 if FULL else 3) -> list[tuple]:
    drawn = []
    for step in range(steps):
        values, make, n = sequences("jagged", dtype)
        drawn.append((make(values.detach() * (1 + 0.01 * step)), *(c.detach() for c in cases.context(name, n, dtype))))
    return drawn


def check_layers(world: int) -> None:
    for i, name in enumerate(names(world)):
        for form in in_turn(FORMS, i) if world == 2 else FORMS[:1]:
            same_step(name, gd.parallelize(cases.made(name), mesh(world)), cases.made(name), form)
    same_step("self", gd.parallelize(cases.made("self"), mesh(world)), cases.made("self"), "nested")
    same_step("pma", gd.parallelize(cases.made("pma"), mesh(world)), cases.made("pma"), "bounded")


def check_training(world: int) -> None:
    """Some steps of SGD, in float64 and in float32."""
    for dtype in (torch.float64, torch.float32) if FULL or world == 2 else (torch.float64,):
        for name in names(world) if FULL and world == 2 else SOME:
            mine, one = gd.parallelize(untouched(name, dtype), mesh(world)), untouched(name, dtype)
            same_losses(name, *(train(m, batches(name, dtype)) for m in (mine, one)), dtype)
            same_parameters(name, mine, one)


def check_grouped_queries(world: int) -> None:
    """With norms and rotary positions, two heads of queries to one of keys on every rank."""
    slopes = torch.linspace(0, 1, 2 * world)
    layer = gnn.SelfAttention(
        cases.C, 2 * world, cases.f.leaky, params=(slopes,), num_kv_heads=world, head_dim=6, qk_norm=True, rotary=100.0,
        window=(3, 2), dtype=torch.float64,
    )  # fmt: skip
    one = cases.stirred(layer)
    same_step("grouped", gd.parallelize(copy.deepcopy(one), mesh(world)), one, "jagged")


def check_weights(world: int) -> None:
    """Sharded, with the names, shapes and values they had, and no more memory than a share."""
    one, mine = cases.made("self-params"), gd.parallelize(cases.made("self-params"), mesh(world))
    sharded = {name for name, p in mine.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {"qkv.weight", "qkv.bias", "out.weight", "attention.params.0"}
    assert list(mine.state_dict()) == list(one.state_dict())
    for name, p in mine.named_parameters():
        assert torch.equal(p.full_tensor() if name in sharded else p, one.get_parameter(name))
    shard = mine.qkv.weight.to_local()
    assert shard.untyped_storage().nbytes() * world == one.qkv.weight.nbytes
    assert "heads over" in repr(mine)


def check_inside_a_model(world: int) -> None:
    """All layers of a module, an Attention on its own among them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = nn.Sequential(nn.PReLU(4), nn.SiLU(), nn.PReLU())  # a number for each head, and one for all
            self.pool = gnn.HierarchicalSeedPooling(16, 4, 6, 3, 2, shape, dtype=torch.float64)
            self.pffn = gnn.PFFN(16, 4, 5, 3, 16, ["gelu", "silu", "relu", "gelu"], dtype=torch.float64)
            self.attend = gnn.Attention(4, cases.f.leaky, params=(0.1,), causal=True, dtype=torch.float64)

        def forward(self, x: gnn.Jagged) -> torch.Tensor:
            y = self.pffn(x, self.pool(x))
            heads = y.values.unflatten(-1, (4, 4))
            return self.attend(heads, heads, heads, x.cu_seqlens, x.cu_seqlens).flatten(-2)

    torch.manual_seed(0)
    one = cases.stirred(Model())
    mine = gd.parallelize(copy.deepcopy(one), mesh(world))
    same_step("model", mine, one, "jagged")


class Changing(nn.Module):
    """Another function in training, and another one for each setting; it reads where a score stands."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.power = nn.Parameter(torch.full((4,), 0.3)), 1

    def forward(self, s: torch.Tensor, *, h: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        weight = (1 + kv_idx + 2 * h) ** self.power
        return torch.tanh(s) * weight if self.training else self.slope * s / weight


def check_functions_that_change(world: int) -> None:
    """Heads or keys over ranks, a layer computes what its module says at the call; compiled, too."""
    for divide in (gd.parallelize, gd.context_parallel):
        one = gnn.SelfAttention(16, 4, Changing(), dtype=torch.float64)
        mine = divide(copy.deepcopy(one), mesh(world))
        one.load_state_dict({n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in mine.state_dict().items()})
        x = torch.linspace(-1, 1, 3 * 8 * 16, dtype=torch.float64).view(3, 8, 16)
        calls = [mine, torch.compile(mine, backend="eager", fullgraph=True)]
        seen = []
        for call in calls:
            for training, power in ((True, 1), (False, 1), (False, 2)):
                for layer in (one, mine):
                    layer.train(training).attention.function.power = power
                seen.append(one(x))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    torch.testing.assert_close(call(x), seen[-1])
        assert not any(torch.equal(seen[0], other) for other in seen[1:3])


def check_compiled(world: int) -> None:
    """One graph, as without heads over ranks."""
    for name in ("self-heads", "pma-norm", "hierarchical", "pffn") if FULL and world == 2 else ():
        mine, one = gd.parallelize(cases.made(name), mesh(world)), cases.made(name)
        for module in (torch.compile(mine, backend="aot_eager", fullgraph=True), one):
            values, make, n = sequences("jagged")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss(module(make(values), *cases.context(name, n))).backward()
        same_parameters(name, mine, one, gradients=True)


def check_first_rank_decides(world: int) -> None:
    """Ranks that start from different weights go on with those of the first, buffers and other layers included."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 16), gnn.SelfAttention(16, 4), nn.BatchNorm1d(7))
    model[2].running_mean += dist.get_rank()
    gd.parallelize(model, mesh(world))
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 16), gnn.SelfAttention(16, 4), nn.BatchNorm1d(7))
    same_parameters("seeded", model, one)
    assert model[2].running_mean.abs().max() == 0


def check_clipping(world: int) -> None:
    for norm_type in (2.0, float("inf"), 1.0):
        mine, one = gd.parallelize(cases.made("self-heads"), mesh(world)), cases.made("self-heads")
        for module in (mine, one):
            values, make, _ = sequences("jagged")
            (loss(module(make(values))) * 100).backward()
        total = gd.clip_grad_norm_(mine.parameters(), 0.5, norm_type)
        close(total, torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5, norm_type), "norm")
        same_parameters("clipped", mine, one, gradients=True)
    assert gd.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0


def check_checkpoints(world: int) -> None:
    """Full state dicts go out of a sharded module and into one."""
    one = cases.made("pma-norm")
    mine = gd.parallelize(cases.made("pma-norm"), mesh(world))
    full = get_model_state_dict(mine, options=StateDictOptions(full_state_dict=True))
    assert full.keys() == one.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(full[name], value)
    other = gd.parallelize(cases.stirred(cases.made("pma-norm"), seed=5), mesh(world))
    set_model_state_dict(other, one.state_dict(), options=StateDictOptions(full_state_dict=True))
    same_parameters("loaded", other, one)
    other.load_state_dict(mine.state_dict())
    same_parameters("loaded again", copy.deepcopy(other), one)


def check_with_fully_shard(world: int) -> None:
    """Heads over one dimension of a mesh, parameters over the other, each of whose ranks has data of its own."""
    if world != 4:
        return
    both = mesh(2, 2)
    make = lambda: nn.Sequential(*(untouched(name, torch.float64) for name in ("self-hstu", "self-params", "seeds")))
    mine, one = gd.parallelize(make(), both["inner"]), make()
    for layer in mine:
        fully_shard(layer, mesh=both["outer"])
    fully_shard(mine, mesh=both["outer"])
    data = [torch.randn(4, 7, cases.C, dtype=torch.float64) for _ in range(5)]
    losses = train(mine, [(x.chunk(2)[both.get_local_rank("outer")],) for x in data])
    optimizer, expected = torch.optim.SGD(one.parameters(), lr=LEARNING_RATE), []
    for x in data:
        optimizer.zero_grad()
        parts = [loss(one(part)) for part in x.chunk(2)]
        (sum(parts) / 2).backward()
        optimizer.step()
        expected.append(parts[both.get_local_rank("outer")].item())
    close(torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), "losses")
    for (name, p), p_one in zip(mine.named_parameters(), one.parameters(), strict=True):
        close(p, p_one, name)
