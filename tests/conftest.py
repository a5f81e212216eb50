"""Which tests can run here: kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1 in the environment)."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from support import GPU, HOPPER, INTERPRET

os.environ["GDPA_FUNCTIONS"] = "off"  # what is traced here is not to depend on what other runs left on the disk

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores: more threads in each make all of them many times slower

if INTERPRET:
    from interpreter import patch_language_once

    patch_language_once()

settings.register_profile("gdpa", deadline=None)  # no test may fail because a machine is slow
settings.load_profile("gdpa")

REASON_TRITON = "needs a GPU, or TRITON_INTERPRET=1"
REASON_GPU = "needs a GPU"
REASON_HOPPER = "needs a GPU of compute capability 9.0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:  # an address, another one in every worker, which then do not agree on the tests
            raise pytest.UsageError(f"{item.nodeid}: give its parameters ids of their own")
        if item.get_closest_marker("gpu") and (INTERPRET or not GPU):
            item.add_marker(pytest.mark.skip(reason=REASON_GPU))
        elif item.get_closest_marker("hopper") and (INTERPRET or not HOPPER):
            item.add_marker(pytest.mark.skip(reason=REASON_HOPPER))
        elif item.get_closest_marker("triton") and not (INTERPRET or GPU):
            item.add_marker(pytest.mark.skip(reason=REASON_TRITON))


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
