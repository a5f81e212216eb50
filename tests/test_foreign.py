"""What other libraries call it: refused by a message that says what to write here, and which is right."""

from __future__ import annotations

import inspect
import time

import pytest
import torch

import gdpa
from gdpa.foreign import INSTEAD

B, H, L, D = 2, 4, 6, 8
Q, K, V = torch.randn(3, B, H, L, D)
CU = torch.tensor([0, 4, 6])
ROWS = torch.randn(6, H, D)
CALLS = {
    "attention": lambda **k: gdpa.attention(Q, K, V, **k),
    "attention_varlen": lambda **k: gdpa.attention_varlen(ROWS, ROWS, ROWS, CU, CU, **k),
    "attention_qkvpacked": lambda **k: gdpa.attention_qkvpacked(torch.randn(B, L, 3, H, D), **k),
    "attention_varlen_qkvpacked": lambda **k: gdpa.attention_varlen_qkvpacked(torch.randn(6, 3, H, D), CU, **k),
    "attention_kvpacked": lambda **k: gdpa.attention_kvpacked(Q.mT.transpose(1, 3), torch.randn(B, L, 2, H, D), **k),
    "attention_varlen_kvpacked": lambda **k: gdpa.attention_varlen_kvpacked(ROWS, torch.randn(6, 2, H, D), CU, CU, **k),
    "explain": lambda **k: gdpa.explain(Q, K, V, **k),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [("is_causal", True, "causal=True"), ("attn_mask", None, "from_padded"), ("dropout_p", 0.1, "nn.Dropout")],
)
def test_every_call_names_what_stands_for_the_argument(name, argument, value, instead):
    with pytest.raises(TypeError, match=rf"^{name}\(\) has no argument '{argument}': .*{instead}"):
        CALLS[name](**{argument: value})


@pytest.mark.parametrize("argument", INSTEAD)
def test_every_argument_of_others_is_answered(argument):
    with pytest.raises(TypeError, match=f"has no argument '{argument}': "):
        gdpa.attention(Q, K, V, **{argument: 1})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("is_causal", False), ("attn_mask", None), ("dropout_p", 0.0), ("window_size", (-1, -1)), ("need_weights", False)],
)
def test_what_asks_for_nothing_is_to_be_left_out(argument, value):
    with pytest.raises(TypeError, match=rf"{argument}=.* has no effect here, leave it out"):
        gdpa.attention(Q, K, V, **{argument: value})


def test_masks_that_are_tensors_are_not_compared_with_nothing():
    with pytest.raises(TypeError, match="has no argument 'attn_mask': mask= takes"):
        gdpa.attention(Q, K, V, attn_mask=torch.zeros(L, L))


@pytest.mark.parametrize("given", [torch.ones(L, L, dtype=torch.bool), torch.zeros(L, L), None])
def test_the_fourth_argument_of_sdpa_points_to_mask(given):
    with pytest.raises(TypeError, match=r"F\.scaled_dot_product_attention has attn_mask: mask= takes") as refused:
        gdpa.attention(Q, K, V, given)
    assert "tensor([" not in str(refused.value)


def test_softmax_is_among_the_known_names():
    with pytest.raises(ValueError, match=r"'gellu' is unknown.*silu, softmax, softplus"):
        gdpa.attention(Q, K, V, "gellu")


def test_positional_arguments_of_others_are_to_be_named():
    with pytest.raises(TypeError, match=r"attention\(\) takes 4 positional arguments \(q, k, v, activation\), got 6"):
        gdpa.attention(Q, K, V, None, 0.0, True)
    with pytest.raises(
        TypeError, match=r"attention_varlen\(\) takes 6 positional arguments .*, got 7: pass the others by"
    ):
        gdpa.attention_varlen(ROWS, ROWS, ROWS, CU, CU, 4, 4)


def test_other_arguments_are_refused_as_python_does():
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        gdpa.attention(Q, K, V, casual=True)


def test_a_tensor_is_no_mask():
    with pytest.raises(TypeError, match=r"mask is a tensor of shape \(2, 6\).*from_padded"):
        gdpa.attention(Q, K, V, mask=torch.ones(B, L, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask is a tensor .*gdpa\.Mask"):
        gdpa.nn.SelfAttention(8, 2)(torch.randn(B, L, 8), mask=torch.ones(L, L, dtype=torch.bool))


LAYERS = {
    "self": lambda: gdpa.nn.SelfAttention(8, 2),
    "rotary": lambda: gdpa.nn.SelfAttention(8, 2, rotary=100.0),
    "seeds": lambda: gdpa.nn.SeedPooling(8, 2, 1),
    "pma": lambda: gdpa.nn.PMA(8, 2, 1),
    "hierarchical": lambda: gdpa.nn.HierarchicalSeedPooling(8, 2, 2, 1, 1),
    "hstu": lambda: gdpa.nn.HSTU(8, 2, 16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_a_mask_of_padding_points_to_from_padded(name):
    with pytest.raises(TypeError, match="from_padded"):
        LAYERS[name]()(torch.randn(B, L, 8), torch.ones(B, L, dtype=torch.bool))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("argument", ["key_padding_mask", "src_key_padding_mask"])
def test_a_layer_with_the_padding_of_another_library_points_there_too(name, argument):
    with pytest.raises(TypeError, match=rf"\(\) has no argument '{argument}': .*from_padded"):
        LAYERS[name]()(torch.randn(B, L, 8), **{argument: torch.ones(B, L, dtype=torch.bool)})


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_takes_its_batch_once(name):
    layer, x = LAYERS[name](), torch.randn(B, L, 8)
    with pytest.raises(TypeError, match=r"is called as layer\(x\), got 3 arguments: nn\.MultiheadAttention"):
        layer(x, x, x)
    with pytest.raises(TypeError, match=r"has no argument 'query': .* takes x once"):
        layer(query=x, key=x, value=x)


def test_a_layer_of_two_inputs_says_so():
    layer, x = gdpa.nn.PFFN(8, 2, 3, 2, 8), torch.randn(B, L, 8)
    with pytest.raises(TypeError, match=r"PFFN is called as layer\(x, context\), got 3 arguments$"):
        layer(x, x, x)


def test_layers_show_the_arguments_that_they_have():
    assert [*inspect.signature(gdpa.nn.SelfAttention.forward).parameters] == ["self", "x", "positions", "times", "mask"]


def test_integers_as_a_mask_of_padding_point_there_too():
    with pytest.raises(ValueError, match=r"without rotary.*from_padded"):
        gdpa.nn.SelfAttention(8, 2)(torch.randn(B, L, 8), torch.ones(B, L, dtype=torch.int64))


@pytest.mark.parametrize("written", ["arange", "triu", "shape"])
def test_positions_are_pointed_to(written):
    fn = {
        "arange": lambda s: s * torch.arange(s.shape[-1]),
        "triu": lambda s: s.triu(),
        "shape": lambda s: torch.relu(s) / s.shape[-1],
    }[written]
    with pytest.raises(gdpa.UnsupportedActivationError, match="kv_len" if written == "shape" else "q_idx, kv_idx"):
        gdpa.activation(fn)


@pytest.mark.parametrize("fn", [lambda s: torch.relu(s) / torch.relu(s).sum(-1, True), lambda s: s.softmax(-1)])
def test_sums_over_rows_are_pointed_to_normalize(fn):
    with pytest.raises(gdpa.UnsupportedActivationError, match='normalize="sum"'):
        gdpa.activation(fn)


class TestFromPadded:
    """Jagged.from_padded."""

    x = torch.randn(3, 4, 5)

    @pytest.mark.parametrize("kind", [torch.bool, torch.int64])
    def test_rows_are_kept_wherever_they_stand(self, kind):
        keep = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).to(kind)
        found = gdpa.nn.Jagged.from_padded(self.x, keep)
        assert found.cu_seqlens.tolist() == [0, 2, 2, 6]
        assert found.max_seqlen == 4
        assert torch.equal(found.values, torch.cat([self.x[0, 1:3], self.x[2]]))

    def test_lengths_and_back(self):
        lengths = torch.tensor([2, 0, 4])
        found = gdpa.nn.Jagged.from_padded(self.x, lengths)
        padded = found.to_padded()
        assert found.lengths.tolist() == [2, 0, 4]
        assert torch.equal(padded[0, :2], self.x[0, :2])
        assert not padded[1].any()

    def test_a_layer_sees_no_padding(self):
        layer = gdpa.nn.SelfAttention(5, 1, "sigmoid")
        mine = layer(gdpa.nn.Jagged.from_padded(self.x, torch.tensor([2, 3, 4])))
        assert torch.allclose(mine.values[:2], layer(self.x[:1, :2])[0], atol=1e-6)

    def test_gradients_go_back(self):
        x = self.x.clone().requires_grad_()
        gdpa.nn.Jagged.from_padded(x, torch.tensor([2, 0, 4])).values.sum().backward()
        assert x.grad.sum(-1).tolist() == [[5, 5, 0, 0], [0] * 4, [5] * 4]

    @pytest.mark.parametrize(
        ("keep", "kind", "words"),
        [
            (torch.ones(3, 4), TypeError, "float32"),
            (torch.ones(4, 3, dtype=torch.bool), ValueError, r"\(3, 4\)"),
            (torch.tensor([1, 2, 5]), ValueError, "1 to 5 of 4 rows"),
            ([1, 2, 3], TypeError, "list"),
        ],
    )
    def test_what_is_no_mask_is_refused(self, keep, kind, words):
        with pytest.raises(kind, match=words):
            gdpa.nn.Jagged.from_padded(self.x, keep)


def test_dropped_keys_are_those_of_the_mask():
    """The recipe of docs/functions.md."""
    keep = torch.rand(B * L, generator=torch.Generator().manual_seed(0)) >= 0.3
    mask = gdpa.Mask(lambda kv_row, keep: keep[kv_row], tables=(keep,))
    out = gdpa.attention(Q, K, V, "silu", mask=mask, out_scale=1 / 0.7)
    p = torch.nn.functional.silu(Q @ K.mT / D**0.5) * keep.view(B, 1, 1, L) / 0.7
    assert torch.allclose(out, p @ V, atol=1e-5)


def test_each_call_has_code_of_its_own():
    """So that torch.compile counts recompilations of each by itself."""
    functions = [getattr(gdpa, name) for name in CALLS]
    assert len({id(f.__code__) for f in functions}) == len(functions)


def test_pointing_costs_nothing_that_counts():
    """The wrapper, on a call of four keyword arguments."""
    from gdpa.foreign import points_the_way

    def plain(**kwargs):
        pass

    pointed = points_the_way(plain)

    def microseconds(fn):
        start = time.perf_counter()
        for _ in range(2000):
            fn(causal=True, scale=1.0, params=(), tables=())
        return (time.perf_counter() - start) / 2000 * 1e6

    assert min(microseconds(pointed) for _ in range(5)) - min(microseconds(plain) for _ in range(5)) < 3
