"""AdamW (Loshchilov and Hutter 2019) over flat buffers in one pass: clip, step, gradient back to zero.

A bfloat16 parameter has a float32 master, in which the steps add up; the parameter is the master rounded.
kernels/include/mpipipe/adamw.h has the formula.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch.optim.adamw import adamw as torch_adamw

from mpipipe.ops.library import define, traced, written
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import address, overlap

Tensor = torch.Tensor
_KERNELS = by_device({torch.float32: ("adamw_f32",), torch.bfloat16: ("adamw_bf16",)})


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    factor: float | Tensor = 1.0,
    master: Tensor | None = None,
) -> None:
    """Updates param, exp_avg and exp_avg_sq by factor * grad, and zeroes grad.

    All (N,), contiguous, apart from each other. param, grad: float32, or bfloat16 with a float32 `master`
    that param is rounded from; exp_avg, exp_avg_sq: float32. step counts from 1; factor: the clip
    coefficient; lr and factor may be tensors of one number, so that a graph need not read them. By the kernel
    an element gets the same bits wherever it lies and on any number of threads. Raises ValueError for another
    dtype or layout, buffers that overlap, a step below 1.
    """
    if traced(param):
        torch.ops.mpipipe.adamw(
            param.detach(), grad, exp_avg, exp_avg_sq, master, step, _in_graph(lr), *betas, eps, weight_decay,
            _in_graph(factor),
        )  # fmt: skip
    else:
        _eager(param, grad, exp_avg, exp_avg_sq, master, step, lr, *betas, eps, weight_decay, factor)


def _eager(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    lr: float | Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, factor: float | Tensor,
) -> None:  # fmt: skip
    buffers = _checked(param, grad, exp_avg, exp_avg_sq, master, step)
    for (one, a), (other, b) in combinations(buffers.items(), 2):
        if overlap(a, b):
            raise ValueError(f"adamw: {one} and {other} share memory; each needs its own")
    found = _KERNELS.get((device_type(param), param.dtype))
    if found is None:
        betas = beta1, beta2
        _by_torch(param, grad, exp_avg, exp_avg_sq, master, step, lr, betas, eps, weight_decay, factor)
        return
    found[0](
        param.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
        address(master), param.numel(), factor, lr, beta1, beta2, eps, weight_decay,
        step, *workers(param),
    )  # fmt: skip
    written(*buffers.values())


@torch.no_grad()
def _by_torch(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, factor: float | Tensor,
) -> None:  # fmt: skip
    own = param if master is None else master
    torch_adamw(
        [own], [grad.float() * torch.as_tensor(factor, dtype=torch.float32)], [exp_avg], [exp_avg_sq], [],
        [torch.tensor(step - 1.0)],  # torch counts it up in place
        foreach=False, fused=False, capturable=False, differentiable=False, has_complex=False, beta1=betas[0],
        beta2=betas[1], lr=lr, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    if master is not None:
        param.copy_(master)
    grad.zero_()


def _checked(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int
) -> dict[str, Tensor]:
    """The buffers by name, after what can be told of tensors without addresses, too."""
    buffers = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if master is not None:
        buffers["master"] = master
    if param.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"adamw: param is {param.dtype}; it must be float32, or bfloat16 with a float32 master"
        )
    if ("master" in buffers) != (param.dtype == torch.bfloat16):
        raise ValueError(
            f"adamw: param is {param.dtype} {'with' if 'master' in buffers else 'without'} a master; "
            "bfloat16 has a float32 one, float32 none"
        )
    for name, t in buffers.items():
        dtype = param.dtype if name in ("param", "grad") else torch.float32
        if t.dtype != dtype or t.shape != param.shape or t.device != param.device:
            raise ValueError(
                f"adamw: {name} is {tuple(t.shape)} of {t.dtype} on {t.device}; beside a param "
                f"{tuple(param.shape)} of {param.dtype} on {param.device} it must be "
                f"of {dtype}, and of its shape and device"
            )
        if t.dim() != 1 or not t.is_contiguous():
            raise ValueError(
                f"adamw: {name} has shape {tuple(t.shape)} and strides {t.stride()}; it must be one flat, "
                "contiguous buffer"
            )
    if step < 1:
        raise ValueError(f"adamw: step={step}; steps count from 1, before it there is no bias to correct by")
    return buffers


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _in_graph(number: float | Tensor) -> Tensor:
    """As an input of the graph: a number in it would ask for another graph as soon as it changes. This is the
    form in which torch lets one stay an input."""
    return torch.zeros((), dtype=torch.float64) + number


def _operator(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, factor: Tensor,
) -> None:  # fmt: skip
    _check_numbers(lr, factor)
    how = float(lr), beta1, beta2, eps, weight_decay, float(factor)
    _eager(param, grad, exp_avg, exp_avg_sq, master, step, *how)


def _operator_fake(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, factor: Tensor,
) -> None:  # fmt: skip
    _check_numbers(lr, factor)
    _checked(param, grad, exp_avg, exp_avg_sq, master, step)


def _check_numbers(lr: Tensor, factor: Tensor) -> None:
    for name, t in (("lr", lr), ("factor", factor)):
        if t.numel() != 1:
            raise ValueError(f"adamw: {name} has shape {tuple(t.shape)}; it must be one number")


define(
    "adamw(Tensor(a!) param, Tensor(b!) grad, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor(e!)? master,"
    " SymInt step, Tensor lr, float beta1, float beta2, float eps, float weight_decay, Tensor factor) -> ()",
    _operator,
    _operator_fake,
)
