"""What a compiler has made of a loop: the instructions of each function in a shared library.

objdump (GNU binutils) prints one line per instruction, here AT&T syntax on x86:

    0000000000022b30 <mpipipe::cpu::adamw<float>(float*, ...) [clone ._omp_fn.0]>:
       22b34:       vmulps %zmm1,%zmm2,%zmm3

A loop may lie in a clone or in a lambda of the function that is named in the source: both carry its name.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

HEAD = re.compile(r"^[0-9a-f]+ <(.*)>:$")
LINE = re.compile(r"^\s*[0-9a-f]+:\s+(\S+)\s*(.*)$")


class Instruction(NamedTuple):
    name: str
    operands: str


def functions(path: Path, objdump: str = "objdump") -> dict[str, list[Instruction]]:
    """By demangled name, clones and local functions included."""
    command = [objdump, "--disassemble", "--no-show-raw-insn", "--demangle", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Instruction]] = {}
    into: list[Instruction] = []
    for line in text.splitlines():
        if head := HEAD.match(line):
            into = found.setdefault(head[1], [])
        elif instruction := LINE.match(line):
            into.append(Instruction(instruction[1], instruction[2]))
    return found


def count(found: Mapping[str, Iterable[Instruction]], symbol: str, name: str, register: str) -> int:
    """Instructions that match `name` and have an operand that matches `register`, in all functions whose name
    contains a match of `symbol`. Raises LookupError where there is no such function."""
    inside = [body for function, body in found.items() if re.search(symbol, function)]
    if not inside:
        raise LookupError(f"no function is called {symbol}")
    return sum(
        bool(re.fullmatch(name, i.name) and re.search(register, i.operands)) for body in inside for i in body
    )
