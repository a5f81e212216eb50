"""The old place of gdpa.testing.cases."""

from __future__ import annotations

import warnings

from gdpa.testing.cases import *  # noqa: F403

warnings.warn("gdpa.bench.cases is gdpa.testing.cases now", DeprecationWarning, stacklevel=2)
