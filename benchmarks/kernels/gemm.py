"""The three products of a linear layer in float32 against torch's, by the route that is set."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from benchmarks.kernels.harness import Call, Case
from mpipipe.ops.gemm import add_gemm, gemm

SHAPES = (512, 384, 1536), (512, 1536, 384), (256, 768, 2304), (256, 3072, 768)  # tokens, in, out


def cases() -> Iterator[Case]:
    for tokens, width, out in SHAPES:
        x, weight, bias = torch.randn(tokens, width), torch.randn(out, width), torch.randn(out)
        dy, total = torch.randn(tokens, out), torch.zeros(out, width)
        ways: dict[str, tuple[Call, Call]] = {
            "x W^T + b": (partial(gemm, x, weight.t(), bias), partial(functional.linear, x, weight, bias)),
            "dy W": (partial(gemm, dy, weight), partial(torch.mm, dy, weight)),
            "dW += dy^T x": (partial(add_gemm, total, dy.t(), x), partial(total.addmm_, dy.t(), x)),
        }
        for name, (ours, theirs) in ways.items():
            case, flops = f"{tokens} x {width} to {out}, {name}", 2.0 * tokens * width * out
            yield Case("gemm", case, ours, {"torch": theirs}, None, flops=flops)
