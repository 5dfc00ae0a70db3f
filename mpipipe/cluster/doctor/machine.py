"""The node, as its files tell: binding, memory, limits, network adapters. Linux; see proc(5), sysfs(5).

Every function takes the root of the file system, so that a test can draw a node of its own. What is not
there is empty: it depends on the kernel, the container and the processor.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from mpipipe.cluster.doctor.facts import Binding, Cores, Machine
from mpipipe.cluster.doctor.network import fabric
from mpipipe.cluster.node import (
    ROOT,
    bf16_units,
    cores_granted,
    field,
    load,
    memory_available_bytes,
    own_groups,
    parse_cores,
    processor,
    quota_of,
    siblings,
    text,
)

UNLIMITED = resource.RLIM_INFINITY


def binding(root: Path = ROOT) -> Binding:
    """The cores of this rank, beside those of its job."""
    usable = tuple(sorted(cores_granted()))
    domains = (root / "sys/devices/system/node").glob("node[0-9]*")
    numa = sorted(parse_cores(text(domain / "cpulist")) for domain in domains)
    return Binding(
        usable=usable,
        quota=quota_of(usable, root),
        job=tuple(sorted({*_job_cores(root), *usable})),
        siblings=siblings(usable, root),
        numa=tuple(cores for cores in numa if cores),  # some domains have memory only
    )


def _job_cores(root: Path) -> Cores:
    """Those of the innermost control group that has a set, else all that are online."""
    for controller, file in (("", "cpuset.cpus.effective"), ("cpuset", "cpuset.effective_cpus")):
        for group in own_groups(root, controller):
            if cores := parse_cores(text(group / file)):
                return cores
    return parse_cores(text(root / "sys/devices/system/cpu/online"))


def machine(environ: Mapping[str, str], root: Path = ROOT) -> Machine:
    """The rest of the node. Limits are those of this process."""
    meminfo, shm = root / "proc/meminfo", _space(root / "dev/shm")
    swap_kib = [int(field(meminfo, key) or 0) for key in ("SwapTotal:", "SwapFree:")]
    governor = root / "sys/devices/system/cpu/cpu0/cpufreq"
    return Machine(
        host=platform.node(),
        processor=processor(root),
        units=bf16_units(root),
        load=load(root),
        available_bytes=memory_available_bytes(environ, root),
        swap_used_bytes=(swap_kib[0] - swap_kib[1]) * 1024,
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        huge_pages=_chosen(text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        governor=" ".join(filter(None, (text(governor / f"scaling_{x}") for x in ("governor", "driver")))),
        fabric=fabric(root),
        single_copy=_single_copy(root),
    )


def _space(folder: Path) -> tuple[int, int]:
    """Bytes: all, and free."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == UNLIMITED else soft


def _chosen(listed: str) -> str:
    """Of "always [madvise] never", the word in brackets."""
    return listed.partition("[")[2].partition("]")[0]


def _single_copy(root: Path) -> str:
    """Why processes of a user may not read each other's memory, by which MPI copies a large message once
    instead of twice: a container may forbid the call, Yama the reading of other processes."""
    scope = text(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope not in ("", "0") and os.geteuid() != 0:
        return f"kernel.yama.ptrace_scope={scope}"
    return "" if _reads_itself() else "process_vm_readv is forbidden"


def _reads_itself() -> bool:
    class Iovec(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"a", 1), ctypes.create_string_buffer(1)
    remote, local = (Iovec(ctypes.addressof(buffer), 1) for buffer in (source, target))
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "process_vm_readv"):
        return False
    read = libc.process_vm_readv(
        os.getpid(),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return bool(read == 1 and target.raw == b"a")


def file_system(folder: Path, root: Path = ROOT) -> str:
    """The type of the file system that holds `folder`, such as ext4, nfs4 or lustre; of the last mount point
    above it (proc_pid_mountinfo(5))."""
    found, longest = "", -1
    for line in text(root / "proc/self/mountinfo").splitlines():
        words, _, rest = line.partition(" - ")
        point = words.split()[4].replace("\\040", " ")
        if Path(folder).resolve().is_relative_to(point) and len(point) >= longest:
            found, longest = rest.split()[0], len(point)
    return found
