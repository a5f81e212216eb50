"""Layers for models of jagged sequences, built on gdpa's attention. All take dense, nested and :class:`Jagged` batches.

>>> layer = gdpa.nn.SelfAttention(32, 4, "silu", causal=True)
>>> y = layer(gdpa.nn.Jagged.from_lengths(torch.randn(8, 32), torch.tensor([5, 0, 3])))
"""

from gdpa.nn.attention import Attention, SelfAttention
from gdpa.nn.biases import ALiBi, RelativeBias, ScoreBias, T5Bias, TimeBias
from gdpa.nn.gating import Gating, MaskNet
from gdpa.nn.hstu import HSTU
from gdpa.nn.interactions.kron import SumKronLinear
from gdpa.nn.interactions.pairs import CrossNet, DotInteraction
from gdpa.nn.interactions.wukong import FactorizationMachine, TokenLinear, WukongBlock
from gdpa.nn.jagged import Jagged
from gdpa.nn.linear import MLP
from gdpa.nn.options import AttentionOptions, function_parameters
from gdpa.nn.pffn import PFFN
from gdpa.nn.pma import PMA, HierarchicalSeedPooling, SeedPooling
from gdpa.nn.rowwise import LayerNorm, Rotary

__all__ = [
    "HSTU",
    "MLP",
    "PFFN",
    "PMA",
    "ALiBi",
    "Attention",
    "AttentionOptions",
    "CrossNet",
    "DotInteraction",
    "FactorizationMachine",
    "Gating",
    "HierarchicalSeedPooling",
    "Jagged",
    "LayerNorm",
    "MaskNet",
    "RelativeBias",
    "Rotary",
    "ScoreBias",
    "SeedPooling",
    "SelfAttention",
    "SumKronLinear",
    "T5Bias",
    "TimeBias",
    "TokenLinear",
    "WukongBlock",
    "function_parameters",
]
