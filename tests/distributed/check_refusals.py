"""What cannot be done is refused on every rank alike, before anything is sent, in words that name the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gdpa
import gdpa.distributed as gd
import gdpa.nn as gnn
from distributed.compare import mesh


def refused(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        call()


def check_parallelize(world: int) -> None:
    over = mesh(world)
    three = nn.Sequential(gnn.SelfAttention(16, 4), gnn.PMA(18, 3, 2))
    refused(
        ValueError,
        rf"layer '1' \(PMA\) has num_heads=3, which is not divisible by {world} ranks",
        lambda: gd.parallelize(three, over),
    )
    assert not any(hasattr(p, "placements") for p in three.parameters()), "refused half way"
    grouped = gnn.SelfAttention(16, 4, num_kv_heads=1)
    refused(ValueError, "layer SelfAttention has num_kv_heads=1", lambda: gd.parallelize(grouped, over))
    refused(ValueError, "contains no gdpa.nn layer", lambda: gd.parallelize(nn.Linear(2, 2), over))
    refused(TypeError, "module must be", lambda: gd.parallelize(torch.ones(2), over))
    refused(TypeError, "mesh must be a DeviceMesh", lambda: gd.parallelize(gnn.SelfAttention(16, 4), world))
    twice = gd.parallelize(gnn.SelfAttention(16, 4), over)
    refused(ValueError, "already", lambda: gd.parallelize(twice, over))
    refused(RuntimeError, "before parallelize", twice.reset_parameters)
    wrapped = fully_shard(gnn.SelfAttention(16, 4), mesh=over)
    refused(ValueError, "before fully_shard|its own forward", lambda: gd.parallelize(wrapped, over))
    tied = nn.Sequential(gnn.SelfAttention(16, 4), gnn.SelfAttention(16, 4))
    tied[1].qkv.weight = tied[0].qkv.weight
    refused(ValueError, "shares its parameter qkv.weight", lambda: gd.parallelize(tied, over))

    replaced = gnn.SelfAttention(16, 4)
    replaced.attention = nn.Identity()
    refused(ValueError, "attends with Identity", lambda: gd.parallelize(replaced, over))
    refused(ValueError, "attends with Identity", lambda: gd.context_parallel(replaced, over))

    class Other(gnn.SelfAttention):
        def forward(self, x: Any, positions: Any = None) -> Any:
            return x

    refused(ValueError, "its own forward", lambda: gd.parallelize(Other(16, 4), over))
    if world == 4:
        refused(ValueError, "one of its dimensions", lambda: gd.parallelize(gnn.SelfAttention(16, 4), mesh(2, 2)))
        refused(ValueError, "one of its dimensions", lambda: gd.context_parallel(gnn.SelfAttention(16, 4), mesh(2, 2)))


def check_context_parallel(world: int) -> None:
    over = mesh(world)
    refused(ValueError, "contains no gdpa.nn layer", lambda: gd.context_parallel(nn.Linear(2, 2), over))
    refused(TypeError, "mesh must be a DeviceMesh", lambda: gd.context_parallel(gnn.SelfAttention(16, 4), "keys"))
    twice = gd.context_parallel(gnn.PMA(16, 4, 2), over)
    refused(ValueError, "already", lambda: gd.context_parallel(twice, over))
    banded = gd.context_parallel(gnn.Attention(4, causal=True), over)
    cu = torch.tensor([0, 2, 5])
    q, k, dense = torch.randn(3, 4, 8), torch.randn(5, 4, 8), torch.randn(2, 5, 4, 8)
    refused(ValueError, "causal=True", lambda: banded(q, k, k, None, cu))
    refused(ValueError, "causal=True", lambda: banded(k, dense, dense, cu))
    refused(ValueError, "16 features", lambda: twice(torch.randn(2, 3, 5)))


def check_functions(world: int) -> None:
    q, rows, cu = torch.randn(2, 4, 5, 8), torch.randn(5, 4, 8), torch.tensor([0, 2, 5])
    sharded = distribute_tensor(q, mesh(world), [Shard(1)])
    refused(TypeError, "k is a DTensor", lambda: gd.attention(q, sharded, sharded))
    refused(TypeError, "q is a nested", lambda: gd.attention(torch.nested.nested_tensor([rows]), q, q))
    refused(ValueError, "window=", lambda: gd.attention_varlen(rows, rows, rows, cu, cu, window=(1, 1)))
    refused(ValueError, "causal=True", lambda: gd.attention_varlen(rows, rows, rows, cu, cu, causal=True))
    refused(TypeError, "group must be", lambda: gd.attention(q, q, q, group=1))
    refused(TypeError, "key_span must be", lambda: gd.attention(q, q, q, key_span=3))
    refused(ValueError, "no room for the 5 keys", lambda: gd.attention(q, q, q, key_span=(1, 5)))
    refused(ValueError, "4 dimensions", lambda: gd.attention(rows, q, q))
    refused(TypeError, "x must be", lambda: gd.key_part(torch.randn(3)))
    refused(ValueError, "sink=1.0 is added to the row sums", lambda: gd.attention(q, q, q, sink=1.0))
    refused(ValueError, "contradicts", lambda: gd.attention(q, q, q, "softmax", normalize="abs"))


def check_mixed(world: int) -> None:
    """Plain tensors beside DTensors: torch refuses them."""
    q, rows, cu = torch.randn(2, 4, 5, 8), torch.randn(5, 4, 8), torch.tensor([0, 2, 5])
    sharded = distribute_tensor(q, mesh(world), [Shard(1)])
    packed = distribute_tensor(rows, mesh(world), [Shard(1)])
    refused(RuntimeError, "mixed", lambda: gdpa.attention(sharded, q, q))
    refused(RuntimeError, "mixed", lambda: gdpa.attention_varlen(packed, packed, packed, cu, cu))
    slope = torch.rand(4)
    one = lambda s, a: torch.sigmoid(a * s)
    refused(RuntimeError, "mixed", lambda: gdpa.attention(sharded, sharded, sharded, one, params=(slope,)))
    replicated = distribute_tensor(slope, mesh(world), [Replicate()])
    assert gdpa.attention(sharded, sharded, sharded, one, params=(replicated,)).placements == (Shard(1),)
