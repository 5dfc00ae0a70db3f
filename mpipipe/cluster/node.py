"""What this process may use of its node: cores and memory, the limits of its control group included.

Linux only; the files are those of proc(5) and of both versions of cgroups(7). Every function takes
the root of the file system, so that a test can draw a node of its own.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from mpipipe.native import flags

ROOT = Path("/")
OPENMP_BINDS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # where they are set
BF16_UNITS = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "svebf16")


def cores_available(root: Path = ROOT) -> frozenset[int]:
    """The cores this process may run on, each by the number of its first hyperthread of those: a second one
    multiplies nothing faster.

    A quota of CPU time (containers) takes away cores from the end: 2.5 cores' worth leaves two.
    """
    granted = cores_granted()
    cores = sorted({min(granted.intersection(group)) for group in siblings(granted, root)})
    return frozenset(cores[: quota_of(cores, root)])


def are_alike(cores: Iterable[int], root: Path = ROOT) -> bool:
    """Whether all are of one kind, as far as Linux tells: Arm's have capacities, Intel's may be small."""
    cpus = root / "sys/devices/system/cpu"
    capacities = {text(cpus / f"cpu{core}/cpu_capacity") for core in cores}
    return len(capacities) <= 1 and not (root / "sys/devices/cpu_atom").exists()


def quota_of(cores: Sequence[int], root: Path = ROOT) -> int:
    """How many of them control groups leave time for."""
    return max(1, math.floor(min([len(cores), *_cpu_quotas(root)])))


def siblings(cores: Iterable[int], root: Path = ROOT) -> tuple[tuple[int, ...], ...]:
    """Of each of them: itself and its hyperthreads; alone where the kernel does not say."""
    cpus = root / "sys/devices/system/cpu"
    found = {
        parse_cores(text(cpus / f"cpu{core}/topology/thread_siblings_list")) or (core,) for core in cores
    }
    return tuple(sorted(found))


def parse_cores(listed: str) -> tuple[int, ...]:
    """Cores of the kernel's list format.

    >>> parse_cores("0-2,8")
    (0, 1, 2, 8)
    """
    cores: list[int] = []
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def cores_granted() -> frozenset[int]:
    """Those that the launcher left this process, wherever OpenMP has put its first thread since."""
    return frozenset(os.sched_getaffinity(0)) | cores_of_openmp()


def cores_of_openmp(environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> frozenset[int]:
    """The cores over which OpenMP binds its threads; none where it binds none, or is not loaded.

    Asked to bind, the runtime moves the first thread of the process to one core as soon as it is loaded, so
    that the mask of the process alone would look as if the launcher had granted one core.
    """
    if not any(environ.get(name) for name in OPENMP_BINDS):
        return frozenset()
    mapped = (line.split()[-1] for line in text(root / "proc/self/maps").splitlines())
    runtime = next((path for path in mapped if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*$", path)), "")
    if not runtime:
        return frozenset()
    openmp, cores = ctypes.CDLL(runtime), set[int]()
    if not openmp.omp_get_proc_bind():
        return frozenset()
    for place in range(openmp.omp_get_num_places()):
        numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
        openmp.omp_get_place_proc_ids(place, numbers)
        cores.update(numbers)
    return frozenset(cores)


def processor(root: Path = ROOT) -> str:
    """The processor's model name, or its architecture where the kernel gives none."""
    for line in text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine


def bf16_units(root: Path = ROOT) -> tuple[str, ...]:
    """Of the processor, as the kernel calls them; none where it has none, or nobody says."""
    there = flags(root / "proc/cpuinfo")
    return tuple(unit for unit in BF16_UNITS if unit in there)


def load(root: Path = ROOT) -> float:
    """Runnable processes of the whole node, mean of the last minute."""
    return float((text(root / "proc/loadavg").split() or ["0"])[0])


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where files go that can be made anew (XDG base directories); None where this process has no home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():
        home = environ.get("HOME", "")
        base = f"{home}/.cache" if home else ""
    return Path(base) / "mpipipe" if base else None


def memory_available_bytes(environ: Mapping[str, str], root: Path = ROOT) -> int:
    """Bytes that this node can still give to this process's job: free memory, the limits of its
    control groups and of Slurm (which it may enforce by a kill instead of a control group)."""
    limits = [_number(field(root / "proc/meminfo", "MemAvailable:")) * 1024]
    limits += [limit - used for limit, used in _memory_limits(root)]
    per_node, per_cpu, cpus = (
        _number(environ.get(f"SLURM_{name}", ""), 0)
        for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
    )
    limits += [mib * (1 << 20) for mib in (per_node, per_cpu * cpus) if mib]  # 0 means all of the node
    return int(max(0, min(limits)))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """In cores, one for each control group of this process that has one."""
    for group in own_groups(root, ""):
        quota, _, period = text(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota) / int(period)
    for group in own_groups(root, "cpu"):
        quota = text(group / "cpu.cfs_quota_us")
        if quota.isdigit():  # -1: none
            yield int(quota) / int(text(group / "cpu.cfs_period_us"))


def _memory_limits(root: Path) -> Iterator[tuple[float, float]]:
    """(limit, used) of each control group; the page cache that can be dropped is not used."""
    files = {
        "": ("memory.max", "memory.current", "inactive_file"),
        "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for controller, (limit, used, cache) in files.items():
        for group in own_groups(root, controller):
            if text(group / limit).isdigit():  # else "max"
                cached = _number(field(group / "memory.stat", cache), 0)
                yield int(text(group / limit)), _number(text(group / used), 0) - cached


def own_groups(root: Path, controller: str) -> Iterator[Path]:
    """This process's control group and those above it; controller "" is version 2."""
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            group = top / path.lstrip("/")
            while group.is_relative_to(top):
                yield group
                group = group.parent


def text(path: Path) -> str:
    """The file, or "": which limits exist depends on the kernel and the container."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def command_line(process: Path) -> list[str]:
    """The words of a process, which has this folder in /proc. Raises OSError for one that has ended."""
    return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def field(path: Path, key: str) -> str:
    """The word after `key` in a file of lines "key value ..."."""
    words = (line.split() for line in text(path).splitlines())
    return next((w[1] for w in words if len(w) > 1 and w[0] == key), "")


def _number(text: str, default: float = math.inf) -> float:
    return int(text) if text.isdigit() else default


def before_cuda() -> None:
    """What NVIDIA's libraries and torch's allocator read when they begin. Sums are the same each time only
    with workspaces of a fixed size (cuBLAS, "Results reproducibility"); segments that grow leave few gaps."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
