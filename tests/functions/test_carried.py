"""Functions and masks that exported programs carry: rebuilt as they were, and nothing else is let through."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import gdpa
from functions.test_stored import RECORDED
from gdpa.functions import activation, mask
from gdpa.functions.activation import Activation, from_function, from_key, from_name, key_in_program
from gdpa.functions.documents.carried import read_function, read_mask
from gdpa.functions.keys import MARK
from gdpa.functions.places.names import TableKind


def biased(s: Tensor, slope: Tensor, table: Tensor, *, q_idx: Tensor, kv_idx: Tensor, h: Tensor) -> Tensor:
    return torch.sigmoid(s * slope + table[h, (q_idx - kv_idx).clamp(-3, 3) + 3])


def shifted(s: Tensor, *, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.nn.functional.silu(s - 0.1 * (q_idx - kv_idx).abs())


def made(name: str) -> Activation:
    if name == "biased":
        return from_function(biased, 1, tables=(TableKind(2, torch.float32),))
    return gdpa.activation(shifted if name == "shifted" else RECORDED[name])


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets what is known, as a process that has not made it."""

    def forget() -> None:
        for module in (activation, mask):
            monkeypatch.setattr(module, "_by_key", type(module._by_key)())

    return forget


@pytest.mark.parametrize("name", ["biased", "shifted", *RECORDED])
def test_what_is_carried_is_what_was_traced(name: str, elsewhere: Callable[[], None]) -> None:
    act = made(name)
    carrying = activation._carrying(act)
    assert carrying.startswith(f"{act.key}{MARK}{{")
    elsewhere()
    again = from_key(carrying)
    assert again is not act
    assert (again.key, again.name, again.joint.text()) == (act.key, act.name, act.joint.text())
    assert (again.n_params, again.tables) == (act.n_params, act.tables)
    assert from_key(act.key) is from_key(carrying) is again
    if act.placed is not None:
        assert again.placed.learned == act.placed.learned
        assert (again.placed.shift is None) == (act.placed.shift is None) == (name == "biased")


def test_masks(elsewhere: Callable[[], None]) -> None:
    seen = gdpa.Mask(lambda b, q_idx, kv_idx, ids: ids[b, q_idx] == ids[b, kv_idx], (torch.ones(1, 2).long(),))
    seen = seen & gdpa.masks.causal()
    carrying = mask.mask_key_in_program(seen.key)
    elsewhere()
    again = mask.mask_from_key(carrying)
    assert again is not seen._held
    assert again.program == seen._held.program
    assert mask.mask_from_key(seen.key) is again


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gdpa.attention(x, x, x, shifted, mask=lambda q_idx, kv_idx: q_idx != kv_idx)


@pytest.mark.parametrize("strict", [False, True])
def test_programs_that_torch_alone_has_exported(strict: bool, elsewhere: Callable[[], None]) -> None:
    x = torch.randn(1, 2, 5, 4)
    want = Attending()(x)
    score = torch.export.export(Attending(), (x,), strict=strict).module()
    elsewhere()
    assert torch.equal(score(x), want)


def test_compiled_code_carries_nothing() -> None:
    """It stays in its process, and long keys take time at every call."""
    named: list[str] = []

    def look(program: Any, inputs: Any) -> Any:
        named.extend(str(node.args) for node in program.graph.nodes)
        return program

    torch._dynamo.reset()
    torch.compile(Attending(), backend=look, fullgraph=True)(torch.randn(1, 2, 5, 4))
    assert any(gdpa.activation(shifted).key in text for text in named)
    assert not any(MARK in text for text in named)


def test_what_is_known_everywhere_or_has_code_of_its_own_is_not_carried(elsewhere: Callable[[], None]) -> None:
    assert key_in_program(from_name("silu").key) == from_name("silu").key
    own = gdpa.TritonSource("p = s * 3.5", "p = s * 3.5\nds = 3.5")
    act = gdpa.activation(lambda s: s * 3.5, triton=own)
    assert key_in_program(act.key) == act.key
    elsewhere()
    with pytest.raises(RuntimeError, match="no activation with the key"):
        from_key(act.key)


def changed(carrying: str, **parts: Any) -> tuple[str, str]:
    key, text = carrying.split(MARK, 1)
    return key, json.dumps({**json.loads(text), **parts})


def test_another_format_is_refused(elsewhere: Callable[[], None]) -> None:
    key, text = changed(key_in_program(made("shifted").key), version=99)
    elsewhere()
    q = torch.randn(1, 1, 2, 4)
    others = (*[None] * 5, [], [f"{key}{MARK}{text}"], 1.0, 1.0, *[None] * 4, "exact", None, None, False)
    with pytest.raises(ValueError, match="in format 99, this version of gdpa reads 1: run the program"):
        torch.ops.gdpa.attention(q, q, q, *others)


BAD = {
    "another function": [["placeholder", "s", [], {}, None]] * 2 + [["output", "output", [{"node": 0}], {}, None]],
    "no operation": [["call_function", "aten.nothing.default", [], {}, None]],
    "not element-wise": [["call_function", "aten.sum.default", [{"node": 0}], {}, None]],
    "reads a file": [["call_function", "aten.from_file.default", ["x"], {}, None]],
    "writes": [["call_function", "aten.relu_.default", [{"node": 0}], {}, None]],
    "no operator": [["call_function", "aten.add.overloads", [{"node": 0}], {}, None]],
    "another namespace": [["call_function", "gdpa.attention.default", [], {}, None]],
    "a later node": [["call_function", "aten.relu.default", [{"node": 7}], {}, None]],
    "a keyword with code": [["call_function", "aten.relu.default", [{"node": 0}], {"x=print(1)": 1}, None]],
    "a string with code": [["call_function", "aten.relu.default", ["'+print(1)+'"], {}, None]],
    "a module's method": [["call_module", "x", [], {}, None]],
    "a large constant": [["get_attr", "c", [], {}, ["float32", [1.0, 2.0]]]],
    "no dtype": [["call_function", "aten._to_copy.default", [{"node": 0}], {"dtype": {"torch": "load"}}, None]],
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_functions_are_refused(name: str) -> None:
    inputs = [["placeholder", f"x{i}", [], {}, None] for i in range(2)]
    end = [["output", "output", [{"node": 0}], {}, None]]
    recorded = BAD[name] if name == "another function" else inputs + BAD[name] + end
    with pytest.raises(ValueError, match=r"is damaged: .*; export the model again"):
        read_function(*changed(key_in_program(made("shifted").key), recorded=recorded))


OTHER_DAMAGE = {"name": "f(): pass\n"}, {"n_params": -1}, {"n_params": 1}, {"learned": [0]}, {"places": 3}


@pytest.mark.parametrize("parts", OTHER_DAMAGE)
def test_other_damage_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is damaged: "):
        read_function(*changed(key_in_program(made("shifted").key), **parts))


def test_a_text_that_is_cut_off_is_refused() -> None:
    key, text = key_in_program(made("shifted").key).split(MARK, 1)
    for cut in ("", text[:-1], "3", "[" * 100_000):
        with pytest.raises(ValueError, match="is damaged: "):
            read_function(key, cut)


@pytest.mark.parametrize(
    "node",
    [["position", [9], "int64"], ["lookup", [0, 1], "int64"], ["eval", [1], "bool"], ["le", [{"ref": 5}, 0], "bool"],
     ["le", ["1", 0], "bool"], ["le", [1], "bool"], ["le", [1, 0], "complex64"]],
)  # fmt: skip
def test_damaged_masks_are_refused(node: list[Any]) -> None:
    graph = {"n_inputs": 0, "nodes": [["position", [2], "int64"], node], "outputs": [{"ref": 1}]}
    carrying = mask.mask_key_in_program(gdpa.masks.causal().key)
    with pytest.raises(ValueError, match=r"the mask .* is damaged: "):
        read_mask(*changed(carrying, places={"graph": graph, "tables": []}))
