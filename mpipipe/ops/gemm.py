"""Products of matrices in float32 on the processor: `gemm`, our own, where torch's libraries are slow.

    y = a b + bias        linear layers, the gradient of their input, logits
    total += a b          the gradient of a weight

Either factor may be the transpose of one whose rows lie side by side. What the kernel does not serve, other
dtypes, devices and tensors without data, is computed by torch, so callers need not ask. Where ours is faster
is measured form by form (`mpipipe.graph.contest`); nothing else calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpipipe.ops.library import define, differentiate, traced, written
from mpipipe.ops.native import by_device, device_type, workers
from mpipipe.ops.pointers import address, check, contiguous

_KERNELS = by_device({torch.float32: ("gemm_f32",)}, ("cpu",))


def gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a @ b + bias. a (m, k), b (k, n), bias (n,) -> (m, n), written to `out` if it is given, in which the
    elements of a row lie side by side. Without a graph: gradients are the caller's. Raises what torch raises
    for shapes and dtypes that do not fit, ValueError for an `out` or a bias that does not."""
    if not _served(a, b, bias, out):
        product = torch.mm(a, b, out=out) if out is not None else torch.mm(a, b)
        return product if bias is None else product.add_(bias)
    shape = (a.shape[0], b.shape[1])
    if bias is not None:
        check("bias", bias, shape[1:], a)
    if out is None:
        out = a.new_empty(shape)
    elif out.shape != shape or out.stride(1) != 1:
        raise ValueError(
            f"gemm: out has shape {tuple(out.shape)} and strides {out.stride()}; it must be {shape}, rows "
            "side by side"
        )
    _run(a, b, contiguous(bias), out, False)
    return out


def add_gemm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place; else as `gemm`."""
    if _served(a, b, total) and total.shape == (a.shape[0], b.shape[1]) and total.stride(1) == 1:
        _run(a, b, None, total, True)
        written(total)
    else:
        total.addmm_(a, b)


def _served(a: Tensor, b: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernel may be called: else torch computes, or says what is wrong."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or traced(a, b):
        return False
    given = [a, b, *(t for t in others if t is not None)]
    return all((device_type(t), t.dtype) in _KERNELS for t in given)


def _run(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    a, b = _packed(a), _packed(b)
    _KERNELS["cpu", torch.float32][0](
        a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), address(bias), out.data_ptr(), out.stride(0),
        *out.shape, a.shape[1], add, *workers(out),
    )  # fmt: skip


def _packed(x: Tensor) -> Tensor:
    """Itself where its rows or its columns lie side by side, else a copy."""
    return x if 1 in x.stride() else x.contiguous()


# -- for torch.export and torch.compile ------------------------------------------------------------------


def _operator(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return gemm(a, b, bias)


def _fake(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        check("bias", bias, b.shape[1:], a)
    return torch.mm(a, b)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.bias = inputs[2] is not None


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b = ctx.saved_tensors
    op = torch.ops.mpipipe.gemm
    return op(grad, b.t(), None), op(a.t(), grad, None), grad.sum(0) if ctx.bias else None


define("gemm(Tensor a, Tensor b, Tensor? bias) -> Tensor", _operator, _fake)
differentiate("gemm", _derivative, _setup)
