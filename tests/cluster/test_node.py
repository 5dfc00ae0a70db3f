"""Limits of cores and memory, on nodes drawn as a folder of proc and cgroup files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpipipe.cluster.node import are_alike, cache_folder, cores_available, memory_available_bytes

GIB = 1 << 30


def node(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    text = {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n"}
    for name, content in {**text, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def test_without_limits_all_cores_and_the_free_memory(tmp_path: Path) -> None:
    root = node(tmp_path, "0::/", {})
    assert cores_available(root) == os.sched_getaffinity(0)
    assert memory_available_bytes({}, root) == 8 * GIB


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/cpu.max", "150000 100000"),  # of a group above
        ("4:cpu,cpuacct:/job", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000"),
    ],
)
def test_a_quota_of_one_and_a_half_cores_leaves_one(
    tmp_path: Path, cgroup: str, file: str, content: str
) -> None:
    period = {"sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000"}
    root = node(tmp_path, cgroup, {file: content, **period})
    assert cores_available(root) == {min(os.sched_getaffinity(0))}


@pytest.mark.parametrize(
    ("granted", "quota", "cores"),
    [
        ({0, 1, 2, 3, 4, 5, 6, 7}, "max", {0, 1, 2, 3}),
        ({1, 5, 6}, "max", {1, 6}),  # bound to a core and to half of another
        ({0, 1, 2, 3, 4, 5, 6, 7}, "300000", {0, 1, 2}),  # of the cores, not of the hyperthreads
    ],
)
def test_the_hyperthreads_of_a_core_are_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granted: set[int], quota: str, cores: set[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: granted)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}"
        for cpu in range(8)
    }
    root = node(tmp_path, "0::/job", {"sys/fs/cgroup/job/cpu.max": f"{quota} 100000", **siblings})
    assert cores_available(root) == cores


def test_large_and_small_cores_are_unlike(tmp_path: Path) -> None:
    assert are_alike((0, 1), tmp_path)
    arm = {f"sys/devices/system/cpu/cpu{i}/cpu_capacity": "1024" if i < 2 else "446" for i in range(4)}
    root = node(tmp_path / "arm", "0::/", arm)
    assert are_alike((0, 1), root)
    assert not are_alike((1, 2), root)
    assert not are_alike((0, 1), node(tmp_path / "intel", "0::/", {"sys/devices/cpu_atom/cpus": "8-15"}))


def test_no_quota_is_no_limit(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/job/cpu.max": "max 100000", "sys/fs/cgroup/job/memory.max": "max"}
    root = node(tmp_path, "0::/job", files)
    assert cores_available(root) == os.sched_getaffinity(0)
    assert memory_available_bytes({}, root) == 8 * GIB


def test_the_tightest_control_group_decides_and_page_cache_does_not_count(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job"
    stat = f"anon 5\ninactive_file {GIB}"
    files = {
        f"{group}/memory.max": str(4 * GIB),
        f"{group}/memory.current": str(3 * GIB),
        f"{group}/memory.stat": stat,
    }
    root = node(tmp_path, "0::/job/step", files)
    assert memory_available_bytes({}, root) == 2 * GIB


def test_version_1_control_groups(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/a"
    limits = {f"{group}/memory.limit_in_bytes": str(5 * GIB), f"{group}/memory.usage_in_bytes": str(GIB)}
    root = node(tmp_path, "7:memory:/a\n3:cpu:/", limits)
    assert memory_available_bytes({}, root) == 4 * GIB


def test_slurm_s_limit_counts_and_0_means_the_whole_node(tmp_path: Path) -> None:
    root = node(tmp_path, "0::/", {})
    assert memory_available_bytes({"SLURM_MEM_PER_NODE": "1024"}, root) == GIB
    assert memory_available_bytes({"SLURM_MEM_PER_NODE": "0"}, root) == 8 * GIB
    by_cpu = {"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "3"}
    assert memory_available_bytes(by_cpu, root) == 3 * GIB


def test_this_machine_has_a_core_and_some_memory() -> None:
    assert cores_available()
    assert memory_available_bytes({}) > 1 << 20


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/mpipipe"),
        ({"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}, "/h/.cache/mpipipe"),
        ({"HOME": "/h"}, "/h/.cache/mpipipe"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)
    assert cache_folder({}) is None


LOADED = """
import ctypes, os, sys
from mpipipe.cluster.node import cores_granted
before = os.sched_getaffinity(0)
assert cores_granted() == before
ctypes.CDLL(sys.argv[1])
print(sorted(before), sorted(os.sched_getaffinity(0)), sorted(cores_granted()))
"""


@pytest.mark.parametrize("bind", ["true", "false"])
def test_where_openmp_binds_the_first_thread_the_cores_that_were_granted_stay_known(bind: str) -> None:
    (runtime,) = (Path(torch.__path__[0]) / "lib").glob("libgomp*")
    environ = {**os.environ, "OMP_PROC_BIND": bind}
    command = [sys.executable, "-c", LOADED, str(runtime)]
    said = subprocess.run(command, env=environ, text=True, capture_output=True, check=True).stdout
    granted, bound, found = (json.loads(f"[{part.strip(' [')}]") for part in said.split("]")[:3])
    assert found == granted
    assert len(bound) == (1 if bind == "true" else len(granted))
