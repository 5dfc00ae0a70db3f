"""The compiled kernels, by the device of a tensor; None: then every op uses numpy and torch, slower.

processor   mpipipe._kernels_<instruction set>     last argument of a kernel: the number of threads
GPU         mpipipe._kernels_cuda, if it is built  last arguments: the stream, and the GPU's number
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch  # first: the kernels' threads are those of the OpenMP runtime that torch brought

from mpipipe.native import instruction_set, load

Key = TypeVar("Key")
Functions = tuple[Callable[..., Any], ...]


class Table(dict[tuple[str, Key], Functions]):
    """(type of device, key) -> functions. Raises ValueError for what is not there."""

    def __missing__(self, at: tuple[str, Key]) -> Functions:
        """Whoever calls a registered operator by its name has not asked before."""
        there = sorted({f"{key} on {device}" for device, key in self if device != "meta"})
        raise ValueError(
            f"no compiled kernel takes {at[1]} on {at[0]}; there are {', '.join(there) or 'none'}"
        )


# Of the functions that mpipipe/ops calls, and kernels/bind.h holds the same: raised with each change of them,
# and with KERNELS_BITS, so that modules that were built before are not used.
KERNELS_VERSION = "15"
# Of what they compute: raised where the same model gets other bits with bits = fast, as a kernel adds in
# another order, or an operator calls others. A run keeps it (`Numerics.kernels`), and is not resumed with
# another one. Other arguments, or more speed with the same bits, leave it: no resume is refused for nothing.
KERNELS_BITS = "5"
CUDA = "_kernels_cuda"
kernels = load(f"_kernels_{instruction_set()}", KERNELS_VERSION)
# without a word where it is not built, or where this torch has no tensors for it
cuda_kernels = (
    load(CUDA, KERNELS_VERSION, "tensors of a GPU are computed by torch alone", "make kernels CUDA=1")
    if torch.version.cuda is not None and find_spec(f"mpipipe.{CUDA}") is not None
    else None
)
MODULES: Mapping[str, ModuleType | None] = {"cpu": kernels, "meta": kernels, "cuda": cuda_kernels}
_TABLES: list[tuple[Table[Any], Table[Any]]] = []  # that the operators look into, and what is out of use


def by_device(names: Mapping[Key, tuple[str, ...]], devices: Collection[str] = MODULES.keys()) -> Table[Key]:
    """(type of device, key) -> functions of the compiled modules, for each key of `names` and each of the
    devices whose module is there. The kernels of the processor stand for those of "meta", where none is
    called. Operators call no other compiled function: what is not in their table they compute by torch and
    numpy, so that `use_kernels` need not ask them."""
    table = Table(
        {
            (device, key): tuple(getattr(module, name) for name in of_key)
            for device, module in MODULES.items()
            if module is not None and device in devices
            for key, of_key in names.items()
        }
    )
    _TABLES.append((table, Table()))
    return table


def device_type(x: torch.Tensor) -> str:
    """Of a table's keys. That of the processor takes a third of the time of asking x.device."""
    return "cpu" if x.is_cpu else x.device.type


def use_kernels(on: bool) -> None:
    """Of this process from here on. Off: every operator computes as where the modules are not built."""
    for table, out_of_use in _TABLES:
        taken, given = (out_of_use, table) if on else (table, out_of_use)
        given.update(taken)
        taken.clear()


def version_in_use() -> str:
    """Of the kernels that operators call; "none" where they call none."""
    return KERNELS_VERSION if any(table for table, _ in _TABLES) else "none"


def workers(x: torch.Tensor) -> tuple[int, ...]:
    """What a kernel on x takes last: threads, or the current stream of x's GPU and its number."""
    if x.is_cpu:
        return (torch.get_num_threads(),)
    index = x.get_device()  # the stream without an object around it: 0.2 us, where `current_stream` takes 5
    return torch._C._cuda_getCurrentRawStream(index), index
