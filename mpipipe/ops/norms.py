"""2-norms of parameters' gradients that lie in one flat buffer, without a copy of any."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from mpipipe.ops.library import define, differentiate, traced
from mpipipe.ops.native import by_device, device_type, workers

Tensor = torch.Tensor
_KERNELS = by_device({torch.float32: ("norms_f32",), torch.bfloat16: ("norms_bf16",)})


def norms(x: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    """(P,) float64 on the cpu: the 2-norm of x[offsets[i] : offsets[i] + counts[i]] for each i.

    x: (N,) contiguous, floating point; offsets, counts: (P,) int64, in elements. Sums in float64: no square
    overflows. By the kernel (float32, bfloat16) a norm depends on its own elements alone: not on its place,
    the threads or the instruction set. Raises ValueError for another layout, or a slice that leaves x.
    """
    if traced(x):
        found: Tensor = torch.ops.mpipipe.norms(x.detach(), offsets, counts)  # there is no derivative
    else:
        found = _eager(x, offsets, counts)
    return found if found.is_cpu or found.is_meta else found.cpu()


def _eager(x: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    """(P,) float64 on the device of x."""
    _check(x, offsets, counts)
    _check_slices(x, offsets, counts)
    kernels = _KERNELS.get((device_type(x), x.dtype))
    if kernels is None:
        return _by_torch(x, offsets, counts)
    starts, lengths = (offsets, counts) if x.is_cpu else (offsets.to(x.device), counts.to(x.device))
    out = torch.empty(len(starts), dtype=torch.float64, device=x.device)
    kernels[0](
        x.data_ptr(), starts.data_ptr(), lengths.data_ptr(), len(starts), out.data_ptr(), *workers(x)
    )  # fmt: skip
    return out


def _by_torch(x: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    slices = zip(offsets.tolist(), counts.tolist(), strict=True)
    found = [torch.linalg.vector_norm(x[at : at + n], dtype=torch.float64) for at, n in slices]
    return torch.stack(found) if found else x.new_empty(0, dtype=torch.float64)


def _check(x: Tensor, offsets: Tensor, counts: Tensor) -> None:
    """What can be told of tensors without data, too."""
    if x.dim() != 1 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(
            f"norms: x is {tuple(x.shape)} of {x.dtype}{'' if x.is_contiguous() else ', with strides'}; it "
            "must be one flat, contiguous buffer of floating point numbers"
        )
    for name, t in (("offsets", offsets), ("counts", counts)):
        if t.dtype != torch.int64 or t.shape != offsets.shape or t.dim() != 1 or not t.is_contiguous():
            raise ValueError(
                f"norms: {name} is {tuple(t.shape)} of {t.dtype}; offsets and counts must be int64, "
                f"contiguous and of one length, that of offsets is {tuple(offsets.shape)}"
            )
        if not t.is_cpu:
            raise ValueError(f"norms: {name} is on {t.device}; offsets and counts must be on the cpu")


def _check_slices(x: Tensor, offsets: Tensor, counts: Tensor) -> None:
    size, slices = x.numel(), zip(offsets.tolist(), counts.tolist(), strict=True)
    if any(at < 0 or n < 0 or at + n > size for at, n in slices):  # of some hundred numbers: no operators
        raise ValueError(
            f"norms: offsets from {int(offsets.min())}, ends up to {int((offsets + counts).max())}, counts "
            f"from {int(counts.min())}; every slice must lie in the {x.numel()} elements of x"
        )


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _operator_fake(x: Tensor, offsets: Tensor, counts: Tensor) -> Tensor:
    _check(x, offsets, counts)
    return x.new_empty(offsets.shape, dtype=torch.float64)


def _refused(*_: Any) -> NoReturn:
    raise RuntimeError("norms has no derivative; call it under torch.no_grad()")


define("norms(Tensor x, Tensor offsets, Tensor counts) -> Tensor", _eager, _operator_fake)
differentiate("norms", _refused)
