"""By what the vectorised hot loop of each kernel is recognised in its machine code.

Looked for is an instruction that no other loop of the function has, on the registers of the instruction set.
"""

from __future__ import annotations

from typing import NamedTuple

REGISTERS = {"v3": "%ymm", "v4": "%zmm", "sve": r"\bz[0-9]+\.[sdh]"}


class Loop(NamedTuple):
    symbol: str  # part of the function's name, a regular expression
    x86: str  # names of instructions
    arm: str
    least: int = 1  # of them


FUSED = "vfn?m(add|sub)[0-9]+ps", "fn?(mla|mls|mad|msb)"
LOOPS = {
    "words": Loop(r"cpu::.*\btile\(", "vpmulu?dq|vpmullq", "mul|umulh", 4),
    "dropout_f32": Loop(r"cpu::dropout<float", "vmulps", "fmul"),
    "dropout_f64": Loop(r"cpu::dropout<double", "vmulpd", "fmul"),
    "dropout_bf16": Loop(r"cpu::dropout<mpipipe::bf16", "vmulps", "fmul"),
}
