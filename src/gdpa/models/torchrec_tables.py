"""TorchRec's EmbeddingCollection in the place of a model's tables: divided row-wise among the processes, updated in
the backward by FBGEMM, so that no gradient of a table exists. Needs torchrec; nothing else here imports it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import KernelConfig, ParameterConstraints, TopologyFactory, TrainerConfig
from torchrec.distributed.types import ShardingEnv, ShardingType

from gdpa.data import Inputs
from gdpa.data.keyed import bag_name, events_to_keyed, joined, key, to_keyed
from gdpa.models.embedding import Looked, Tables, mean_of_bags

EPS = 1e-8  # that of gdpa.train.run.rowwise.RowwiseAdagrad


class TorchRecTables(nn.Module):
    """What ``tables`` has, divided among the processes of the default group, with exact row-wise Adagrad of ``lr``.

    Batch -> Looked, as Tables. In training mode backward updates the rows that were read; in evaluation nothing does.
    The collection is no part of the module tree: its rows are neither parameters nor entries of state_dict. They go
    through ``whole`` and ``load`` under the names that they have in Tables.
    """

    def __init__(self, tables: Tables, lr: float) -> None:
        super().__init__()
        self.sizes, self.dim = tables.sizes, tables.dim
        self.columns, self.sparse, self.bags = tables.columns, tables.sparse, tables.bags
        state = tables.state_dict()
        self._collection = [_shard(tables, lr)]
        self.load(state)

    @property
    def collection(self) -> ShardedEmbeddingCollection:
        return self._collection[0]

    @torch.compiler.disable
    def forward(self, batch: Inputs) -> Looked:
        parts = [to_keyed(Inputs(batch.dense, batch.sparse, {})).sparse] if self.sparse else []
        parts += [events_to_keyed(name, batch.sequences[name]) for name in self.columns]
        parts += [events_to_keyed(bag_name(name), batch.bags[name]) for name in self.bags]
        found = self.collection(joined(parts)).wait()
        rows = {name: of_key.values() for name, of_key in found.items()}
        if not self.training:
            rows = {name: values.detach() for name, values in rows.items()}
        return Looked(
            [rows[key("sparse", j)] for j in range(len(self.sparse))],
            {name: {i: rows[key(name, i)] for i in held} for name, held in self.columns.items()},
            [mean_of_bags(rows[key(bag_name(name), 0)], batch.bags[name]) for name in self.bags],
        )

    def set_lr(self, lr: float) -> None:
        """Of the next backward."""
        optimizer = self.collection.fused_optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """The tables; on every process, all of which must take part."""
        return {name: _gathered(part) for name, part in self.parts().items()}

    def whole_optimizer(self) -> dict[str, dict[str, Tensor]]:
        """The sums of squares of their rows, likewise, by table."""
        return {name: {"sum": _gathered(held["sum"])} for name, held in self.optimizer_parts().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """This process's part of whole tables."""
        _scatter(self.parts(), state)

    def load_optimizer(self, state: dict[str, dict[str, Tensor]]) -> None:
        sums = {name: held["sum"] for name, held in self.optimizer_parts().items()}
        _scatter(sums, {name: state[name]["sum"] for name in state})

    def parts(self) -> dict[str, Any]:
        """The tables as ShardedTensors, of which this process holds some rows."""
        return {name.split(".")[1]: sharded for name, sharded in self.collection.state_dict().items()}

    def optimizer_parts(self) -> dict[str, dict[str, Any]]:
        """The sums of squares of their rows, likewise, by table."""
        state = self.collection.fused_optimizer.state_dict()["state"]
        return {name.split(".")[1]: {"sum": sharded} for name, held in state.items() for sharded in held.values()}

    def extra_repr(self) -> str:
        return ", ".join([f"dim={self.dim}", *(f"{name}={size}" for name, size in self.sizes.items())])


def _shard(tables: Tables, lr: float) -> ShardedEmbeddingCollection:
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=p.shape[0], embedding_dim=p.shape[1], feature_names=keys)
            for name, p, keys in _features(tables)
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": lr, "eps": EPS}
    )
    by_rows = ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
    planner = EmbeddingShardingPlanner(
        topology=TopologyFactory.create_topology(
            TrainerConfig(world_size=dist.get_world_size()), kernel_config=KernelConfig(compute_device="cpu")
        ),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={name: by_rows for name, _, _ in _features(tables)},
    )
    holder = nn.ModuleDict({"tables": collection})
    plan = planner.collective_plan(holder, [sharder], dist.group.WORLD).get_plan_for_module("tables")
    assert plan is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return sharder.shard(collection, plan, env, torch.device("cpu"))


def _features(tables: Tables) -> list[tuple[str, Tensor, list[str]]]:
    """(name, table, the keys that it is asked for) of every table."""
    columns = [(key("sparse", j), vocabulary) for j, vocabulary in enumerate(tables.sparse)]
    columns += [(key(name, i), vocabulary) for name, held in tables.columns.items() for i, vocabulary in held.items()]
    columns += [(key(bag_name(name), 0), vocabulary) for name, vocabulary in tables.bags.items()]
    return [
        (name, p, [k for k, vocabulary in columns if tables.parameter_name(vocabulary) == name])
        for name, p in tables.named_parameters()
    ]


def _gathered(sharded: Any) -> Tensor:
    own = [(shard.metadata.shard_offsets[0], shard.tensor.detach()) for shard in sharded.local_shards()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    whole = torch.zeros(sharded.metadata().size)
    for offset, part in (piece for of_rank in everyone for piece in of_rank):
        whole[offset : offset + part.shape[0]] = part.view(part.shape[0], *whole.shape[1:])
    return whole


def _scatter(parts: dict[str, Any], whole: dict[str, Tensor]) -> None:
    for name, sharded in parts.items():
        for shard in sharded.local_shards():
            offset, n = shard.metadata.shard_offsets[0], shard.tensor.shape[0]
            with torch.no_grad():
                shard.tensor.copy_(whole[name][offset : offset + n].view(shard.tensor.shape))
