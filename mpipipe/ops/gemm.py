"""Products of matrices in float32 on the processor: `gemm`, our own, where torch's libraries are slow.

    y = a b + bias        linear layers, the gradient of their input, logits
    total += a b          the gradient of a weight

Either factor may be the transpose of one whose rows lie side by side. What the kernel does not serve, other
dtypes, devices and tensors without data, is computed by torch, so callers need not ask. `linear` and
`linear_cross_entropy` call it with `own=True`, which a run does for forms that were measured to be faster so
(mpipipe/graph/contest.py). Gradients are theirs: here is no graph, and a call that wants one is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpipipe.ops.library import traced, wants_gradient, written
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import address, check, contiguous, overlap

_KERNELS = by_device({torch.float32: ("gemm_f32",)}, ("cpu",))


def gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a @ b + bias. a (m, k), b (k, n), bias (n,) -> (m, n), written to `out` if it is given, in which the
    elements of a row lie side by side. Raises ValueError for shapes, dtypes or devices that do not fit, for
    an `out` that does not, or whose memory a or b has a part in, and where a gradient is wanted."""
    _refuse_gradient(a, b, bias, out)
    if not _served(a, b, bias, out) or (bias is not None and bias.shape != b.shape[1:]):
        _check(a, b, bias, out=out)
        if out is not None and not (traced(a, b, out) or _apart(out, a, b)):
            raise ValueError(_unfit("out", out, a, b))
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]))
    elif not _takes(out, a, b):
        raise ValueError(_unfit("out", out, a, b))
    _run(a, b, contiguous(bias), out, False)
    return out


def add_gemm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place. Raises ValueError as `gemm`."""
    _refuse_gradient(a, b, total)
    served = _served(a, b, total)
    if served and _takes(total, a, b):
        _run(a, b, None, total, True)
        return
    _check(a, b, total=total)
    if not (traced(a, b, total) or _apart(total, a, b)):
        raise ValueError(_unfit("total", total, a, b))
    total.addmm_(a, b)


def _refuse_gradient(*tensors: Tensor | None) -> None:
    if wants_gradient(*tensors):
        raise ValueError(
            "gemm has no derivative, and an argument requires a gradient; take torch.mm, or call it under "
            "torch.no_grad()"
        )


def _served(a: Tensor, b: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel may be called: else torch computes, or `_check` says what is wrong."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or traced(a, b):
        return False
    given = [a, b, *(t for t in others if t is not None)]
    return all((device_type(t), t.dtype) in _KERNELS for t in given)


def _check(a: Tensor, b: Tensor, bias: Tensor | None = None, **results: Tensor | None) -> None:
    """Raises ValueError for factors that do not fit, or a bias or a result that does not fit to them."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"gemm: a has shape {tuple(a.shape)} and b {tuple(b.shape)}; they must be (m, k) and (k, n)"
        )
    check("gemm: b", b, b.shape, a)
    if bias is not None:
        check("gemm: bias", bias, b.shape[1:], a)
    for name, result in results.items():
        if result is not None:
            check(f"gemm: {name}", result, (a.shape[0], b.shape[1]), a)


def _takes(out: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether the kernel can write to it: no row over another, none over a factor."""
    fits = out.shape == (a.shape[0], b.shape[1]) and out.stride(1) == 1 and out.stride(0) >= out.shape[1]
    return fits and _apart(out, a, b)


def _apart(out: Tensor, a: Tensor, b: Tensor) -> bool:
    return not overlap(out, a) and not overlap(out, b)


def _unfit(name: str, out: Tensor, a: Tensor, b: Tensor) -> str:
    return (
        f"gemm: {name} has shape {tuple(out.shape)} and strides {out.stride()}; it must be "
        f"{(a.shape[0], b.shape[1])}, rows side by side, and share or interleave no memory with a or b"
    )


def _run(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    a, b = _packed(a), _packed(b)
    _KERNELS["cpu", torch.float32][0](
        a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), address(bias), out.data_ptr(), out.stride(0),
        *out.shape, a.shape[1], add, *workers(out),
    )  # fmt: skip
    written(out)


def _packed(x: Tensor) -> Tensor:
    """Itself where its rows or its columns lie side by side, else a copy."""
    return x if 1 in x.stride() else x.contiguous()
