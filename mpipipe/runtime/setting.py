"""How torch computes in this process: threads, route of the matrix products, processor.

Part of `Numerics`: the same on every rank, and recorded, because each of them decides bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from mpipipe import native
from mpipipe.errors import ConfigError
from mpipipe.ops import device
from mpipipe.ops.native import KERNELS_BITS, MODULES, use_kernels
from mpipipe.values import Numerics

FP32_ERROR = 1e-5  # relative, allowed of a matrix product; bf16 operands give 1e-3 to 1e-2
OWN_ERROR = 8.0  # times the error of MKL's fp32: other orders of addition differ by less, TF32 by a thousand


def set_threads(threads: int) -> None:
    """Threads of every operator on this rank. Thread counts change bits (layer-norm gradients, sums)."""
    torch.set_num_threads(threads)


def set_gemm_route(route: str) -> None:
    """fp32 matrix products by MKL (torch's default) or by oneDNN, which is faster where MKL is held back.

    torch reaches oneDNN for fp32 through its bf16 switch; on processors with matrix units (AMX) that
    really rounds to bf16, so the route is refused there. Raises ConfigError.
    """
    use_gemm_route(route)
    if route != "onednn":
        return
    error = relative_error()
    if error > FP32_ERROR:
        use_gemm_route("mkl")
        raise ConfigError(
            f"kernels.gemm = onednn: oneDNN's product on this processor has a relative error of {error:.1e}, "
            f"fp32 allows {FP32_ERROR:.0e} (it rounds to bf16 here); set kernels.gemm to mkl"
        )


def use_gemm_route(route: str) -> None:
    """The switch alone, also where the result is no fp32: to measure it."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16" if route == "onednn" else "none"


def compute_as(numerics: Numerics, kernels: bool, on: torch.device) -> None:
    """All of this again, whether compiled kernels are in use, and the device: settings of the process, which
    another Pipeline in it, or its user, may have changed."""
    use_kernels(kernels)
    if device.here() != on:
        device.use(on)
    if torch.get_num_threads() != numerics.threads:
        set_threads(numerics.threads)
    use_gemm_route(numerics.gemm)


def relative_error() -> float:
    """Of a product of 256 x 256 on the processor by the route that is set, against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, device="cpu") for _ in range(2))
    exact = a.double() @ b.double()
    return float((torch.mm(a, b).double() - exact).norm() / exact.norm())


def is_fp32(error: float, own: float) -> bool:
    """Whether a product with this relative error is one of fp32. own: the error of MKL's for the same."""
    return error <= min(FP32_ERROR, OWN_ERROR * max(own, 1e-7))


def numerics_of(
    *, batch: int, micro_batches: int, bits: Literal["torch", "fast"] = "torch",
    op_table: Mapping[str, str] | None = None, **settings: Any,
) -> Numerics:  # fmt: skip
    """What decides bits, of a run in this process. settings: the fields of `Numerics` that users set."""
    ours = kernel_set() if bits == "fast" else ""
    return Numerics(
        batch=batch,
        micro_batch=-(-batch // micro_batches),
        micro_batches=micro_batches,
        bits=bits,
        op_table=dict(op_table or {}),
        torch=torch.__version__,
        instruction_set=f"{instruction_set()}{f', kernels {ours}' if ours else ''}",
        # whatever the table leaves to torch: norms and AdamW are not in it
        kernels=KERNELS_BITS if ours not in ("", "none") else "",
        **settings,
    )


def kernel_set() -> str:
    """That our own kernels are compiled for, such as v4 or cuda; "none" where there are none for the device
    of this rank."""
    kind = device.here().type
    if MODULES.get(kind) is None:
        return "none"
    return native.instruction_set() if device.on_host() else kind


def instruction_set() -> str:
    """What torch's own kernels were dispatched for, such as AVX512; on an accelerator, which one it is."""
    return str(torch.backends.cpu.get_cpu_capability()) if device.on_host() else device.name()
