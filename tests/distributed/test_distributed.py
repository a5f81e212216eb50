"""gdpa.distributed on 2 and 4 processes against one. What is checked is in check_*.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed import ranks
from support import FULL

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.mark.parametrize("world", [2, 4] if FULL else [2])
def test_as_one_process(world: int, tmp_path: Path) -> None:
    failures = ranks.run(world, tmp_path)
    assert not failures, "\n".join(f"--- {name} {text}" for name, text in failures.items())


def test_import_is_light() -> None:
    """import gdpa leaves torch.distributed.tensor alone."""
    code = "import sys, gdpa; sys.exit('gdpa.distributed' in sys.modules or 'torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
