"""Which random operators of torch become ours when a model is captured.

`replacement(op)` takes the arguments of the operator it stands for, plus `key`, `step` and `micro`:

    aten.dropout.default(x, 0.1, True)  ->  replacement(x, 0.1, True, key=..., step=..., micro=...)

`draws` tells whether a call would read torch's generator at all; one that does and has no replacement
must be refused at capture, because its numbers would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mpipipe.ops.attention import attention
from mpipipe.ops.draws import (
    bernoulli,
    bernoulli_like,
    integers,
    normal,
    normal_like,
    uniform,
    uniform_like,
)
from mpipipe.ops.dropout import dropout
from mpipipe.ops.recurrent import stacked

Tensor = torch.Tensor
# The stream's name (key, step, micro), and the arguments that no stream depends on: layout, pin_memory.
Options = Any


def draws(op: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
    """Whether this call of a torch operator reads the random generator.

    Dropout outside of training or with rate 0 does not; nor does attention or an LSTM without dropout."""
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | (kwargs or {})
    if given.get("train", True) is False or given.get("training", True) is False:
        return False
    rates = [given.get(n, 0.0) for n in ("dropout_p", "dropout") if n in names]
    if "dropout" in op._schema.name and "p" in names:
        rates.append(given["p"])
    return not rates or any(rate != 0 for rate in rates)


def replacement(op: Any) -> Callable[..., Any] | None:
    """Our form of a random torch operator, or None when there is none."""
    return REPLACEMENTS.get(str(op))


def _dropout(x: Tensor, p: float, train: bool, **stream: int) -> Tensor:
    return dropout(x, p, **stream) if train else x


def _dropout_(x: Tensor, p: float, train: bool, **stream: int) -> Tensor:
    return x.copy_(dropout(x, p, **stream)) if train and p else x


def _feature_dropout(x: Tensor, p: float, train: bool, **stream: int) -> Tensor:
    """Whole channels (Tompson et al. 2015): one draw for each (sample, channel)."""
    if not train or p == 0.0:
        return x
    ones = torch.ones(x.shape[:2] + (1,) * (x.dim() - 2), dtype=x.dtype, device=x.device)
    return x * dropout(ones, p, **stream)


def _filled(
    draw: Callable[..., Tensor], shape: Any, like: Tensor | None, options: dict[str, Options]
) -> Tensor:
    """`draw` with torch's rule for an omitted dtype: that of `like`, else the default one."""
    stream = {name: options[name] for name in ("key", "step", "micro")}
    dtype, device = options.get("dtype"), options.get("device")
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    return draw(shape, **stream, dtype=dtype or torch.get_default_dtype(), device=str(device or "cpu"))


def _rand(size: Any, **options: Options) -> Tensor:
    return _filled(uniform, size, None, options)


def _rand_like(x: Tensor, **options: Options) -> Tensor:
    return _filled(uniform, x.shape, x, options)


def _randn(size: Any, **options: Options) -> Tensor:
    return _filled(normal, size, None, options)


def _randn_like(x: Tensor, **options: Options) -> Tensor:
    return _filled(normal, x.shape, x, options)


def _randint(high: int, size: Any, **options: Options) -> Tensor:
    return _randint_low(0, high, size, **options)


def _randint_low(low: int, high: int, size: Any, **options: Options) -> Tensor:
    options["dtype"] = options.get("dtype") or torch.int64
    return _filled(partial(integers, low, high), size, None, options)


def _randint_like(x: Tensor, high: int, **options: Options) -> Tensor:
    return _randint_like_low(x, 0, high, **options)


def _randint_like_low(x: Tensor, low: int, high: int, **options: Options) -> Tensor:
    return _randint_low(low, high, x.shape, **{"dtype": x.dtype, "device": x.device} | _given(options))


def _given(options: dict[str, Options]) -> dict[str, Options]:
    return {name: value for name, value in options.items() if value is not None}


def _bernoulli_(x: Tensor, p: float = 0.5, *, generator: None = None, **stream: int) -> Tensor:
    return x.copy_(bernoulli_like(x, p, **stream))


def _uniform_(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None, **stream: int
) -> Tensor:
    return x.copy_(uniform_like(x, **stream) * (high - low) + low)


def _normal_(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None, **stream: int
) -> Tensor:
    return x.copy_(normal_like(x, **stream) * std + mean)


def _bernoulli(probabilities: Tensor, *, generator: None = None, **stream: int) -> Tensor:
    return bernoulli(probabilities, **stream)


def _bernoulli_p(x: Tensor, p: float, *, generator: None = None, **stream: int) -> Tensor:
    return bernoulli_like(x, p, **stream)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "aten.dropout.default": _dropout,
    "aten.dropout_.default": _dropout_,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.rand.default": _rand,
    "aten.rand_like.default": _rand_like,
    "aten.randn.default": _randn,
    "aten.randn_like.default": _randn_like,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint_low,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli_p,
    "aten.bernoulli_.float": _bernoulli_,
    "aten.uniform_.default": _uniform_,
    "aten.normal_.default": _normal_,
    "aten.randint_like.default": _randint_like,
    "aten.randint_like.low_dtype": _randint_like_low,
    "aten.lstm.input": stacked(torch.ops.aten.lstm.input),
    "aten.gru.input": stacked(torch.ops.aten.gru.input),
    "aten.rnn_tanh.input": stacked(torch.ops.aten.rnn_tanh.input),
    "aten.rnn_relu.input": stacked(torch.ops.aten.rnn_relu.input),
}
