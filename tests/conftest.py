"""Which tests can run here: kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1 in the environment)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from processes import forked
from support import FULL, GPU, HOPPER, INTERPRET, SIMULATE

# What is traced here is not to depend on what other runs left on the disk. On Hopper functions are kept, as they are by
# default, since some kernels are others then (see compiled/sharing.py).
_functions = tempfile.TemporaryDirectory(prefix="gdpa-tests-")
os.environ["GDPA_FUNCTIONS"] = _functions.name if HOPPER and not INTERPRET else "off"

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else it compiles a program for each instruction set, 5 s a try

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores: more threads in each make all of them many times slower

if INTERPRET:
    from interpreter import speed_up

    speed_up()

settings.register_profile("gdpa", deadline=None)  # no test may fail because a machine is slow
settings.load_profile("gdpa")

HERE = {"gpu": GPU and not INTERPRET, "hopper": SIMULATE or (HOPPER and not INTERPRET), "triton": GPU or INTERPRET}


def pytest_report_header() -> str:
    missing = ", ".join(mark for mark, here in HERE.items() if not here)
    return f"left out, since this machine or this run has none: tests marked {missing}" if missing else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests of kernels are asked for, files that mark none are not imported, which takes long."""
    mark = config.option.markexpr
    if mark not in ("triton", "hopper") or not collection_path.name.startswith("test_"):
        return None
    return not re.search(rf"mark\.{mark}\b|targets\(", collection_path.read_text()) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that cannot run here are left out, not skipped one by one: there are thousands."""
    left_out, kept = [], []
    for item in items:
        if " at 0x" in item.nodeid:  # an address, another one in every worker, which then do not agree on the tests
            raise pytest.UsageError(f"{item.nodeid}: give its parameters ids of their own")
        runs = all(here for mark, here in HERE.items() if item.get_closest_marker(mark))
        (kept if runs else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """What was imported stays for good: it is not looked through whenever garbage is collected, half a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def spawned_by_forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the library spawns import nothing anew. What goes to them is pickled as ever. (`make test-all`
    spawns them.)"""
    if not FULL:
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: forked())


@pytest.fixture
def large_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels that large batches have on Hopper, for small ones."""
    from gdpa.backends import tuning
    from gdpa.backends.hopper import config

    monkeypatch.setattr(config, "AT_ONCE", 0)
    tuning.forget()  # and with it the plans of calls
    yield
    tuning.forget()


@pytest.fixture(autouse=True)
def _large_batches_too(request: pytest.FixtureRequest) -> None:
    """Every other test on a GPU, by its name: few could afford a batch that is large."""
    on_gpu = HERE["hopper"] and any(map(request.node.get_closest_marker, ("gpu", "hopper")))
    if on_gpu and zlib.crc32(request.node.nodeid.encode()) % 2:
        request.getfixturevalue("large_batch")


@pytest.fixture(autouse=True)
def _simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of Hopper's kernels on a machine without one, if they are asked for."""
    if not SIMULATE:
        yield
        return
    from simulator.launching import simulated_hopper

    with simulated_hopper(seed=zlib.crc32(request.node.nodeid.encode())):
        yield


@pytest.fixture(autouse=True)
def _no_leaking_settings():
    """Global switches of torch are as they were after every test. One of them torch turns itself: after a 16-bit
    product that oneDNN cannot do on this CPU it uses oneDNN for nothing any more, and products have other last bits."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    onednn = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = onednn
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
