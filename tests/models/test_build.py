"""Features, build and the Configs: what they refuse, and what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gdpa.data import SyntheticLog
from gdpa.models import MODELS, Features, InterFormer, Kunlun, SequenceFeatures, SequenceSize, build
from models.cases import FEATURES, SIZES

USUAL = FEATURES["usual"]


def test_features_of_a_stream() -> None:
    features = Features.of(SyntheticLog(items=50, categories=10))
    assert features.dense == ("x0", "x1", "x2", "x3")
    assert features.sequences == (SequenceFeatures("history", ("item", "category", "kind"), ("age",)),)
    assert features.vocabularies == {"item": 50, "category": 10, "situation": 4, "kind": 4}


@pytest.mark.parametrize("layout", FEATURES)
def test_features_are_plain_values(layout: str) -> None:
    features = FEATURES[layout]
    assert Features.from_dict(json.loads(json.dumps(features.to_dict()))) == features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparse": ("item", "shop")}, r"vocabularies lacks the sizes of \['shop'\]"),
        ({"sequences": (USUAL.sequences[0],) * 2}, r"sequences must have different names, got \['clicks', 'clicks'\]"),
        ({"vocabularies": {**SIZES, "kind": 0}}, r"vocabularies\['kind'\] must be at least 1, got 0"),
    ],
)
def test_features_that_make_no_sense(change: dict[str, Any], message: str) -> None:
    plain = {name: getattr(USUAL, name) for name in ("dense", "sparse", "sequences", "vocabularies")}
    with pytest.raises(ValueError, match=message):
        Features(**{**plain, **change})


def test_a_sequence_of_nothing() -> None:
    with pytest.raises(ValueError, match="sequence 'views' has neither ids nor values"):
        SequenceFeatures("views", ())
    with pytest.raises(ValueError, match=r"features must have \['dense', 'sequences', 'sparse', 'vocabularies'\]"):
        Features.from_dict({"dense": []})


def test_two_ages_of_one_sequence() -> None:
    with pytest.raises(ValueError, match=r"sequence 'views' has more than one value called 'age', got"):
        SequenceFeatures("views", ("item",), ("age", "age"))


def test_softmax_of_every_head_is_softmax() -> None:
    def scales(activation: Any) -> list[float]:
        model = build("interformer", USUAL, dim=8, activation=activation)
        return [m.out_scale for m in model.modules() if hasattr(m, "out_scale")]

    assert scales(["softmax", "softmax"]) == scales("softmax") != scales(["silu", "gelu"])
    with pytest.raises(ValueError, match=r"softmax in all heads of a model or in none.*got \['softmax', 'silu'\]"):
        scales(["softmax", "silu"])


def test_unknown_models_and_options() -> None:
    with pytest.raises(
        ValueError, match="model 'bert' is unknown; known models: dlrm, din, transformer, hstu, interformer, kun"
    ):
        build("bert", USUAL)
    with pytest.raises(ValueError, match=r"dlrm has no option both_ways, depth; its options: dim, num_layers"):
        build("dlrm", USUAL, both_ways=True, depth=2)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("dlrm", {"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        ("dlrm", {"hidden": 64}, TypeError, "hidden must be a tuple of ints, got 64"),
        ("din", {"attention_hidden": (0,)}, ValueError, r"attention_hidden\[0\] must be at least 1, got 0"),
        ("interformer", {"both_ways": 1}, TypeError, "both_ways must be True or False, got 1"),
        ("interformer", {"dim": 33}, ValueError, "dim must be a multiple of num_heads, got dim=33 and num_heads=2"),
        ("interformer", {"dim": 6}, ValueError, "rotary needs heads of even width, got dim=6 and num_heads=2"),
        ("interformer", {"recent_tokens": -1}, ValueError, "recent_tokens must be at least 0, got -1"),
        ("interformer", {"window": -1}, ValueError, "window must be at least 0, got -1"),
        ("interformer", {"activation": "softmx"}, ValueError, "activation='softmx' is unknown"),
        ("interformer", {"backend": "cuda"}, ValueError, "backend='cuda' is unknown"),
        ("transformer", {"params": (1.0,)}, ValueError, "params has length 1, but activation 'exp' takes 0"),
        ("hstu", {"time_buckets": 0}, ValueError, "time_buckets must be at least 1, got 0"),
        ("hstu", {"time_unit": 0}, ValueError, "time_unit must be positive, got 0"),
        ("kunlun", {"tau": 0}, ValueError, "tau must be positive, got 0"),
        ("kunlun", {"num_tokens": 1}, ValueError, "num_tokens must be at least 2, got 1"),
        ("kunlun", {"sequences": {"views": {}}}, ValueError, r"sequences has sizes for \['views'\], but the features'"),
        ("kunlun", {"sequences": {"clicks": {"dim": 5}}}, ValueError, "dim must be a multiple of num_heads, got dim=5"),
        (
            "kunlun",
            {"sequences": {"clicks": {"width": 5}}},
            ValueError,
            r"sequences\['clicks'\] has no size width; sizes:",
        ),
        ("kunlun", {"sequences": 3}, TypeError, "sequences must be a dict of sizes by the names of sequences, got 3"),
        ("kunlun", {"sequences": {"clicks": 5}}, TypeError, r"sequences\['clicks'\] must be a SequenceSize or a dict"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(name, USUAL, **options)


def test_what_a_model_cannot_do_without() -> None:
    with pytest.raises(ValueError, match=r"there is no candidate to compare its events with"):
        build("din", FEATURES["no-sparse"])
    with pytest.raises(ValueError, match=r"features has no sequences for the transformer to read"):
        build("transformer", FEATURES["no-sequence"])
    with pytest.raises(ValueError, match=r"features has no sequences for HSTU to read"):
        build("hstu", FEATURES["no-sequence"])
    with pytest.raises(TypeError, match=r"config must be of InterFormer\.Config, got KunlunConfig"):
        InterFormer(USUAL, Kunlun.Config())
    with pytest.raises(TypeError, match=r"features must be a gdpa\.models\.Features, got dict"):
        build("dlrm", USUAL.to_dict())  # type: ignore[arg-type]


def test_each_sequence_has_its_own_size() -> None:
    sizes = {"clicks": SequenceSize(dim=16, num_heads=4, num_layers=3, tokens=3, window=5)}
    model = build("kunlun", FEATURES["two"], sequences=sizes, dim=8)
    text = repr(model)
    assert "dim=16, head_dim=4" in text
    assert "window=(5, 5)" in text
    assert "window=(50, 50)" in text
    clicks, views = model.sequences  # type: ignore[misc]
    assert [(p.feed is not None, p.attend is not None, p.pool is not None) for p in clicks.layers] == [
        (True, False, True),
        (False, True, False),
        (True, False, True),
    ]
    assert len(views.layers) == SequenceSize().num_layers


@pytest.mark.parametrize("name", MODELS)
def test_the_tables_that_are_read_are_those_there_are(name: str) -> None:
    model = build(name, USUAL)
    read = {"item", "category", "page"} | ({"kind"} if name not in ("dlrm", "din") else set())
    assert set(model.tables.sizes) == read  # type: ignore[union-attr]
