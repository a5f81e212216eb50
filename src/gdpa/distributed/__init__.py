"""gdpa on several processes: DTensor rules of the operators, tensor parallelism over heads, context parallelism over
keys. Importing it is what makes gdpa.attention take DTensors.

>>> gdpa.distributed.parallelize(model, mesh["heads"])  # each rank computes its heads
>>> gdpa.distributed.context_parallel(model, mesh["keys"])  # each rank takes its part of the keys
"""

from gdpa.distributed import rules  # noqa: F401  # registers them
from gdpa.distributed.clip import clip_grad_norm_
from gdpa.distributed.context import attention, attention_varlen
from gdpa.distributed.layers import context_parallel, key_part, parallelize

__all__ = ["attention", "attention_varlen", "clip_grad_norm_", "context_parallel", "key_part", "parallelize"]
