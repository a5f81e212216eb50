"""Modules that hold an Activation can be copied, saved and sent to other processes."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gdpa
from gdpa.functions.activation import from_name
from processes import run_program

CUSTOM = {
    "lambda": gdpa.activation(lambda s: torch.relu(s) ** 2.5 + torch.zeros_like(s) + torch.full((), 3.0)),
    "params": gdpa.activation(lambda s, a, b: torch.where(s > a, s * b, torch.sin(s).clamp(min=0.1))),
    "constant": gdpa.activation(lambda s: s * torch.tensor(2.5)),
    "cast": gdpa.activation(lambda s: s.to(torch.bfloat16).float() * 2),
    "triton": gdpa.activation(
        lambda s: s**3, triton=gdpa.TritonSource("p = s * s * s", "p = s * s * s; ds = 3 * s * s")
    ),
}
EVERY = {**{name: from_name(name) for name in gdpa.activations()}, **CUSTOM}


class Block(nn.Module):
    def __init__(self, activation: gdpa.Activation) -> None:
        super().__init__()
        self.activation = activation
        self.powers = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return gdpa.attention(x, x, x, self.activation, params=(self.powers, self.powers))


@pytest.mark.parametrize("act", EVERY.values(), ids=EVERY.keys())
def test_a_copy_is_the_same_activation(act: gdpa.Activation) -> None:
    assert copy.copy(act) is act
    assert copy.deepcopy(act) is act
    assert pickle.loads(pickle.dumps(act)) is act


def test_built_ins_are_pickled_by_name() -> None:
    assert b"gelu_tanh" in pickle.dumps(from_name("gelu_tanh"))
    assert len(pickle.dumps(from_name("gelu_tanh"))) < 100


def test_modules() -> None:
    x = torch.randn(1, 2, 4, 8)
    block = Block(CUSTOM["params"])
    twin = copy.deepcopy(block)
    assert twin.powers is not block.powers
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), block(x))
    assert set(block.state_dict()) == {"powers"}


def test_another_process(tmp_path: Path) -> None:
    """There the functions were never seen, and the lambdas cannot be imported."""
    s = torch.linspace(-3, 3, 7, dtype=torch.float64)
    a = torch.tensor(0.5, dtype=torch.float64)
    expected = [(act, act.key, act.source(), act(s, *[a] * act.n_params)) for act in EVERY.values()]
    (tmp_path / "expected").write_bytes(pickle.dumps((s, a, expected)))
    script = """
import pickle, sys, torch
s, a, expected = pickle.load(open(sys.argv[1], "rb"))
import gdpa
x = torch.randn(1, 1, 3, 8)
for act, key, source, values in expected:
    assert act.key == key and act.source() == source, act
    assert torch.equal(act(s, *[a] * act.n_params), values), act
    gdpa.attention(x, x, x, act, params=[torch.ones(())] * act.n_params)
"""
    run_program(script, str(tmp_path / "expected"))


def test_a_process_that_has_traced_nothing(tmp_path: Path) -> None:
    """Not even a built-in."""
    (tmp_path / "act").write_bytes(pickle.dumps(CUSTOM["params"]))
    script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).key)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "act"], capture_output=True, text=True)
    assert done.stdout.strip() == CUSTOM["params"].key, done.stderr
