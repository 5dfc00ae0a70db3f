"""How torch computes in this process: threads, route of the matrix products, processor.

Part of `Numerics`: the same on every rank, and recorded, because each of them decides bits.
"""

from __future__ import annotations

from typing import Any

import torch

from mpipipe.errors import ConfigError


def set_threads(threads: int) -> None:
    """Threads of every operator on this rank. Thread counts change bits (layer-norm gradients, sums)."""
    torch.set_num_threads(threads)


def set_gemm_route(route: str) -> None:
    """fp32 matrix products by MKL (torch's default) or by oneDNN, which is faster where MKL is held back.

    torch reaches oneDNN for fp32 through its bf16 switch; on processors with matrix units (AMX) that
    really rounds to bf16, so the route is refused there. Raises ConfigError.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16" if route == "onednn" else "none"
    if route != "onednn":
        return
    error, allowed = _relative_error(), 1e-5  # bf16 operands give 1e-3 to 1e-2
    if error > allowed:
        matmul.fp32_precision = "none"
        raise ConfigError(
            f"kernels.gemm = onednn: oneDNN's product on this processor has a relative error of {error:.1e}, "
            f"fp32 allows {allowed:.0e} (it rounds to bf16 here); set kernels.gemm to mkl"
        )


def _relative_error() -> float:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return float((torch.mm(a, b).double() - exact).norm() / exact.norm())


def instruction_set() -> str:
    """What torch's own kernels were dispatched for, such as AVX512."""
    return str(torch.backends.cpu.get_cpu_capability())
