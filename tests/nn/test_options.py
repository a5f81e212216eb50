"""Options of attention: one by one or together, the same names everywhere, and what a layer cannot use is refused."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gdpa.nn as gnn
from gdpa import masks
from gdpa.nn import options

# A layer with few arguments, and the set of names that it takes.
LAYERS: dict[str, tuple[Callable[..., nn.Module], type]] = {
    "Attention": (lambda **given: gnn.Attention(2, "relu", **given), options.EveryOption),
    "SelfAttention": (lambda **given: gnn.SelfAttention(8, 2, "relu", **given), options.EveryOption),
    "SeedPooling": (lambda **given: gnn.SeedPooling(8, 2, 3, "relu", **given), options.PlacedOptions),
    "PMA": (lambda **given: gnn.PMA(8, 2, 3, "relu", **given), options.PlacedOptions),
    "HierarchicalSeedPooling": (
        lambda **given: gnn.HierarchicalSeedPooling(8, 2, 4, 2, 1, "relu", **given), options.PlacedOptions
    ),
    "PFFN": (lambda **given: gnn.PFFN(8, 2, 4, 2, 3, "relu", **given), options.ScaledOptions),
    "HSTU": (lambda **given: gnn.HSTU(8, 2, 16, "relu", **given), options.FunctionOptions),
}  # fmt: skip
VALUES: dict[str, Any] = {
    "normalize": "abs", "sink": 0.5, "learn_sink": True, "score_bias": gnn.ALiBi(2), "mask": masks.causal(),
    "scale": 0.25, "out_scale": 2.0, "causal": True, "window": (3, 0), "backend": "cpu",
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)


def core(layer: nn.Module) -> gnn.Attention:
    return next(m for m in layer.modules() if isinstance(m, gnn.Attention))


def test_the_sets_of_names_say_what_the_dataclass_says() -> None:
    types = {f.name: f.type for f in options.OPTIONS.values()}
    every = options.EveryOption
    assert every.__optional_keys__ == {*types, "options"}
    for names in (options.FunctionOptions, options.ScaledOptions, options.PlacedOptions, every):
        for name, reference in inspect.get_annotations(names).items():
            if name != "options":
                assert reference.__forward_arg__ == types[name], name


@every_layer
def test_signatures_show_each_option(name: str) -> None:
    found = inspect.signature(getattr(gnn, name)).parameters
    names = LAYERS[name][1].__optional_keys__  # type: ignore[attr-defined]
    assert names <= found.keys()
    for option in names - {"options"}:
        assert found[option].default == options.OPTIONS[option].default
        assert found[option].kind == inspect.Parameter.KEYWORD_ONLY
    assert not [p for p in found.values() if p.kind == p.VAR_KEYWORD]


@every_layer
def test_together_is_one_by_one(name: str) -> None:
    make, names = LAYERS[name]
    given = {option: value for option, value in VALUES.items() if option in names.__optional_keys__}  # type: ignore[attr-defined]
    one_by_one, together = core(make(**given)), core(make(options=gnn.AttentionOptions(**given)))
    for option in given.keys() - {"score_bias", "learn_sink"}:
        assert getattr(together, option) == getattr(one_by_one, option), option
    for found in (one_by_one, together):
        assert found.sink_logits is not None
        assert found.normalize == "abs"
    if "score_bias" in given:
        assert together.score_bias[0] is one_by_one.score_bias[0] is VALUES["score_bias"]


def test_what_is_given_beside_options_counts() -> None:
    shared = gnn.AttentionOptions(causal=True, out_scale=0.5, params=(0.25,))
    layer = gnn.SelfAttention(8, 2, lambda s, a: a * torch.relu(s), options=shared, out_scale=1.0)
    assert (layer.attention.causal, layer.attention.out_scale) == (True, 1.0)
    assert layer.attention.params[0].tolist() == [0.25, 0.25]
    assert core(gnn.SelfAttention(8, 2, options=shared, causal=False, params=())).causal is False


@every_layer
def test_what_a_layer_has_no_use_for_is_refused(name: str) -> None:
    make, names = LAYERS[name]
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'casual'$"):
        make(casual=True)
    for option in VALUES.keys() - names.__optional_keys__ - ({"out_scale"} if name == "HSTU" else set()):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{option}'"):
            make(**{option: VALUES[option]})
        with pytest.raises(TypeError, match=rf"{name}\(\) does not take {option}, but options have {option}="):
            make(options=gnn.AttentionOptions(**{option: VALUES[option]}))


def test_refusals_point_the_way() -> None:
    with pytest.raises(TypeError, match="'is_causal': use causal=True"):
        gnn.SelfAttention(8, 2, is_causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"options must be a gdpa\.nn\.AttentionOptions, got \{'causal': True\}"):
        gnn.SelfAttention(8, 2, options={"causal": True})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"does not take out_scale, but options have out_scale=2\.0"):
        gnn.HSTU(8, 2, 16, options=gnn.AttentionOptions(out_scale=2.0))
    with pytest.raises(TypeError, match="positional"):
        gnn.AttentionOptions((0.5,))  # type: ignore[call-arg]


@every_layer
def test_layers_are_pickled(name: str) -> None:
    """As whole modules; options leave nothing behind that could not be."""
    layer, file = LAYERS[name][0](options=gnn.AttentionOptions(normalize="sum", sink=1.0)), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert repr(again) == repr(layer)
    assert core(again).sink == 1.0
    again.load_state_dict(layer.state_dict())


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((2,), 0.1))

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return torch.relu(s) ** 2 + self.slope * s


class Resetting(nn.Module):
    """Knows how the module inside of it starts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        return self.gate(s)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate.slope, 0.5)


@pytest.mark.parametrize(
    ("make", "start"), [(lambda: nn.Sequential(nn.PReLU(), nn.Tanh()), 0.25), (Resetting, 0.5)], ids=["parts", "outer"]
)
def test_functions_made_on_meta_start_as_their_modules_do(make: Any, start: float) -> None:
    with torch.device("meta"):
        layer = gnn.SelfAttention(8, 2, make())
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    (found,) = layer.attention.function.parameters()
    assert (found == start).all()


def test_functions_made_on_meta_that_nobody_can_start_are_named() -> None:
    for make, name in (
        (Gate, r"function \(Gate\)"),
        (lambda: nn.Sequential(Gate(), nn.Tanh()), r"function\.0 \(Gate\)"),
    ):
        with torch.device("meta"):
            layer = gnn.SelfAttention(8, 2, make())
        with pytest.raises(RuntimeError, match=rf"{name} was made on meta.*reset_parameters"):
            layer.to_empty(device="cpu").reset_parameters()
