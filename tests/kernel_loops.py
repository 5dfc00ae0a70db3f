"""By what the vectorised hot loop of each kernel is recognised in its machine code.

Looked for are instructions that no other loop of these functions has, on the registers of an instruction set.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REGISTERS = {
    "base": "%xmm", "v3": "%ymm", "v4": "%zmm", "v4_bf16": "%zmm", "sve": r"\bz[0-9]+\.[sdh]",
}  # fmt: skip
FIXED = r"\bv[0-9]+\.(4s|2d)"  # of aarch64: 16 bytes whatever the processor has


class Loop(NamedTuple):
    """least: instructions of these names (regular expressions) in functions whose name contains `symbol`."""

    symbol: str
    x86: str
    arm: str
    least: int = 1
    arm_registers: str = REGISTERS["sve"]

    def x86_of(self, instruction_set: str) -> str:
        """The first set has no fused products, and its names do not begin with a v."""
        if instruction_set != "base":
            return self.x86
        return re.sub(r"\bv", "", self.x86.replace(FUSED, "vmulp[sd]"))


FUSED = "vfn?m(add|sub)[0-9]+p[sd]"
ARM_FUSED = "f(n?mla|n?mls|n?mad|n?msb)"
LOOPS = {
    "words": Loop(r"cpu::.*\btile\(mpipipe::Stream", "vpmulu?dq|vpmullq", "mul|umulh|umull2?", 4),
    "dropout_f32": Loop(r"cpu::dropout<float", "vmulps", "fmul"),
    "dropout_f64": Loop(r"cpu::dropout<double", "vmulpd", "fmul"),
    "dropout_bf16": Loop(r"cpu::dropout<mpipipe::bf16", "vmulps", "fmul"),
    "adamw_f32": Loop(r"\bupdate<float>", "vsqrtps", "fsqrt"),
    "adamw_bf16": Loop(r"\bupdate<mpipipe::bf16>", "vsqrtps", "fsqrt"),
    "norms_f32": Loop(r"cpu::norms<float>", FUSED, ARM_FUSED, 2),
    "norms_bf16": Loop(r"cpu::norms<mpipipe::bf16>", FUSED, ARM_FUSED, 2),
    "accumulate": Loop(r"cpu::.*\badd<(true|false)>", "vaddps", "fadd", 2),
    "flash_attention_products": Loop(r"mpipipe::(block|panels?|multiply)<", FUSED, ARM_FUSED, 8, FIXED),
    "embedding": Loop(r"cpu::embedding_backward", "vaddps", "fadd", 3),
    "gemm": Loop(r"cpu::.*\bblock_of<|mpipipe::block<\(mpipipe::Into\)4", FUSED, ARM_FUSED, 8, FIXED),
    "flash_attention_weights": Loop(r"cpu::.*\bweigh<", FUSED, ARM_FUSED, 4, FIXED),
    "norm_addition_f32": Loop(r"\badd_row<float, float>", "vaddps", "fadd"),
    "norm_addition_bf16": Loop(r"\badd_row<mpipipe::bf16, mpipipe::bf16>", "vaddps", "fadd"),
    "norm_addition_f32_bf16": Loop(r"\badd_row<float, mpipipe::bf16>", "vaddps", "fadd"),
    "norm_scaling_and_addition_f32": Loop(r"\bscale_and_add<float, float>", FUSED, ARM_FUSED),
    "norm_scaling_and_addition_bf16": Loop(
        r"\bscale_and_add<mpipipe::bf16, mpipipe::bf16>", FUSED, ARM_FUSED
    ),
    "norm_scaling_and_addition_f32_bf16": Loop(r"\bscale_and_add<float, mpipipe::bf16>", FUSED, ARM_FUSED),
    "norm_narrowing": Loop(r"\bnarrow_row<float, mpipipe::bf16>", "vpsrld", "u?shrn?b?|lsr"),
    "norm_scaling_f32": Loop(r"\bscale_row<float>", FUSED, ARM_FUSED),
    "norm_scaling_bf16": Loop(r"\bscale_row<mpipipe::bf16>", FUSED, ARM_FUSED),
    "norm_gradient_f32": Loop(r"\brow_gradient<(true|false), float>", FUSED, ARM_FUSED, 2),
    "norm_gradient_bf16": Loop(r"\brow_gradient<(true|false), mpipipe::bf16>", FUSED, ARM_FUSED, 2),
    "norm_sums_f32": Loop(r"\brun_sum<true, float>", FUSED, ARM_FUSED, 4, FIXED),
    "norm_sums_bf16": Loop(r"\brun_sum<true, mpipipe::bf16>", FUSED, ARM_FUSED, 4, FIXED),
    "layer_norm_backward_f32": Loop(r"\brun_sums<true, float>", FUSED, ARM_FUSED, 2, FIXED),
    "layer_norm_backward_bf16": Loop(r"\brun_sums<true, mpipipe::bf16>", FUSED, ARM_FUSED, 2, FIXED),
    "rms_norm_backward_f32": Loop(r"\brun_sums<false, float>", FUSED, ARM_FUSED, 2, FIXED),
    "rms_norm_backward_bf16": Loop(r"\brun_sums<false, mpipipe::bf16>", FUSED, ARM_FUSED, 2, FIXED),
    "batch_norm_f32": Loop(r"\brun_forward<true, true, float>", FUSED, ARM_FUSED, 1),
    "batch_norm_bf16": Loop(r"\brun_forward<true, true, mpipipe::bf16>", FUSED, ARM_FUSED, 1),
    "batch_norm_sums_f32": Loop(r"\brun_sums<.*Passed.*, float>", FUSED, ARM_FUSED, 8, FIXED),
    "batch_norm_sums_bf16": Loop(r"\brun_sums<.*Passed.*, mpipipe::bf16>", FUSED, ARM_FUSED, 8, FIXED),
    "batch_norm_backward_f32": Loop(r"\brun_gradient<.*, float>", FUSED, ARM_FUSED, 4),
    "batch_norm_backward_bf16": Loop(r"\brun_gradient<.*, mpipipe::bf16>", FUSED, ARM_FUSED, 4),
    "cross_entropy_forward": Loop(r"cpu::.*\badd_block\(", FUSED, ARM_FUSED, 4, FIXED),
    "cross_entropy_backward_f32": Loop(r"cpu::cross_entropy_backward<float>", FUSED, ARM_FUSED, 4),
    "cross_entropy_backward_bf16": Loop(r"cpu::cross_entropy_backward<mpipipe::bf16>", FUSED, ARM_FUSED, 4),
    "max_pool2d_f32": Loop(r"\bpool_row<.*, float>", "vcmp[a-z]+ps", "fcm(gt|ge|lt|le|uo)", 4),
    "max_pool2d_bf16": Loop(r"\bpool_row<.*, mpipipe::bf16>", "vcmp[a-z]+ps", "fcm(gt|ge|lt|le|uo)", 4),
    "bias_gelu_f32": Loop(r"\bgelu_row<.*Exact, float>", FUSED, ARM_FUSED, 8),
    "bias_gelu_bf16": Loop(r"\bgelu_row<.*Exact, mpipipe::bf16>", FUSED, ARM_FUSED, 8),
    "bias_gelu_backward_f32": Loop(r"\bgelu_gradient<.*Exact, float, float>", FUSED, ARM_FUSED, 8),
    "bias_gelu_backward_bf16": Loop(
        r"\bgelu_gradient<.*Exact, mpipipe::bf16, mpipipe::bf16>", FUSED, ARM_FUSED, 8
    ),
    "tanh_gelu_f32": Loop(r"\bgelu_row<.*Tanh, float>", FUSED, ARM_FUSED, 4),
    "tanh_gelu_bf16": Loop(r"\bgelu_row<.*Tanh, mpipipe::bf16>", FUSED, ARM_FUSED, 4),
    "tanh_gelu_backward_f32": Loop(r"\bgelu_gradient<.*Tanh, float, float>", FUSED, ARM_FUSED, 4),
    "tanh_gelu_backward_bf16": Loop(
        r"\bgelu_gradient<.*Tanh, mpipipe::bf16, mpipipe::bf16>", FUSED, ARM_FUSED, 4
    ),
    "swiglu_f32": Loop(r"\bswiglu_row<float>", FUSED, ARM_FUSED, 4),
    "swiglu_bf16": Loop(r"\bswiglu_row<mpipipe::bf16>", FUSED, ARM_FUSED, 4),
    "swiglu_backward_f32": Loop(r"\bswiglu_gradient<float>", FUSED, ARM_FUSED, 4),
    "swiglu_backward_bf16": Loop(r"\bswiglu_gradient<mpipipe::bf16>", FUSED, ARM_FUSED, 4),
}
