"""Contenders that compute softmax whatever function is asked for: another function, but the yardstick for kernels."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gdpa.bench.contenders.contender import Prepared, native_pieces, tried
from gdpa.bench.contenders.packing import packed_offsets, packed_rows
from gdpa.spec import Loaded
from gdpa.testing.cases import Case, Inputs, call


@dataclass(frozen=True)
class OurSoftmax:
    """gdpa's softmax, on its best backend, in the case's own layout."""

    name: str = "gdpa-softmax"
    function: str | None = "softmax"

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        return Prepared(lambda: call(case, x, "softmax"), x.leaves, native_pieces(case, x))


@dataclass(frozen=True)
class Sdpa:
    """PyTorch's fused attention by one of its kernels."""

    name: str
    backend: SDPBackend
    function: str | None = "softmax"

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        square_causal = case.causal and case.len_q[0] == case.len_k[0] and case.window is None
        if case.varlen or case.shared:
            return "F.scaled_dot_product_attention takes dense tensors"
        if case.band != (None, None) and not square_causal:
            return "F.scaled_dot_product_attention has no window without a mask matrix"

        def forward() -> Tensor:
            with sdpa_kernel([self.backend]):
                return F.scaled_dot_product_attention(
                    *x.leaves, is_causal=case.causal, enable_gqa=case.heads_k is not None
                )

        return tried(Prepared(forward, x.leaves, native_pieces(case, x)), "PyTorch")


@dataclass(frozen=True)
class FlashAttention:
    """The package flash_attn, dense or packed. Its band is aligned as gdpa's; -1 is its word for unbounded."""

    name: str = "flash-attn"
    function: str | None = "softmax"

    def prepare(self, case: Case, x: Inputs, function: Loaded) -> Prepared | str:
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash_attn is not installed"
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

        left, right = (-1 if side is None else side for side in case.band)
        if not case.varlen:

            def forward() -> Tensor:
                q, k, v = (t.transpose(1, 2) for t in (x.q.expand(len(x.k), -1, -1, -1), x.k, x.v))
                return flash_attn_func(q, k, v, window_size=(left, right)).transpose(1, 2)

            return tried(Prepared(forward, x.leaves, native_pieces(case, x)), "flash_attn")
        cu_q, cu_k = packed_offsets(case, x)
        longest = (max(case.len_q), max(case.len_k))

        def forward_packed() -> Tensor:
            return flash_attn_varlen_func(*packed_rows(case, x), cu_q, cu_k, *longest, window_size=(left, right))

        return tried(Prepared(forward_packed, x.leaves, native_pieces(case, x)), "flash_attn")
