"""parallelize and context_parallel: gdpa.nn layers inside any module, made to run on several ranks in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from gdpa.distributed.collectives import shared
from gdpa.distributed.context import process_group
from gdpa.distributed.divided import DistributedAttention, divide_heads, divide_keys
from gdpa.distributed.linear import heads_in, heads_out, keys_out, shared_norm
from gdpa.distributed.split import offsets_in, span
from gdpa.nn import PFFN, PMA, Attention, Jagged, SeedPooling, SelfAttention
from gdpa.nn.jagged import Batch, batch

LAYERS = (SelfAttention, SeedPooling, PMA, PFFN)


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism over heads for every gdpa.nn layer inside ``module``, in place; returns ``module``.

    Each rank of ``mesh``, which has one dimension, computes its part of the heads of each SelfAttention, SeedPooling,
    PMA, HierarchicalSeedPooling, PFFN and Attention. Inputs and outputs are plain tensors, the same on all ranks, and
    so are the gradients: a layer does what it did before. Weights of projections and params per head become DTensors,
    sharded over ``mesh``, of the same names and shapes; all else stays a plain tensor on every rank. Parameters and
    buffers of the whole module are first made those of the mesh's first rank.

    Call it before the optimizer is made and before fully_shard, if that shards over another dimension of the mesh.

    >>> mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("heads",))
    >>> model = gdpa.distributed.parallelize(model, mesh)
    """
    _check(module, mesh)
    layers = list(_layers(module, "parallelize"))
    for name, layer in layers:
        _check_heads(name, layer, module, mesh)
    _broadcast(module, mesh)
    for _, layer in layers:
        _divide_heads(layer, mesh)
    return module


def context_parallel(module: nn.Module, mesh: DeviceMesh | ProcessGroup) -> nn.Module:
    """Context parallelism for every gdpa.nn layer inside ``module``, in place; returns ``module``.

    Each rank takes a part of the keys of each attention, and the partial outputs are summed. Inputs, outputs, weights
    and gradients are plain tensors, the same on all ranks. Poolings project only this rank's rows to keys and values.

    What is divided: of dense keys the rows; of packed keys of a pooling the rows, whichever sequences they belong to;
    of packed self-attention each sequence's keys, or under a band whole sequences. Keys of a PFFN are its hidden units.

    >>> model = gdpa.distributed.context_parallel(model, mesh["keys"])
    """
    keys = _key_mesh(module, mesh)
    layers = list(_layers(module, "context_parallel"))
    for name, layer in layers:
        attention = _attention(layer)
        if isinstance(attention, DistributedAttention) and attention.key_mesh is not None:
            raise ValueError(f"the keys of layer {name} are already divided among ranks")
    _broadcast(module, keys)
    for _, layer in layers:
        if isinstance(layer, SeedPooling | PMA):
            layer.register_forward_pre_hook(_OwnRows(keys), with_kwargs=True)
            keys_out(layer.kv, keys)
            divide_keys(layer.attention, keys, whole_keys=False)
        else:
            divide_keys(_attention(layer), keys, whole_keys=True)
    return module


def key_part(x: Batch, group: ProcessGroup | DeviceMesh | None = None) -> Batch:
    """This rank's rows of ``x``, which all ranks of ``group`` hold: of a dense (B, L, C) those of each sequence, of a
    Jagged those of its rows, with the offsets that they have then. The gradient of ``x`` is the same on all ranks.

    >>> mine = gdpa.distributed.key_part(Jagged.from_lengths(torch.randn(8, 16), torch.tensor([5, 0, 3])))
    """
    ranks = process_group(group)
    if isinstance(x, Tensor) and x.is_nested:
        x = Jagged.from_nested(x)
    if isinstance(x, Jagged):
        start, stop = span(x.values.shape[0], ranks)
        return Jagged(shared(x.values, ranks)[start:stop], offsets_in(x.cu_seqlens, start, stop), x.max_seqlen)
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise TypeError(f"x must be a Jagged, a nested or a dense tensor (B, L, C), got {_shape(x)}")
    start, stop = span(x.shape[1], ranks)
    return shared(x, ranks)[:, start:stop]


class _OwnRows:
    """A forward hook of poolings, whose one input is the sequence: it keeps this rank's rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(self._part(layer, x) for x in args)
        return args, {name: self._part(layer, x) for name, x in kwargs.items()}

    def _part(self, layer: nn.Module, x: Any) -> Any:
        return key_part(batch("x", x, layer.dim), self.mesh)  # type: ignore[arg-type]


def _divide_heads(layer: nn.Module, mesh: DeviceMesh) -> None:
    """One layer. Forward stays the layer's own: its parts take and give this rank's heads."""
    if isinstance(layer, SelfAttention):
        heads_out(layer.qkv, mesh, layer._widths)
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                shared_norm(norm, mesh)
        layer._heads = [n // mesh.size() for n in layer._heads]
        divide_heads(layer.attention, mesh)
        heads_in(layer.out, mesh)
    elif isinstance(layer, SeedPooling):
        heads_out(layer.q, mesh, [layer.dim])
        heads_out(layer.kv, mesh, [layer.dim, layer.dim])
        divide_heads(layer.attention, mesh)
        heads_in(layer.out, mesh)
    elif isinstance(layer, PMA):  # the norms and the residual of all heads come right after
        heads_out(layer.q, mesh, [layer.dim], gather=True)
        heads_out(layer.kv, mesh, [layer.dim, layer.dim])
        divide_heads(layer.attention, mesh, whole_q=True, gather=True)
    elif isinstance(layer, PFFN):
        heads_out(layer.generate, mesh, [layer.dim] * (2 * layer.hidden))
        divide_heads(layer.attention, mesh, whole_q=True, gather=True)
    else:
        assert isinstance(layer, Attention)
        divide_heads(layer, mesh, whole_q=True, whole_kv=True, gather=True)
    layer.reset_parameters = _refuse_reset  # type: ignore[method-assign]


def _refuse_reset() -> None:
    raise RuntimeError(
        "reset_parameters cannot initialise weights that are divided among ranks: call it before parallelize"
    )


def _layers(module: nn.Module, caller: str) -> Iterator[tuple[str, nn.Module]]:
    """(name, layer) of all layers that have heads, outermost first; an Attention only where it is no part of one."""
    inside: set[nn.Module] = set()
    found = False
    for name, layer in module.named_modules():
        if isinstance(layer, LAYERS) or (isinstance(layer, Attention) and layer not in inside):
            found = True
            if isinstance(layer, LAYERS) and not isinstance(layer.attention, Attention):
                core = type(layer.attention).__name__
                raise ValueError(
                    f"layer {_named(name, layer)} attends with {core}, but {caller} only divides gdpa.nn.Attention"
                )
            inside.add(_attention(layer))
            base = next(kind for kind in (*LAYERS, DistributedAttention, Attention) if isinstance(layer, kind))
            if type(layer).forward is not base.forward:
                raise ValueError(f"layer {_named(name, layer)} has its own forward, which {caller} cannot divide")
            yield _named(name, layer), layer
    if not found:
        raise ValueError(f"module ({type(module).__name__}) contains no gdpa.nn layer with heads")


def _named(name: str, layer: nn.Module) -> str:
    return f"{name!r} ({type(layer).__name__})" if name else type(layer).__name__


def _attention(layer: nn.Module) -> Attention:
    attention = layer if isinstance(layer, Attention) else layer.attention
    assert isinstance(attention, Attention)
    return attention


def _check(module: Any, mesh: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has shape {tuple(mesh.shape)}; pass one of its dimensions, such as mesh['heads']")
    for name, p in module.named_parameters():
        if p.device.type not in (mesh.device_type, "meta"):
            raise ValueError(f"parameter {name} is on {p.device}, but the mesh is on {mesh.device_type}")


def _check_heads(name: str, layer: nn.Module, module: nn.Module, mesh: DeviceMesh) -> None:
    attention = _attention(layer)
    if isinstance(attention, DistributedAttention) and attention.head_mesh is not None:
        raise ValueError(f"the heads of layer {name} are already divided among ranks")
    counts = {"num_heads": attention.num_heads}
    if isinstance(layer, SelfAttention):
        counts["num_kv_heads"] = layer.num_kv_heads
    for what, count in counts.items():
        if count % mesh.size() != 0:
            raise ValueError(f"layer {name} has {what}={count}, which is not divisible by {mesh.size()} ranks")
    if any(isinstance(p, DTensor) for p in layer.parameters()):
        raise ValueError(f"the weights of layer {name} are already DTensors: call parallelize before fully_shard")
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    tied = [n for n, p in layer.named_parameters() if uses[id(p)] > 1 and "score_bias." not in n]  # those stay whole
    if tied:
        raise ValueError(
            f"layer {name} shares its parameter {tied[0]} with another layer; sharded parameters cannot be tied"
        )


def _key_mesh(module: Any, mesh: Any) -> DeviceMesh:
    if isinstance(mesh, ProcessGroup) and isinstance(module, nn.Module):
        device = next((p.device.type for p in module.parameters()), "cpu")
        mesh = DeviceMesh.from_group(mesh, device)
    _check(module, mesh)
    return mesh


def _broadcast(module: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters and buffers of the first rank, on all ranks: they must agree, whatever each was seeded with."""
    group = mesh.get_group()
    with torch.no_grad():
        for t in (*module.parameters(), *module.buffers()):
            mine = t.to_local() if isinstance(t, DTensor) else t
            if not mine.is_meta and group.size() > 1:
                whole = mine.contiguous()
                dist.broadcast(whole, group=group, group_src=0)
                if whole is not mine:
                    mine.copy_(whole)


def _shape(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
