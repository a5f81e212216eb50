"""The interface of positions, tables and masks: arguments, refusals, autograd, operators, compilation."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import gdpa
from gdpa import api, masks, spec
from gdpa.arguments import checks
from gdpa.functions.activation import resolve_one
from places.library import alibi, biased_silu, relative_table
from support import INTERPRET, bf16, f64

Tables = tuple[Tensor, ...]


def qkv(*shape: int, dtype: torch.dtype = f64, batch: int = 2, heads: int = 2, length: int = 9) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    shape = shape or (batch, heads, length, 8)
    return [torch.randn(shape, generator=rng, dtype=dtype).requires_grad_() for _ in range(3)]


def learned(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=f64, generator=torch.Generator().manual_seed(1)).requires_grad_()


# ---- gradients -------------------------------------------------------------------------------------------------------
def test_gradients_of_tables_twice() -> None:
    q, k, v = qkv(1, 2, 4, 2)
    table, slope = learned(2, 5), learned()

    def attend(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, table: Tensor) -> Tensor:
        return gdpa.attention(
            q, k, v, lambda s, a, t, *, h, q_idx, kv_idx: torch.tanh(a * s + t[h, (q_idx - kv_idx).abs()] ** 2),
            params=(slope,), tables=(table,), mask=masks.window(2, 0), backend="reference",
        )  # fmt: skip

    assert torch.autograd.gradcheck(attend, (q, k, v, slope, table))
    assert torch.autograd.gradgradcheck(attend, (q, k, v, slope, table))


def test_invisible_pairs_give_a_table_nothing() -> None:
    """Not even where the derivative is infinite, nor where the index is out of range."""
    q, k, v = qkv()
    table = learned(3)
    for backend in ("reference", "cpu"):
        out = gdpa.attention(
            q, k, v, lambda s, t, *, q_idx, kv_idx: s * torch.sqrt(t[q_idx - kv_idx + 1].abs() * (q_idx >= kv_idx)),
            tables=(table,), mask=masks.window(1, -1), backend=backend,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.sum(), table)
        assert grad.isfinite().all()
        assert (grad != 0).tolist() == [False, False, True]


def test_tables_that_need_no_gradient_get_none() -> None:
    q, k, v = qkv()
    frozen = learned(2, 128).detach()
    gdpa.attention(q, k, v, relative_table, tables=(frozen,)).sum().backward()
    assert q.grad is not None
    assert frozen.grad is None


def test_tables_keep_float32_beside_16_bits() -> None:
    q, k, v = (t.detach() for t in qkv(dtype=bf16))
    table = learned(2, 128).detach().float().requires_grad_()
    narrow = table.detach().bfloat16().requires_grad_()
    for t in (table, narrow):
        gdpa.attention(q, k, v, relative_table, tables=(t,)).float().sum().backward()
    assert table.grad is not None
    assert narrow.grad is not None
    assert (table.grad.dtype, narrow.grad.dtype) == (torch.float32, bf16)
    assert (table.grad.bfloat16().float() != table.grad).any(), "not rounded on the way"


def test_functions_per_head_share_tables() -> None:
    q, k, v = qkv(heads=4)
    table = learned(4, 128)

    def other(s, t, *, h, q_idx, kv_idx):
        return torch.tanh(s) * t[h, q_idx - kv_idx + 64]

    functions = [relative_table, other, relative_table, other]
    results = []
    for backend in ("reference", "cpu"):
        out = gdpa.attention(q, k, v, functions, tables=(table,), mask=lambda h, kv_idx: kv_idx > h, backend=backend)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v, table))))
    one = gdpa.attention(q[:, 1:2], k[:, 1:2], v[:, 1:2], lambda s, t, *, h, q_idx, kv_idx: other(
        s, t, h=h + 1, q_idx=q_idx, kv_idx=kv_idx), tables=(table,), mask=lambda kv_idx: kv_idx > 1)  # fmt: skip
    torch.testing.assert_close(one, results[0][0][:, 1:2])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# ---- what a function is given ----------------------------------------------------------------------------------------
def test_two_params_called_a_and_b_are_params() -> None:
    q, k, v = qkv()
    a, b = learned(), learned()
    out = gdpa.attention(q, k, v, lambda s, a, b: a * s + b, params=(a, b))
    torch.testing.assert_close(out, (a * q @ k.mT / 8**0.5 + b) @ v)


def test_a_keyword_with_a_default_keeps_it() -> None:
    q, k, v = qkv()

    def f(s, *, h=2.0):
        return h * s

    torch.testing.assert_close(gdpa.attention(q, k, v, f), 2 * q @ k.mT @ v / 8**0.5)


def test_a_position_of_a_mask_is_one_whatever_its_default_is() -> None:
    q, k, v = qkv()
    want = gdpa.attention(q, k, v, mask=lambda q_idx, kv_idx: q_idx > kv_idx + 1)
    got = gdpa.attention(q, k, v, mask=lambda q_idx, w=1, kv_idx=0, *, h=None: (q_idx > kv_idx + w) & (h >= 0))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.triton)])
def test_constants_may_be_infinite(backend: str) -> None:
    """As biases of SDPA and FlexAttention often are."""
    q, k, v = (t.detach() for t in qkv(dtype=torch.float32))
    causal = lambda s, *, q_idx, kv_idx: torch.exp(s + torch.where(q_idx >= kv_idx, 0.0, -torch.inf))
    far = lambda q_idx, kv_idx: torch.where(q_idx > 3, kv_idx / 2, torch.inf) < 3
    p = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~torch.ones(9, 9).bool().tril(), -torch.inf), -1)
    where = {"device": "cuda"} if backend == "triton" and not INTERPRET else {}
    x = [t.to(**where) for t in (q, k, v)]
    got = gdpa.attention(*x, causal, normalize="sum", backend=backend)
    torch.testing.assert_close(got.cpu(), p @ v, rtol=1e-4, atol=1e-5)
    seen = (torch.arange(9)[:, None] > 3) & (torch.arange(9) < 6)
    got = gdpa.attention(*x, "relu", mask=far, backend=backend)
    torch.testing.assert_close(got.cpu(), ((q @ k.mT / 8**0.5).relu() * seen) @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("f", [
    lambda s, t, *, h, q_idx, kv_idx: s + t[h, q_idx - kv_idx],
    lambda s, t, *, h: s * t[h],
    lambda s, a, t, *, kv_idx: torch.relu(a * s) + t[kv_idx],
])  # fmt: skip
def test_a_table_among_params_is_named(f: Any) -> None:
    with pytest.raises(ValueError, match="an argument that is indexed is a table"):
        gdpa.activation(f)


def test_vmap_over_indices() -> None:
    q, k, v = qkv()
    ids = torch.randint(0, 9, (4, 9))
    run = lambda i: gdpa.attention(
        q, k, v, lambda s, t, i, *, q_idx: s + t[i[q_idx]], tables=(T, i), backend="reference"
    )
    torch.testing.assert_close(torch.vmap(run)(ids), torch.stack([run(i) for i in ids]))


def test_a_score_mod_that_looks_at_no_place_is_a_plain_function() -> None:
    plain, mod = (
        resolve_one(lambda s: 2.0 * s.exp(), 0),
        resolve_one(lambda score, b, h, q_idx, kv_idx: 2.0 * score.exp(), 0),
    )
    assert plain is mod


def test_sizes_and_values_of_tables_trace_nothing_anew() -> None:
    kinds = [resolve_one(relative_table, 0, checks.tables((torch.randn(n, 2 * n),), torch.randn(1))[1]) for n in (2, 3)]
    assert kinds[0] is kinds[1]


def test_a_decorated_function_takes_positions() -> None:
    f = gdpa.activation(alibi)
    q, k, v = qkv()
    torch.testing.assert_close(gdpa.attention(q, k, v, f), gdpa.attention(q, k, v, alibi))
    assert pickle.loads(pickle.dumps(f)) is f


def test_rows_of_packed_tensors() -> None:
    """q_row and kv_row are those of the tensors, also where seqused leaves some out."""
    q, k, v = (t[0].transpose(0, 1) for t in qkv(batch=1, length=12))
    cu, used = torch.tensor([0, 5, 12]), torch.tensor([3, 7])
    rows = learned(12)

    def f(s, rows, *, q_row, kv_row, q_len):
        return s + rows[q_row] - rows[kv_row] + 0.1 * q_len

    results = [
        gdpa.attention_varlen(q, k, v, cu, cu, f, tables=(rows,), seqused_q=used, seqused_k=used, backend=backend)
        for backend in ("reference", "cpu")
    ]
    torch.testing.assert_close(*results)
    one = slice(5, 12)
    s = torch.einsum("ihd,jhd->hij", q[one], k[one]) / 8**0.5 + rows[one, None] - rows[one] + 0.7
    torch.testing.assert_close(results[0][one], torch.einsum("hij,jhd->ihd", s, v[one]))
    assert (results[0][3:5] == 0).all()


def test_packed_forms() -> None:
    packed = torch.randn(2, 9, 3, 2, 8, dtype=f64, requires_grad=True)
    table, m = learned(2, 128), masks.targets(torch.tensor([2, 3])) & masks.causal()
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    want = gdpa.attention(q, k, v, relative_table, tables=(table,), mask=m)
    for got in (
        gdpa.attention_qkvpacked(packed, relative_table, tables=(table,), mask=m).transpose(1, 2),
        gdpa.attention_kvpacked(
            q.transpose(1, 2), packed[:, :, 1:], relative_table, tables=(table,), mask=m
        ).transpose(1, 2),
        gdpa.attention_varlen_qkvpacked(
            packed.flatten(0, 1), torch.tensor([0, 9, 18]), relative_table, tables=(table,), mask=m
        ).unflatten(0, (2, 9)).transpose(1, 2),
    ):  # fmt: skip
        torch.testing.assert_close(got, want)
        a, b = (torch.autograd.grad(o.sin().sum(), (packed, table), retain_graph=True) for o in (got, want))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)


def test_nested_tensors() -> None:
    offsets = torch.tensor([0, 4, 11])
    q, k, v = (torch.nested.nested_tensor_from_jagged(torch.randn(11, 2, 8), offsets).transpose(1, 2) for _ in range(3))
    out = gdpa.attention(q, k, v, alibi, mask=masks.prefix(torch.tensor([2, 3])))
    dense = [t.transpose(1, 2).values()[4:].transpose(0, 1)[None] for t in (q, k, v)]
    alone = gdpa.attention(*dense, alibi, mask=lambda kv_idx: kv_idx < 3)
    torch.testing.assert_close(out.transpose(1, 2).values()[4:].transpose(0, 1)[None], alone)


# ---- refusals --------------------------------------------------------------------------------------------------------
def indexed_by_score(s, t, *, h):
    return s + t[s.long()]


def indexed_by_float(s, t, *, q_idx):
    return s + t[q_idx * 0.5]


def reads_a_size(s, t, *, q_idx):
    return s + t[q_idx.clamp(max=t.shape[0] - 1)]


def too_few_indices(s, t, *, h):
    return s + t[h, h]


T = torch.randn(9, dtype=f64)
SCALAR = torch.tensor(1.0)
COMPLEX = torch.zeros(3, dtype=torch.complex64)
# (what the function is, its tables, the error, a part of its text)
WRONG_FUNCTIONS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "table indexed by the score": (indexed_by_score, (T,), ValueError, "depends on the score"),
    "table indexed by a float": (indexed_by_float, (T,), ValueError, r"tables\[0\] is indexed with torch.float"),
    "table indexed by a mask": (
        lambda s, t, u, *, q_idx: s + t[u[q_idx]],
        (T, torch.zeros(9, dtype=torch.uint8)),
        ValueError,
        "torch.uint8, a mask to PyTorch; .long",
    ),
    "table's size": (reads_a_size, (T,), ValueError, r"\.shape of tables\[0\]"),
    "wrong number of indices": (too_few_indices, (T,), ValueError, "1 dimensions and is indexed with 2"),
    "table for a built-in": ("silu", (T,), ValueError, "but activation 'silu' was made for none"),
    "table missing": (relative_table, (), TypeError, "missing a required argument: 'bias'"),
    "one table": (relative_table, T, TypeError, "got one tensor; write tables="),
    "no tensor": (relative_table, (3,), TypeError, r"tables\[0\] must be a tensor, got int"),
    "complex table": (relative_table, (COMPLEX,), TypeError, "complex64"),
    "scalar table": (relative_table, (SCALAR,), ValueError, "1 to 8 dimensions"),
    "too many tables": (relative_table, (T,) * 9, ValueError, "at most 8"),
    "table elsewhere": (lambda s, t, *, h: s + t[h], (T.to("meta"),), ValueError, "q's device"),
    "unknown position": (lambda s, *, qidx: s, (), TypeError, "keyword-only argument 'qidx'"),
    "score mod with tables": (alibi, (T,), ValueError, "score mod of FlexAttention"),
    "score mod with names of its own": (
        lambda s, b, h, q, kv: s,
        (),
        TypeError,
        "names its arguments score, b, h, q_idx",
    ),
    "integer operation without code": (lambda s, *, h: s * 3**h, (), ValueError, "pow of integers"),
    "captured tensor": (lambda s, *, h: s + T[h], (), ValueError, "through tables"),
    "an if on positions": (lambda s, *, h: s if h > 0 else -s, (), ValueError, "use torch.where"),
    "table entry by entry": (
        lambda s, t: sum(x * s**i for i, x in enumerate(t)),
        (T,),
        ValueError,
        r"goes through tables\[0\] entry by entry",
    ),
    "table as a number": (lambda s, t: s + t, (T,), ValueError, "a table can only be indexed"),
}


@pytest.mark.parametrize(
    ("activation", "tables", "error", "named"), WRONG_FUNCTIONS.values(), ids=WRONG_FUNCTIONS.keys()
)
def test_refusals(activation: Any, tables: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        gdpa.attention(*qkv(), activation, tables=tables)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_an_index_out_of_range(backend: str) -> None:
    q, k, v = qkv()
    with pytest.raises(
        IndexError, match=r"index 9 is out of range for dimension 0 of tables\[0\], whose shape is \(9,\)"
    ):
        gdpa.attention(q, k, v, lambda s, t, *, q_idx: s + t[q_idx + 1], tables=(T,), backend=backend)
    with pytest.raises(IndexError, match=r"mask.tables\[0\]"):
        gdpa.attention(q, k, v, mask=masks.prefix(torch.tensor([1])), backend=backend)
    gdpa.attention(
        q, k, v, lambda s, t, *, q_idx: s + t[q_idx + 1], tables=(T,), mask=lambda q_idx: q_idx < 8, backend=backend
    )


def test_transforms_take_no_tables() -> None:
    q, k, v = qkv()

    def total(table: Tensor, backend: str) -> Tensor:
        return gdpa.attention(
            q.detach(), k.detach(), v.detach(), relative_table, tables=(table,), backend=backend
        ).sum()

    table = learned(2, 128).detach()
    with pytest.raises(NotImplementedError, match="backend='reference'"):
        torch.func.grad(total)(table, "cpu")
    assert torch.func.grad(total)(table, "reference").abs().sum() > 0


def test_explain() -> None:
    q, k, v = qkv()
    text = gdpa.explain(q, k, v, relative_table, tables=(learned(2, 128),), mask=masks.dilated(2))
    assert "backend: cpu" in text
    assert "tables[0] (float32): looked up for every pair" in text
    assert "mask: every; tiles that it leaves empty are skipped" in text
    assert "mask: causal; a band, computed just as causal= and window= are" in gdpa.explain(
        q, k, v, mask=masks.causal()
    )


# ---- operators and compilation ---------------------------------------------------------------------------------------
def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    attend = api.ops.attention
    monkeypatch.setattr(api.ops, "attention", lambda *args: (seen.append(args), attend(*args))[1])
    monkeypatch.setattr(api.direct, "nobody_watches", lambda: False)  # a direct call is none of the operator
    q, k, v = qkv(length=5)
    out = gdpa.attention(
        q, k, v, biased_silu, params=(learned(),), tables=(learned(2, 32),), mask=masks.prefix(torch.tensor([3, 4]))
    )
    torch.library.opcheck(torch.ops.gdpa.attention, seen[0])
    plain = [[t.detach() for t in a] if isinstance(a, list) and isinstance(a[0], Tensor) else a for a in seen[0]]
    plain = [a.detach() if isinstance(a, Tensor) else a for a in plain]
    torch.library.opcheck(torch.ops.gdpa.attention_backward, (torch.randn_like(out).detach(), *plain))


def attend_compiled(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    mask = masks.targets(counts, 2) & masks.causal()
    return gdpa.attention(q, k, v, biased_silu, params=(slope,), tables=(table,), mask=mask)


def test_compilation() -> None:
    """One graph; lengths and the values of tables change nothing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(attend_compiled, fullgraph=True, backend=counter)
    for length in (9, 11, 13, 17):
        q, k, v = qkv(length=length)
        others = (learned(), learned(2, 32), torch.tensor([length % 5, 3]))
        wanted = (q, k, v, *others[:2])
        a, b = (torch.autograd.grad(f(q, k, v, *others).sin().sum(), wanted) for f in (attend_compiled, fast))
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y)
    graphs = [g for g in counter.graphs if any("gdpa.attention" in str(n.target) for n in g.graph.nodes)]
    assert len(graphs) == 2, "for one length, and for any"


def test_new_numbers_in_a_function_are_seen_by_compiled_code() -> None:
    torch._dynamo.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, f: Any) -> Tensor:
        return gdpa.attention(q, k, v, f, mask=masks.window(3, 0))

    def shifted(c: float) -> Any:
        return lambda s, *, q_idx: F.silu(s) + c * q_idx

    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for c in (0.5, 0.25):
        torch.testing.assert_close(fast(*qkv(), shifted(c)), attend(*qkv(), shifted(c)))


def test_commands_take_no_positions() -> None:
    with pytest.raises(ValueError, match="takes positions; commands take functions of the score and params only"):
        spec.load("places.library:alibi")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_entries_of_narrow_tables_are_indices(dtype: torch.dtype) -> None:
    q, buckets = torch.randn(1, 2, 6, 8, dtype=f64), torch.tensor([3, 0, 6, 6, 1, 8])

    def biased(s, t, buckets, *, kv_row):
        return torch.relu(s + t[buckets[kv_row]])

    want, got = (gdpa.attention(q, q, q, biased, tables=(T, b)) for b in (buckets, buckets.to(dtype)))
    assert torch.equal(got, want)


def test_tables_of_any_size_are_exported() -> None:
    """A Dim without a bound stays without one."""

    class Attend(torch.nn.Module):
        def forward(self, x: Tensor, cu: Tensor, counts: Tensor) -> Tensor:
            return gdpa.attention_varlen_qkvpacked(x, cu, "silu", mask=gdpa.masks.targets(counts))

    sequences, rows = torch.export.Dim("sequences"), torch.export.Dim("rows")
    first = (torch.randn(10, 3, 2, 8), torch.tensor([0, 4, 10]), torch.tensor([1, 2]))
    program = torch.export.export(Attend(), first, dynamic_shapes=({0: rows}, {0: sequences + 1}, {0: sequences}))
    other = (torch.randn(17, 3, 2, 8), torch.tensor([0, 3, 9, 17]), torch.tensor([1, 0, 2]))
    assert torch.equal(program.module()(*other), Attend()(*other))
