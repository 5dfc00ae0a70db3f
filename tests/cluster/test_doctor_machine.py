"""What the doctor reads of a node, drawn as a folder of proc and sys files, and of its launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpipipe.cluster.doctor import launcher, machine
from mpipipe.cluster.doctor.launcher import family, launch, mpi_name
from mpipipe.cluster.doctor.machine import binding, file_system
from mpipipe.cluster.doctor.network import devices, fabric
from mpipipe.cluster.doctor.start import age_s
from mpipipe.cluster.node import parse_cores

CPUS, NODES, BANDS = "sys/devices/system/cpu", "sys/devices/system/node", "sys/class/infiniband"


def draw(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": "0::/", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on cores 1 and 5 of 8, the hyperthreads of one core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 1})


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path: Path, on_cores: None) -> None:
    found = binding(tmp_path)
    assert (found.usable, found.job, found.numa) == ((1, 5), (1, 5), ())
    assert found.siblings == ((1,), (5,))
    drawn = machine.machine({"SLURM_MEM_PER_NODE": "512"}, tmp_path)
    assert (drawn.huge_pages, drawn.governor, drawn.fabric, drawn.units) == ("", "", (), ())
    assert (drawn.shm_bytes, drawn.swap_used_bytes, drawn.load) == (0, 0, 0.0)
    assert drawn.available_bytes == 512 << 20
    assert (fabric(tmp_path), devices(tmp_path), file_system(Path("/"), tmp_path)) == ((), (), "")
    assert age_s(tmp_path) == 0.0


def test_cores_hyperthreads_and_domains(tmp_path: Path, on_cores: None) -> None:
    siblings = {f"{CPUS}/cpu{core}/topology/thread_siblings_list": "1,5" for core in (1, 5)}
    domains = {
        f"{NODES}/node0/cpulist": "0-1,4-5",
        f"{NODES}/node1/cpulist": "2-3,6-7",
        f"{NODES}/node2/cpulist": "",
    }
    found = binding(draw(tmp_path, {f"{CPUS}/online": "0-7", **siblings, **domains}))
    assert (found.usable, found.quota, found.job) == ((1, 5), 2, tuple(range(8)))
    assert found.siblings == ((1, 5),)
    assert found.numa == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/cpuset.cpus.effective"),
        ("7:cpuset:/job", "sys/fs/cgroup/cpuset/job/cpuset.effective_cpus"),
    ],
)
def test_the_cores_of_the_job_are_those_of_its_control_group(
    tmp_path: Path, on_cores: None, cgroup: str, file: str
) -> None:
    root = draw(tmp_path, {"proc/self/cgroup": cgroup, f"{CPUS}/online": "0-63", file: "1,4-5"})
    assert binding(root).job == (1, 4, 5)


def test_a_quota_is_told_beside_the_cores(tmp_path: Path, on_cores: None) -> None:
    root = draw(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "100000 100000"})
    found = binding(root)
    assert (len(found.usable), found.quota) == (2, 1)


@pytest.mark.parametrize(
    ("listed", "cores"), [("", ()), ("3", (3,)), ("0-1,7", (0, 1, 7)), ("0,2-3", (0, 2, 3))]
)
def test_lists_of_cores(listed: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(listed) == cores


def test_settings_of_the_kernel(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name : Xeon\nflags : fpu avx512_bf16 amx_bf16",
        "proc/loadavg": "3.25 2.00 1.00 5/300 4711",
        "proc/meminfo": "MemAvailable: 1024 kB\nSwapTotal: 4096 kB\nSwapFree: 1024 kB",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        f"{CPUS}/cpu0/cpufreq/scaling_governor": "powersave",
        f"{CPUS}/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
    }
    found = machine.machine({}, draw(tmp_path, files))
    assert (found.processor, found.units, found.load) == ("Xeon", ("amx_bf16", "avx512_bf16"), 3.25)
    assert (found.swap_used_bytes, found.available_bytes) == (3072 << 10, 1 << 20)
    assert (found.huge_pages, found.governor) == ("never", "powersave acpi-cpufreq")


def test_network_adapters_count_when_a_port_is_up(tmp_path: Path) -> None:
    port = {"link_layer": "InfiniBand", "state": "4: ACTIVE"}
    files = {f"{BANDS}/mlx5_0/ports/1/{k}": v for k, v in port.items()}
    files |= {f"{BANDS}/mlx5_1/ports/1/{k}": v for k, v in {**port, "state": "1: DOWN"}.items()}
    files |= {f"{BANDS}/mlx5_2/ports/1/{k}": v for k, v in {**port, "link_layer": "Ethernet"}.items()}
    files |= {"sys/class/cxi/cxi0/device": "", "sys/class/hfi1/hfi1_0/device": ""}
    files |= {f"{BANDS}/hfi1_0/ports/1/{k}": v for k, v in port.items()}
    found = fabric(draw(tmp_path, files))
    assert found == ("cxi0 Slingshot", "hfi1_0 Omni-Path", "mlx5_0 InfiniBand", "mlx5_2 RoCE")


def test_adapters_in_use_are_those_that_are_open(tmp_path: Path) -> None:
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    for i, target in enumerate(("/dev/null", "/dev/infiniband/uverbs0", "/dev/cxi0", "/dev/cxi0")):
        (tmp_path / f"proc/self/fd/{i}").symlink_to(target)
    assert devices(tmp_path) == ("/dev/cxi0", "/dev/infiniband/uverbs0")


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    lines = (
        "22 1 8:1 / / rw - ext4 /dev/sda rw",
        "30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/home rw",
        "31 22 0:41 / /home\\040of rw - tmpfs tmpfs rw",
    )
    root = draw(tmp_path, {"proc/self/mountinfo": "\n".join(lines)})
    assert [file_system(Path(p), root) for p in ("/", "/home/me/x", "/homes", "/home of/x")] == [
        "ext4", "nfs4", "ext4", "tmpfs",
    ]  # fmt: skip


@pytest.mark.parametrize(("scope", "says"), [("0", ""), ("1", "kernel.yama.ptrace_scope=1"), (None, "")])
def test_single_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, says: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "_reads_itself", lambda: True)
    yama = {} if scope is None else {"proc/sys/kernel/yama/ptrace_scope": scope}
    root = draw(tmp_path, {"proc/meminfo": "MemAvailable: 1024 kB", **yama})
    assert machine.machine({}, root).single_copy == says
    monkeypatch.setattr(machine, "_reads_itself", lambda: False)
    assert machine.machine({}, root).single_copy == (says or "process_vm_readv is forbidden")


def test_this_process_is_older_than_nothing_and_younger_than_the_machine() -> None:
    assert 0.0 < age_s() < float(Path("/proc/uptime").read_text().split()[0])


# -- the launcher ------------------------------------------------------------------------------

SAYS = {
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11": "Open MPI 5.0.11",
    "mpirun (Open MPI) 4.1.4\n\nReport bugs to": "Open MPI 4.1.4",
    "MPICH Version:      5.0.2\nMPICH Release date: x": "MPICH 5.0.2",
    "HYDRA build details:\n    Version:           4.3.0\n    Release": "MPICH 4.3.0",
    "Intel(R) MPI Library 2021.18 for Linux* OS": "Intel MPI 2021.18",
    "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2025": "Intel MPI 2021.18",
    "MPI VERSION    : CRAY MPICH version 8.1.29.8 (ANL base 3.4a2)": "Cray MPICH 8.1.29.8",
    "MVAPICH2 Version      : 2.3.7": "MVAPICH 2.3.7",
    "Something else of 2031": "Something else of",
    "": "",
}


@pytest.mark.parametrize("said", SAYS)
def test_what_an_mpi_says_of_itself(said: str) -> None:
    assert mpi_name(said) == SAYS[said]


def test_families_share_their_launchers() -> None:
    assert {family(x) for x in ("MPICH 5.0", "Intel MPI 2021.18", "Cray MPICH 8.1", "MVAPICH 2.3")} == {
        "MPICH"
    }
    assert family("Open MPI 4.1.5") == family("Open MPI 5.0.11") == "Open MPI"


def a_launcher(folder: Path, name: str, says: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}' $PMI_RANK$OMPI_MCA_x\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_the_first_mpirun_on_the_path_is_asked_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = a_launcher(tmp_path / "a", "mpirun", "mpirun (Open MPI) 5.0.7")
    mpiexec = a_launcher(tmp_path / "b", "mpiexec", "HYDRA build details:  Version: 4.3.0")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    marks = {"PMI_RANK": "0", "OMPI_MCA_x": "1"}  # a launcher asked under another one must not see them
    found = launch({"PATH": f"{tmp_path}/b:{tmp_path}/a", **marks})
    assert (found.mpirun, found.mpirun_of) == (mpirun, "Open MPI 5.0.7")  # mpirun is what people type
    found = launch({"PATH": f"{tmp_path}/b"})
    assert (found.mpirun, found.mpirun_of, found.own_mpirun) == (mpiexec, "MPICH 4.3.0", "")
    found = launch({"PATH": "/nowhere"})
    assert (found.mpirun, found.mpirun_of) == ("", "")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    a_launcher(tmp_path / "bin", "mpiexec", "")
    assert launch({"PATH": "/nowhere"}).own_mpirun == str(tmp_path / "bin" / "mpiexec")


def test_a_launcher_that_hangs_or_fails_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_launcher(tmp_path, "mpirun", "")
    monkeypatch.setattr(launcher, "ASK_S", 0.05)
    Path(path).write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    assert launch({"PATH": str(tmp_path)}).mpirun_of == ""
    Path(path).write_text("no program")
    assert launch({"PATH": str(tmp_path)}).mpirun_of == ""


LAUNCHED = {
    "": {},
    "the mpirun of Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "the mpiexec of MPICH or Intel MPI": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "srun": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PMI_SIZE": "2", "PMI_RANK": "0"},
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_who_started_this_process(name: str) -> None:
    assert launch({"PATH": "/nowhere", **LAUNCHED[name]}).launcher == name


def test_settings_that_choose_transports_are_kept() -> None:
    environ = {
        "UCX_TLS": "tcp",
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_cpu_type": "x86_64",
        "PATH": "/nowhere",
    }
    assert launch(environ).settings == ("OMPI_MCA_btl=tcp,self", "UCX_TLS=tcp")


def test_only_one_process_asks_a_launcher(tmp_path: Path) -> None:
    a_launcher(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.7")
    second = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    assert launch({"PATH": str(tmp_path), **second}).mpirun_of == ""
