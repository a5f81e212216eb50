"""gdpa as an attention of transformers: softmax is SDPA's, masks and packing are honoured, the rest is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

import gdpa  # noqa: E402
from gdpa.integrations import transformers as bridge  # noqa: E402

VOCABULARY, LENGTH = 64, 12
KNOWN = ("5.22.", "5.23.")  # releases whose masks of packed sequences are recognised


@pytest.fixture(scope="module", autouse=True)
def registered():
    """softmax and sigmoid through gdpa, and sigmoid as plain torch."""
    bridge.register("gdpa_softmax", "softmax")
    bridge.register("gdpa_sigmoid", "sigmoid", out_scale=0.1)

    def plain(module, q, k, v, mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        p = torch.sigmoid(q @ k.mT * scaling)
        if mask is None and module.is_causal:
            mask = torch.ones(p.shape[-2:], dtype=torch.bool).tril(p.shape[-1] - p.shape[-2])
        p = p if mask is None else p.masked_fill(~mask, 0.0)
        return (0.1 * p @ v).transpose(1, 2), None

    AttentionInterface.register("plain_sigmoid", plain)
    AttentionMaskInterface.register("plain_sigmoid", masking.sdpa_mask)


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, pad_token_id=1, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def llama(sliding_window: int | None = None) -> Any:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, sliding_window=sliding_window,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


def using(model: Any, name: str) -> Any:
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    return model


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    """Lengths 12, 7 and 3."""
    keep = torch.arange(LENGTH) < torch.tensor([12, 7, 3])[:, None]
    return (keep.flip(1) if side == "left" else keep).long()


def logits(model: Any, name: str, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return using(model, name).eval()(**inputs).logits


def fine_tuned(model: Any, name: str, inputs: dict[str, Tensor], steps: int = 20) -> list[float]:
    model = using(model, name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- fine-tuning -----------------------------------------------------------------------------------------------------
def text() -> dict[str, Tensor]:
    ids, keep = tokens(), padding("right")
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"pixel_values": torch.randn(6, 3, 16, 16, generator=generator), "labels": torch.arange(6) % 3}


@pytest.mark.parametrize(("make", "inputs"), [(gpt2, text), (vit, images)], ids=["gpt2", "vit"])
def test_fine_tuning_with_softmax_is_that_with_sdpa(make: Any, inputs: Any) -> None:
    ours, theirs = (fine_tuned(make(), name, inputs()) for name in ("gdpa_softmax", "sdpa"))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.3


@pytest.mark.parametrize(("make", "inputs"), [(gpt2, text), (vit, images)], ids=["gpt2", "vit"])
def test_fine_tuning_with_another_function_is_that_of_its_formula(make: Any, inputs: Any) -> None:
    ours, theirs = (fine_tuned(make(), name, inputs()) for name in ("gdpa_sigmoid", "plain_sigmoid"))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.3


def test_a_model_is_made_with_it_by_name() -> None:
    bridge.register("gdpa_silu", "silu", out_scale=1 / LENGTH)
    config = gpt2().config
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="gdpa_silu")
    assert model.config._attn_implementation == "gdpa_silu"
    losses = fine_tuned(model, "gdpa_silu", text())
    assert losses[-1] < losses[0] - 0.3


# ---- masks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "grouped queries"])
@pytest.mark.parametrize(("ours", "theirs"), [("gdpa_softmax", "sdpa"), ("gdpa_sigmoid", "plain_sigmoid")])
def test_padding_is_not_seen(side: str, make: Any, ours: str, theirs: str) -> None:
    keep = padding(side)
    given = {"input_ids": tokens(), "attention_mask": keep}
    real = keep.bool()
    assert torch.allclose(logits(make(), ours, **given)[real], logits(make(), theirs, **given)[real], atol=1e-5)


def encoder(**options: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        attention_probs_dropout_prob=0.0, max_position_embeddings=32, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertModel(config).eval()


def bert_decoder() -> Any:
    return encoder(is_decoder=True, add_cross_attention=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_an_encoder_is_not_seen(side: str) -> None:
    model, keep = encoder(), padding(side)
    with torch.no_grad():
        ours, theirs = (
            using(model, name)(input_ids=tokens(), attention_mask=keep).last_hidden_state[keep.bool()]
            for name in ("gdpa_softmax", "sdpa")
        )
    assert torch.allclose(ours, theirs, atol=1e-5)


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartModel(config).eval()


def cross_attention(make: Any, keep: Tensor) -> dict[str, Tensor]:
    """What makes a decoder look at as many keys as it has rows, of which ``keep`` are no padding."""
    if make is bart:
        return {"input_ids": tokens(), "attention_mask": keep, "decoder_input_ids": tokens()}
    states = torch.randn(3, LENGTH, 32, generator=torch.Generator().manual_seed(4))
    return {"input_ids": tokens(), "encoder_hidden_states": states, "encoder_attention_mask": keep}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [bert_decoder, bart])
def test_padding_of_an_encoder_leaves_no_row_of_a_decoder_out(make: Any, side: str, compiled: bool) -> None:
    given = cross_attention(make, padding(side))
    ours, theirs = (using(make(), name) for name in ("gdpa_softmax", "sdpa"))
    ours = torch.compile(ours, backend="eager") if compiled else ours
    with torch.no_grad():
        found, expected = (model(**given).last_hidden_state for model in (ours, theirs))
    assert torch.allclose(found, expected, atol=1e-5)


def test_padding_is_left_out_only_where_it_is_that_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = bridge.RealRows.attend
    monkeypatch.setattr(bridge.RealRows, "attend", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    keep = padding("right")
    logits(gpt2(), "gdpa_softmax", input_ids=tokens(), attention_mask=keep)
    assert len(calls) == 2  # causal: both layers
    using(encoder(), "gdpa_softmax")(input_ids=tokens(), attention_mask=keep)
    assert len(calls) == 4  # both ways, by layers that take nothing but their own rows
    using(bert_decoder(), "gdpa_softmax")(**cross_attention(bert_decoder, keep), attention_mask=keep)
    assert len(calls) == 6  # of four layers two are causal


def test_a_mask_says_whether_it_is_causal_and_not_the_layer() -> None:
    layer, keep = nn.Identity(), padding("right").bool()
    layer.is_causal = False
    attend = AttentionInterface()["gdpa_softmax"]
    q, k, v = torch.randn(3, 3, 4, LENGTH, 8, generator=torch.Generator().manual_seed(5))
    mask = bridge.make_mask(3, LENGTH, LENGTH, mask_function=masking.causal_mask_function, attention_mask=keep)
    found = attend(layer, q, k, v, mask)[0]
    pairs = keep[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = nn.functional.scaled_dot_product_attention(q, k, v, pairs).transpose(1, 2)
    assert torch.allclose(found[keep], expected[keep], atol=1e-5)


@pytest.mark.parametrize("name", ["gdpa_softmax", "gdpa_sigmoid"])
def test_packed_sequences_do_not_see_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, lengths = tokens(1), (5, 4, 3)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([logits(gpt2(), name, input_ids=part)[0] for part in ids.split(lengths, 1)])
    calls: list[Any] = []
    real = bridge.RealRows.of_packing
    monkeypatch.setattr(bridge.RealRows, "of_packing", staticmethod(lambda mask: calls.append(mask) or real(mask)))
    packed = logits(gpt2(), name, input_ids=ids, position_ids=places, use_cache=False)[0]
    assert torch.allclose(packed, alone, atol=1e-5)
    cu = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    told = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    assert torch.allclose(
        logits(gpt2(), name, input_ids=ids, position_ids=places, use_cache=False, **told)[0], alone, atol=1e-5
    )
    if not transformers.__version__.startswith(KNOWN):
        pytest.skip(f"how transformers {transformers.__version__} writes packed masks is not known yet")
    assert len(calls) == 1  # jagged, and found once for both layers


def causal_then_packed(ids: torch.Tensor) -> Any:  # as transformers 5.22 has it
    return masking.and_masks(masking.causal_mask_function, masking.packed_sequence_mask_function(ids))


def packed_then_in_its_positions(ids: torch.Tensor) -> Any:  # as 5.23 has it
    if not hasattr(masking, "remap_positions_for_packed_sequence"):
        pytest.skip("transformers before 5.23")
    causal = masking.remap_positions_for_packed_sequence(masking.causal_mask_function, torch.arange(4)[None])
    return masking.and_masks(masking.packed_sequence_mask_function(ids), causal)


@pytest.mark.parametrize("join", [causal_then_packed, packed_then_in_its_positions])
def test_only_what_is_causal_in_packed_sequences_counts_as_packed(join: Any) -> None:
    ids = torch.tensor([[0, 0, 1, 1]])
    assert bridge._packed_ids(join(ids)) is ids
    assert bridge._packed_ids(masking.and_masks(join(ids), masking.causal_mask_function)) is None
    assert bridge._packed_ids(masking.or_masks(*[join(ids)] * 2)) is None
    window = masking.and_masks(masking.packed_sequence_mask_function(ids), masking.sliding_window_overlay(2))
    for other in (window, masking.causal_mask_function, masking.packed_sequence_mask_function(ids)):
        assert bridge._packed_ids(other) is None


def test_packed_rows_of_a_batch_are_divided_too() -> None:
    ids = tokens(2)
    places = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((5, 7), (2, 10))])
    given = {"input_ids": ids, "position_ids": places, "use_cache": False}
    assert torch.allclose(logits(gpt2(), "gdpa_softmax", **given), logits(gpt2(), "sdpa", **given), atol=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [("gdpa_softmax", "sdpa"), ("gdpa_sigmoid", "plain_sigmoid")])
def test_sliding_windows_and_masks_of_pairs_are_looked_up(ours: str, theirs: str) -> None:
    model = llama(sliding_window=4)
    given = {"input_ids": tokens()}
    assert torch.allclose(logits(model, ours, **given), logits(model, theirs, **given), atol=1e-5)
    assert not torch.allclose(logits(model, ours, **given), logits(llama(), ours, **given), atol=1e-3)
    pairs = torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5
    pairs |= torch.eye(LENGTH, dtype=torch.bool)
    for mask in (pairs, pairs[:1]):
        given = {"input_ids": tokens(), "attention_mask": mask}
        assert torch.allclose(logits(gpt2(), ours, **given), logits(gpt2(), theirs, **given), atol=1e-5)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_that_of_sdpa(cache: str | None) -> None:
    given = {"input_ids": tokens(3, 6), "attention_mask": padding("left")[:, :6].index_fill(1, torch.tensor([5]), 1)}
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "pad_token_id": 1,
               "disable_compile": True}  # fmt: skip
    found = [using(llama(), name).eval().generate(**given, **options) for name in ("gdpa_softmax", "sdpa")]
    assert torch.equal(*found)


# ---- params ----------------------------------------------------------------------------------------------------------
def test_parameters_of_a_module_learn_with_the_model() -> None:
    gate = nn.PReLU(4)
    bridge.register("gdpa_prelu", gate, normalize="abs", sink=1.0)
    model = gpt2()
    model.set_attn_implementation("gdpa_prelu")
    model.function = gate
    assert "function.weight" in model.state_dict()
    model(**text()).loss.backward()
    assert gate.weight.grad.abs().min() > 0


# ---- refusals --------------------------------------------------------------------------------------------------------
def test_dropout_is_refused_or_left_out_when_told() -> None:
    model = gpt2()
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.1
    with pytest.raises(ValueError, match=r"drops weights with probability 0\.1.*attn_pdrop"):
        using(model, "gdpa_softmax").train()(input_ids=tokens())
    using(model, "gdpa_softmax").eval()(input_ids=tokens())
    bridge.register("gdpa_without", "softmax", without_dropout=True)
    found = using(model, "gdpa_without").train()(input_ids=tokens()).logits
    assert torch.allclose(found, logits(gpt2(), "sdpa", input_ids=tokens()), atol=1e-5)


def test_masks_that_are_added_are_refused() -> None:
    mask = torch.zeros(3, 1, LENGTH, LENGTH)
    with pytest.raises(ValueError, match=r"torch\.float32, to be added to scores"):
        logits(gpt2(), "gdpa_softmax", input_ids=tokens(), attention_mask=mask)


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"output_attentions": True}], ids=str)
def test_what_a_model_may_ask_for_else_is_refused(asked: dict[str, Any]) -> None:
    attend = AttentionInterface()["gdpa_softmax"]
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match=f"does not support {next(iter(asked))}="):
        attend(nn.Identity(), q, q, q, None, **asked)


def test_what_cannot_be_compiled_is_refused_when_it_is_registered() -> None:
    with pytest.raises(gdpa.UnsupportedActivationError, match="cumsum"):
        bridge.register("gdpa_bad", lambda s: s.cumsum(-1))
    with pytest.raises(ValueError, match="a word without"):
        bridge.register("a|b", "silu")
    with pytest.raises(ValueError, match="nonsense"):
        bridge.register("gdpa_bad", "nonsense")
    assert "gdpa_bad" not in AttentionInterface()
