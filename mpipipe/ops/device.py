"""The device that this rank computes on: its processor, or an accelerator of its node. Set once, at start.

    on the device     weights, gradients, optimizer state, activations
    in main memory    data, messages, checkpoints, mirrors: copied where they are handed over

The ranks of a node take its accelerators in turn. What torch can do for a type of device is all that is used
of it (`torch.accelerator`, and what `torch.cuda` shares with its likes).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from mpipipe.cluster import memory
from mpipipe.cluster.node import before_cuda
from mpipipe.errors import ConfigError

CPU = torch.device("cpu")
USABLE = 0.9  # of free memory
_here = CPU


def find(wish: str, local_rank: int = 0) -> torch.device:
    """The device of the rank `local_rank` of its node. wish: "cpu"; a type such as "cuda"; or "auto", an
    accelerator where there is one. Raises ConfigError where torch sees none of that type."""
    if wish == "cpu":  # nobody asks torch, which would start the driver
        return CPU
    there = torch.accelerator.current_accelerator(check_available=True)
    if wish == "auto" and there is None:
        return CPU
    if there is None or wish not in ("auto", there.type):
        sees = f"{there.type} and cpu" if there else "cpu alone"
        raise ConfigError(
            f"pipeline.device = {wish}: torch {torch.__version__} sees no such device here, but {sees}; ask "
            "for nodes that have one, install the PyTorch that is built for it (`python -m mpipipe doctor` "
            "shows what it sees), or set pipeline.device=cpu"
        )
    return torch.device(there.type, local_rank % torch.accelerator.device_count())


def use(device: torch.device) -> None:
    """From here on this process computes there, so that the same work has the same bits each time: only by
    kernels that give the same sums, as far as torch has them, and in whole fp32."""
    global _here
    before, _here = _here, device
    if device.type == "cpu":
        if before.type != "cpu":
            torch.use_deterministic_algorithms(False)
        return
    if device.type == "cuda":
        before_cuda()
        _same_sums_on_cuda()
    torch.accelerator.set_device_index(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # costs a pass


def _same_sums_on_cuda() -> None:
    """What `use_deterministic_algorithms` does not see to when it only warns: of torch's forms of attention
    the plain one alone adds up in one order backwards (its scores take memory); fp32 is never TF32."""
    backends: Any = torch.backends
    backends.cuda.enable_flash_sdp(False)
    backends.cuda.enable_mem_efficient_sdp(False)
    backends.cuda.enable_cudnn_sdp(False)
    backends.cudnn.benchmark = False
    # the old name first: where the new ones alone are set, torch itself fails to read it, in each export
    backends.cudnn.allow_tf32 = False
    backends.cudnn.conv.fp32_precision = backends.cudnn.rnn.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


def here() -> torch.device:
    return _here


def seen() -> str:
    """The accelerators that torch sees on this node, for people: "4 x NVIDIA H100"; empty: none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ""
    try:
        named = torch.get_device_module(kind).get_device_name(0)
    except RuntimeError as error:  # of a driver that is broken, or too old
        return f"{kind.type}, which does not start ({str(error).splitlines()[0]})"
    return f"{torch.accelerator.device_count()} x {named} ({kind.type})"


def idle() -> str | None:
    """What to say where this node has accelerators and this rank computes on its processor."""
    kind = torch.accelerator.current_accelerator(check_available=True) if on_host() else None
    if kind is None:
        return None
    count = torch.accelerator.device_count()
    return f"this node has accelerators ({count} x {kind.type}), and none is used; set pipeline.device=auto"


def on_host() -> bool:
    return _here.type == "cpu"


def name() -> str:
    """Of the model of the accelerator, such as "NVIDIA H100 80GB HBM3"."""
    return str(_module().get_device_name(_here))


def identity() -> str:
    """What tells the accelerator from the others of its node, also where each rank sees its own alone."""
    properties = getattr(_module(), "get_device_properties", lambda device: None)(_here)
    return str(getattr(properties, "uuid", _here.index))


def finish() -> None:
    """Waits for what was started there."""
    if not on_host():
        torch.accelerator.synchronize()


def finished() -> float:
    """The time, perf_counter seconds, when all that was started there is done."""
    finish()
    return time.perf_counter()


def free_bytes() -> int:
    """Of the accelerator's memory, whoever else uses it, without what the blocks of the allocator lose."""
    torch.accelerator.empty_cache()
    return int(USABLE * _module().mem_get_info(_here)[0])


def growth_bytes(work: Callable[[], object]) -> int:
    """The most that some work holds there beside what was there before; 0 where nobody says."""
    if on_host():
        return memory.growth_bytes(work)
    _module().reset_peak_memory_stats(_here)
    before = _allocated_bytes("current")
    work()
    return max(0, _allocated_bytes("peak") - before)


class DeviceMemory:
    """What this process holds of the accelerator's memory: as `mpipipe.cluster.memory.PeakMemory`."""

    def restart(self) -> None:
        _module().reset_peak_memory_stats(_here)

    @property
    def nbytes(self) -> int:
        return _allocated_bytes("peak")

    def sample(self) -> int:
        return _allocated_bytes("current")

    def base_bytes(self, saved_bytes: int) -> int:
        return self.sample()


def _allocated_bytes(which: Literal["current", "peak"]) -> int:
    """By torch's own record where its module shows it: `memory_allocated` first writes all of it down by
    dotted names, half a millisecond beside a GPU, and it is asked after each instruction."""
    record = getattr(_module(), "memory_stats_as_nested_dict", lambda device: None)
    if found := record(_here):  # it is empty before the first tensor
        return int(found["allocated_bytes"]["all"][which])
    name = "memory_allocated" if which == "current" else "max_memory_allocated"
    return int(getattr(_module(), name)(_here))


def _module() -> Any:
    return torch.get_device_module(_here)
