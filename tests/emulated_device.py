"""A GPU that the processor emulates: device "emulated", with torch's own means (emulated/device.cpp).

    import emulated_device
    emulated_device.register()             # before the first backward of the process; compiles once, a minute
    x = torch.ones(3, device="emulated:1")
    torch.emulated.max_memory_allocated(1)

Registered for good, so tests with it have a process of their own: those in tests/emulated get one by their
conftest.py. Another process needs this folder in its PYTHONPATH.

Unlike CUDA: no random numbers of its own, torch's default generator serves both; no LSTM and GRU; nothing is
asynchronous, and pinned memory is ordinary memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "emulated"
SOURCE = Path(__file__).parent / "emulated" / "device.cpp"
BUILD = Path(__file__).resolve().parents[1] / "build" / "emulated"
COMPILER = os.environ.get("CXX", "c++")


def missing() -> str | None:
    """What this machine lacks to build the device."""
    if shutil.which(COMPILER) is None:
        return f"no compiler {COMPILER}; CXX names another"
    for folder, name in ((torch_headers(), "torch/library.h"), (sysconfig.get_path("include"), "Python.h")):
        if not (Path(folder) / name).exists():
            return f"no {name} in {folder}"
    return None


def torch_headers() -> str:
    return cpp_extension.include_paths()[0]


@cache
def register() -> ModuleType:
    """Makes "emulated" a device of this process, and `torch.emulated` the module of it, which it returns.

    Raises subprocess.CalledProcessError where it does not compile."""
    compiled = _load(_build())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.get_device_module(NAME)


def _module(compiled: Any) -> ModuleType:
    """As torch.cuda is, with what torch asks of a device and what training on one uses."""
    found, of = ModuleType(f"torch.{NAME}"), torch.accelerator
    found.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=compiled.device_count,
        current_device=of.current_device_index,
        set_device=of.set_device_index,
        device=lambda device: of.device_index(getattr(device, "index", device)),
        synchronize=of.synchronize,
        current_stream=of.current_stream,
        Stream=torch.Stream,
        Event=torch.Event,
        memory_allocated=of.memory_allocated,
        max_memory_allocated=of.max_memory_allocated,
        memory_stats_as_nested_dict=lambda device=None: {
            "allocated_bytes": {
                "all": {"current": of.memory_allocated(device), "peak": of.max_memory_allocated(device)}
            }
        },
        reset_peak_memory_stats=of.reset_peak_memory_stats,
        mem_get_info=of.get_memory_info,
        empty_cache=of.empty_cache,
        get_device_name=lambda device=None: "an emulated accelerator",
        set_capacity=compiled.set_capacity,  # (device, bytes): what it has, 4 GiB without a word
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None,
    )
    return found


def _build() -> Path:
    """The compiled device, by one process at a time."""
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall",
        f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))),
        str(SOURCE), f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    key = hashlib.sha256("\0".join((torch.__version__, sys.version, *command, SOURCE.read_text())).encode())
    done = BUILD / f"{key.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            part = done.with_suffix(".part")
            subprocess.run([*command, "-o", str(part)], check=True)
            part.replace(done)
    return done


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
