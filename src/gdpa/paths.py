"""Names that people give, of files and of what gdpa has, looked up before anything slow begins. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

# What gdpa.activations(), gdpa.models.MODELS and gdpa.data.convert.CONVERTERS have, which need torch.
ACTIVATIONS = (
    "elu", "exp", "gelu", "gelu_tanh", "hardswish", "identity", "laplace", "leaky_relu", "mish", "relu", "relu_squared",
    "sigmoid", "silu", "softplus", "tanh",
)  # fmt: skip
MODELS = ("dlrm", "din", "transformer", "hstu", "interformer", "kunlun")
CONVERTERS = ("movielens-100k", "movielens-1m", "movielens-20m", "kuairand-pure", "kuairand-1k", "kuairand-27k")
SOFTMAX = "softmax"


def expand(names: Sequence[str | Path]) -> list[Path]:
    """The files that names and patterns mean, in order. One that means none is refused."""
    paths: list[Path] = []
    for name in names:
        if glob.has_magic(str(name)) and not Path(name).exists():
            matches = sorted(glob.glob(str(name), recursive=True))
            if not matches:
                raise FileNotFoundError(f"no file matches {str(name)!r} (looked in {Path.cwd()})")
            paths += map(Path, matches)
        elif Path(name).is_dir():
            raise FileNotFoundError(
                f"{str(name)!r} is a folder: name files in it, such as {str(Path(name) / '*.csv')!r}"
            )
        elif not Path(name).is_file():
            raise FileNotFoundError(f"there is no file {str(name)!r} (looked in {Path.cwd()})")
        else:
            paths.append(Path(name))
    return paths


def check_spec(spec: str) -> None:
    """Refuses file.py:function if there is no such file."""
    where = spec.rpartition(":")[0]
    if where.endswith(".py"):
        expand([where])


def check_function(spec: str, also: Sequence[str] = ()) -> None:
    """Refuses a function of a file that is not there, and a name that is neither a built-in's nor one of ``also``."""
    check_spec(spec)
    if ":" in spec or spec in (*ACTIVATIONS, *also):
        return
    if spec == SOFTMAX:
        raise ValueError("'softmax' is not a function of one score, but exp divided by its sum over the row")
    known = ", ".join(sorted([*ACTIVATIONS, *also]))
    raise ValueError(
        f"{spec!r} is not a built-in ({known}); name your own function as module:function or file.py:function"
    )


def check_model(name: str) -> None:
    """Refuses a model of a file that is not there, and a name that no model has."""
    check_spec(name)
    if ":" not in name and name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; known models: {', '.join(MODELS)}")
