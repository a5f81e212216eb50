"""What defines a layer's attention: its function and params, its biases, its mask, and what outputs are divided by.

:class:`AttentionOptions` has the names, types and defaults of the options that layers hand on to their attention. A
layer takes ``**options: Unpack[EveryOption]``, or one of the narrower sets, and passes them on as they are; ``takes``
refuses others and shows each in the layer's signature.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from gdpa import backends
from gdpa.api import ActivationLike, MaskLike, NormalizeLike
from gdpa.arguments import checks
from gdpa.arguments.normalizing import functions_and_norms
from gdpa.foreign import INSTEAD
from gdpa.functions.modules import lift
from gdpa.masks.mask import Mask, as_mask
from gdpa.nn.biased import as_biases, resolve, tables_of
from gdpa.nn.biases import ScoreBias, Times
from gdpa.nn.function import Functions, HasFunction
from gdpa.nn.linear import positive
from gdpa.problem import PLAIN, sums_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack

BiasLike = ScoreBias | Sequence[ScoreBias] | None
TimesLike = Tensor | tuple[Tensor, Tensor] | None
Init = TypeVar("Init", bound=Callable[..., None])


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions:
    """How a layer attends, apart from its heads and its function; :class:`Attention` says what each option means.

    Layers take them one by one, or together as ``options``, for several layers at once. Arguments given beside
    ``options`` take precedence over it. An option that a layer cannot use is refused, as a window is by PFFN.

    >>> shared = AttentionOptions(normalize="sum", causal=True)
    >>> first, second = (SelfAttention(32, 4, "relu", options=shared, window=(w, 0)) for w in (8, 64))
    >>> second.attention.normalize, second.attention.window
    ('sum', (64, 0))
    """

    params: Sequence[float | Tensor] = ()
    normalize: NormalizeLike = None
    sink: float = 0.0
    learn_sink: bool = False
    score_bias: BiasLike = None
    mask: MaskLike = None
    scale: float | None = None
    out_scale: float = 1.0
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    backend: str | None = None


class FunctionOptions(TypedDict, total=False):
    """The options of layers that decide everything else themselves (HSTU)."""

    options: AttentionOptions | None
    params: Sequence[float | Tensor]
    normalize: NormalizeLike
    sink: float
    learn_sink: bool
    scale: float | None
    backend: str | None


class ScaledOptions(FunctionOptions, total=False):
    """And those of layers whose keys have no positions (PFFN)."""

    out_scale: float


class PlacedOptions(ScaledOptions, total=False):
    """And those of layers whose queries have no positions, and so are neither before nor after a key (the poolings)."""

    score_bias: BiasLike
    mask: MaskLike


class EveryOption(PlacedOptions, total=False):
    """And those of attention within a sequence."""

    causal: bool
    window: tuple[int | None, int | None] | None


OPTIONS = {f.name: f for f in fields(AttentionOptions)}


def takes(names: type) -> Callable[[Init], Init]:
    """For the __init__ of a layer that has ``**options: Unpack[names]``: others are refused, and its signature shows
    each with its type and default."""
    taken = [name for name in OPTIONS if name in names.__optional_keys__]  # type: ignore[attr-defined]

    def decorate(init: Init) -> Init:
        own = [p for p in inspect.signature(init).parameters.values() if p.kind != p.VAR_KEYWORD]
        known = {*(p.name for p in own), *taken, "options"}

        @wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    hint = f": {INSTEAD[name]}" if name in INSTEAD else ""
                    raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}{hint}")
            _check_together(type(self).__name__, given.get("options"), taken)
            init(self, *args, **given)

        checked.__signature__ = _signature(own, taken)  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def _check_together(layer: str, options: Any, taken: Sequence[str]) -> None:
    if options is None:
        return
    if not isinstance(options, AttentionOptions):
        raise TypeError(f"options must be a gdpa.nn.AttentionOptions, got {options!r}")
    for name, field in OPTIONS.items():
        if name not in taken and (value := getattr(options, name)) != field.default:
            raise TypeError(f"{layer}() does not take {name}, but options have {name}={value!r}")


def _signature(own: Sequence[inspect.Parameter], taken: Sequence[str]) -> inspect.Signature:
    """The layer's own arguments, those of its attention, then where and in which dtype weights are."""

    def argument(name: str, default: Any, annotation: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    options = [argument(name, OPTIONS[name].default, OPTIONS[name].type) for name in taken]
    last = [p for p in own if p.name in ("device", "dtype")]
    first = [p for p in own if p not in last]
    together = argument("options", None, f"{AttentionOptions.__name__} | None")
    return inspect.Signature([*first, *options, together, *last], return_annotation=None)


def gathered(given: Mapping[str, Any]) -> AttentionOptions:
    """Those of ``options``, with what is given beside them."""
    return replace(given.get("options") or AttentionOptions(), **{k: v for k, v in given.items() if k != "options"})


@dataclass(frozen=True)
class Heads:
    """The heads that this process computes: their number, functions, params, and what they are divided by."""

    count: int
    activation: Functions
    params: tuple[Tensor, ...]
    normalize: str | list[str | None] | None
    sink: float | Tensor


class Options(HasFunction):
    """The options of :class:`gdpa.nn.Attention`, checked, with all that is learned of them; and of cores that take its
    place.

    >>> Options(2, "softmax", sink=1.0, learn_sink=True).sink_logits.shape
    torch.Size([2])
    """

    sink_logits: nn.Parameter | None

    @takes(EveryOption)
    def __init__(
        self,
        num_heads: int,
        activation: ActivationLike = "gelu",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[EveryOption],
    ) -> None:
        super().__init__()
        given = gathered(options)
        params, scale, window = given.params, given.scale, given.window
        self.num_heads = positive("num_heads", num_heads)
        if isinstance(params, Tensor):
            raise TypeError("params must be a tuple or list of numbers or tensors, got one tensor; write params=(x,)")
        if not isinstance(params, tuple | list):
            hint = f": write params=[{params}]" if isinstance(params, int | float) else ""
            raise TypeError(f"params must be a tuple or list of initial values, got {type(params).__name__}{hint}")
        self.score_bias = nn.ModuleList(as_biases(given.score_bias, num_heads))
        lift(activation, params, num_heads)  # which refuses modules that cannot be lifted
        specs, norms = functions_and_norms(activation, given.normalize, num_heads)
        fixed = [None if isinstance(one, nn.Module) else resolve(one, len(params), self._biases) for one in specs]
        # None where a module is asked at every call.
        self._activation = fixed[0] if len(fixed) == 1 or isinstance(activation, nn.Module) else fixed
        self._adopt(activation, device, dtype)
        divided = [None if norm == PLAIN else norm for norm in norms]
        self.normalize = divided if len(set(divided)) > 1 else divided[0]
        self.scale = None if scale is None else checks.number("scale", scale)
        self.out_scale = checks.number("out_scale", given.out_scale)
        checks.band(given.causal, window)
        self.causal, self.window = given.causal, checks.bounds(window)
        backends.check_name(given.backend)
        self.backend = given.backend
        self._starts = tuple(_start(i, p, num_heads) for i, p in enumerate(params))
        self.params = nn.ParameterList(torch.empty(s.shape, device=device, dtype=dtype) for s in self._starts)
        self.sink = _checked_sink(given.sink, given.learn_sink, self.normalize, dtype or torch.get_default_dtype())
        logits = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if given.learn_sink else None
        self.register_parameter("sink_logits", logits)
        self.mask = None if given.mask is None else as_mask(given.mask)
        for i, table in enumerate(() if self.mask is None else self.mask.tables):
            self.register_buffer(f"mask_table{i}", torch.empty_like(table, device=device), persistent=False)
        self._start()
        self._called(tuple(self.params))  # what cannot be compiled is refused here

    def reset_parameters(self) -> None:
        """The params, the function's module, sinks and biases at their initial values."""
        self._start()
        self._start_function()
        for one in self._biases:
            one.reset_parameters()

    def _start(self) -> None:
        """Without the biases, which have started, and may be another layer's too."""
        with torch.no_grad():
            for p, start in zip(self.params, self._starts, strict=True):
                p.copy_(start)
            if self.sink_logits is not None:
                self.sink_logits.fill_(math.log(self.sink))
            for i, table in enumerate(() if self.mask is None else self.mask.tables):
                getattr(self, f"mask_table{i}").copy_(table)

    def _mask(self, given: MaskLike) -> Mask | None:
        """That of all calls, with its tables where the module is, and that of this one."""
        own = self.mask
        if own is not None and own.tables:
            own = own.with_tables([getattr(self, f"mask_table{i}") for i in range(len(own.tables))])
        if given is None or own is None:
            return own if given is None else as_mask(given)
        return own & as_mask(given)

    @property
    def needs_times(self) -> bool:
        """Whether a bias takes the times of rows."""
        return any(one.takes_times for one in self._biases)

    def _times(self, given: Any, row_counts: Callable[[], tuple[int, int]]) -> Times | None:
        """Of queries and keys, whose ``row_counts`` are asked for only if there are any."""
        if not self.needs_times:
            if given is not None:
                raise ValueError("times were given, but the layer has no time bias (score_bias=TimeBias(...))")
            return None
        pair = given if isinstance(given, tuple | list) else (given, given)
        if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeError(f"times must be a tensor, or a pair of those for queries and keys, got {given!r}")
        for side, t, count in zip(("queries", "keys"), pair, row_counts(), strict=True):
            if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
                raise TypeError(f"times must be integers (round them to the unit that counts), got {t.dtype}")
            if t.numel() != count:
                raise ValueError(
                    f"times must have one entry per row of the {side} ({count}), got shape {tuple(t.shape)}"
                )
        times_q, times_k = (t.reshape(-1).long() for t in pair)
        return times_q, times_k

    def _tables(self, times: Times | None) -> tuple[Tensor, ...]:
        """Those of the biases."""
        return tables_of(self._biases, times)

    def _heads(self) -> Heads:
        """All heads, or in gdpa.distributed those of this process."""
        sink = self.sink if self.sink_logits is None else learned_sink(self.sink_logits)
        given = tuple([self.params[i] for i in range(len(self.params))])  # Dynamo of 2.11 cannot unpack a ParameterList
        activation, params = self._called(given)
        return Heads(self.num_heads, activation, params, self.normalize, sink)

    def extra_repr(self) -> str:
        parts = [f"num_heads={self.num_heads}", f"activation={self._function_names()!r}"]
        usual_values = {"normalize": None, "sink": 0.0, "scale": None, "out_scale": 1.0, "causal": False}
        for name, usual in {**usual_values, "window": None, "mask": None, "backend": None}.items():
            if getattr(self, name) != usual:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)


def function_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The learned params of the functions, and the learned sinks, of all attention inside ``module``: a handful of
    numbers that give a function its shape, and that weight decay would pull towards another shape.

    >>> layer = gdpa.nn.SelfAttention(32, 4, torch.nn.PReLU())
    >>> shape = gdpa.nn.function_parameters(layer)
    >>> others = [p for p in layer.parameters() if all(p is not one for one in shape)]
    >>> optimizer = torch.optim.AdamW([{"params": others}, {"params": shape, "weight_decay": 0.0}], weight_decay=0.1)
    """
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        if isinstance(part, Options):
            own = () if part.function is None else part.function.parameters()
            sink = () if part.sink_logits is None else (part.sink_logits,)
            found |= {id(p): p for p in (*part.params, *own, *sink)}
    return list(found.values())


def learned_sink(logits: Tensor) -> Tensor:
    """Their exp, as wide as the sums that it is added to: in float16 it would be inf from a logit of 11.1 on. In
    float32 it would be from 88.7 on: larger logits count as that, and have no gradient."""
    wide = sums_dtype(logits.dtype)
    return logits.to(wide).clamp(max=math.log(torch.finfo(wide).max) - 1e-4).exp()


def _checked_sink(sink: Any, learn: Any, normalize: Any, dtype: torch.dtype) -> float:
    """A learned one is exp of logits of ``dtype``; of another the calls know theirs."""
    checks.flag("learn_sink", learn)
    number = checks.number("sink", sink, dtype if learn else torch.float64)
    if (number != 0 or learn) and normalize is None:
        what = "learn_sink=True" if learn else f"sink={sink!r}"
        raise ValueError(f"{what} is added to the row sums, but there are none: pass normalize as well, or use softmax")
    if learn and number <= 0:
        raise ValueError(f"learn_sink=True needs a positive sink to start from (1.0: a logit of 0), got {sink!r}")
    return number


def _start(i: int, value: Any, heads: int) -> Tensor:
    """The initial value of params[i], on the CPU: shape (heads,) of a number, its own of a tensor."""
    if not isinstance(value, Tensor):
        return torch.full((heads,), checks.number(f"params[{i}]", value), dtype=torch.float64, device="cpu")
    if value.shape != () and value.shape != (heads,):
        raise ValueError(f"params[{i}] must be a number or have shape () or ({heads},), got {tuple(value.shape)}")
    return value.detach().to("cpu", torch.float64, copy=True)
