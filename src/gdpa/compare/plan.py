"""What is compared: the functions, and the runs of training, which differ in function and seed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdpa.demo import contest
from gdpa.spec import Loaded, load_normalized
from gdpa.train import Config, ConfigError, ModelConfig, make_config, read_toml

MOST = 7  # functions: as many colours as a figure can tell apart
SOFTMAX = "softmax"
SEEDS = 3  # enough for an interval
STEPS = 80  # on the synthetic log: two functions and three seeds in two minutes on two cores
FUNCTION = ("activation", "params", "normalize")  # options of models that say what is compared, and of the command
MODELS = ("interformer", "transformer", "hstu", "kunlun")


@dataclass(frozen=True)
class Trial:
    """All runs of training. ``world`` are the synthetic click log's sizes; None with data of one's own, whose settings
    are then in ``base``."""

    contestants: tuple[contest.Contestant, ...]
    seeds: tuple[int, ...]
    steps: int
    rival: str  # the function that others are compared with, seed by seed
    world: contest.Plan | None
    base: Config | None = None

    def config(self, contestant: contest.Contestant, seed: int) -> Config:
        model = ModelConfig(contestant.model, contestant.options)
        if self.base is not None:
            return replace(self.base, seed=seed, model=model, out=None)
        assert self.world is not None
        return replace(contest.config_of(self.world, contestant, seed), model=model)


def load_functions(
    specs: Sequence[str], params: Mapping[str, tuple[float, ...]], normalize: Mapping[str, str] | None = None
) -> list[Loaded]:
    """The functions, each with its params: those given for its name, a module's own, or 1 for each. ``normalize``: by
    name, the sum that outputs are divided by."""
    divided = dict(normalize or {})
    found = [load_normalized(spec, divided.get(spec.rpartition(":")[2])) for spec in specs]
    names = [f.name for f in found]
    if len(found) < 2:
        raise ValueError("a comparison needs at least two functions: give --activation twice")
    if len(found) > MOST:
        raise ValueError(f"got {len(found)} functions, but at most {MOST} can be shown")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two functions are called {name!r}; a report tells them apart by name")
    for option, given in (("params", params), ("normalize", divided)):
        for name in given:
            if name not in names:
                raise ValueError(f"--{option} {name}=...: no such function; there are {', '.join(names)}")
    for f in found:
        if f.name in params:
            f.check_start(params[f.name], f"{f.name}=")
    return [f.with_params(params.get(f.name, f.params or (1.0,) * f.n_params)) for f in found]


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses what would be the same for all functions, or have no effect beside them."""
    for name in FUNCTION:
        if name in options:
            instead = "gelu" if name == "activation" else f"NAME={'sum' if name == 'normalize' else '0.5'}"
            raise ConfigError(f"--set {name}={options[name]}: functions are compared by --{name} {instead}")


def rival_of(functions: Sequence[Loaded]) -> str:
    """Softmax, if it is among them; else the first."""
    names = [f.name for f in functions]
    return SOFTMAX if SOFTMAX in names else names[0]


def make_trial(
    functions: Sequence[Loaded], *, model: str | None = None, options: Mapping[str, Any] | None = None,
    file: Path | None = None, seeds: int | None = None, steps: int | None = None, quick: bool = False,
) -> Trial:  # fmt: skip
    """The demonstration's click log and a small model, or what a file of ``gdpa train`` says. ``seeds`` and ``steps``
    win over ``quick``."""
    _check_options(options or {})
    numbers = tuple(range((1 if quick else SEEDS) if seeds is None else seeds))
    if file is not None:
        return _own_data(functions, read_toml(file), model, options or {}, numbers, steps)
    world = contest.make_plan(SOFTMAX, (), quick)
    if not quick or steps is not None:
        steps = STEPS if steps is None else steps
        world = replace(world, steps=steps, warmup=min(world.warmup, steps // 10))
    name = model or MODELS[0]
    given = {**_small(name, world), **(options or {})}
    baseline = contest.Contestant(contest.BASELINE, "dlrm", {"dim": world.dim})
    contestants = (baseline, *_contestants(functions, name, given))
    world = replace(world, contestants=contestants, seeds=numbers)
    return Trial(contestants, numbers, world.steps, rival_of(functions), world)


def _own_data(
    functions: Sequence[Loaded], read: dict[str, Any], model: str | None, options: Mapping[str, Any],
    seeds: tuple[int, ...], steps: int | None,
) -> Trial:  # fmt: skip
    if steps is not None:
        read = {**{k: v for k, v in read.items() if k != "epochs"}, "steps": steps}
    base = make_config(read)
    if base.steps is None:
        raise ConfigError("a comparison needs the number of steps: pass --steps, or set steps in the file")
    if base.parallel is not None:
        raise ConfigError(f"parallel={base.parallel!r}: a comparison trains each model in one process")
    given = {**base.model.options, **options}
    given = {k: v for k, v in given.items() if k not in FUNCTION}
    contestants = tuple(_contestants(functions, model or base.model.name, given))
    return Trial(contestants, seeds, base.steps, rival_of(functions), None, base)


def _contestants(functions: Sequence[Loaded], model: str, options: Mapping[str, Any]) -> list[contest.Contestant]:
    """The model with each function. A module brings its params itself."""
    found = []
    for f in functions:
        own: dict[str, Any] = {"activation": f.spec}
        if f.params and f.module is None:
            own["params"] = list(f.params)
        if f.normalize and f.spec != SOFTMAX:
            own["normalize"] = f.normalize
        found.append(contest.Contestant(f.name, model, {**options, **own}))
    return found


def _small(model: str, world: contest.Plan) -> dict[str, Any]:
    """Sizes for seconds on a CPU."""
    known: dict[str, dict[str, Any]] = {
        "interformer": {"num_layers": 1, "hidden_units": 8},
        "transformer": {"depth": 1},
        "hstu": {"depth": 1},
        "kunlun": {},
    }
    return {"dim": world.dim, "longest": world.longest, **known[model]} if model in known else {}
