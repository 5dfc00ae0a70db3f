"""What slurm/train.sh decides, on a Slurm and environments made of three-line scripts (no cluster)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OPEN_MPI, MPICH = "Open MPI v5.0.11", "MPICH Version: 5.0.1"


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


class Site:
    """A folder with a repository, its .venv, and the programs of a cluster in bin/."""

    def __init__(self, root: Path) -> None:
        self.root, self.repo, self.bin = root, root / "my repo", root / "bin"
        (self.repo / "slurm").mkdir(parents=True)
        shutil.copy(REPOSITORY / "slurm" / "train.sh", self.repo / "slurm")
        script(self.bin / "scontrol", f"echo JobId=7 Command={self.repo}/slurm/train.sh WorkDir=/")
        self.has_srun("none pmi2")

    def has_srun(self, plugins: str) -> None:
        script(
            self.bin / "srun", f'[ "$1" = --mpi=list ] && {{ echo {plugins} >&2; exit; }}', "echo srun: $*"
        )

    def environment(self, path: Path, mpi: str, launcher: str = "") -> None:
        script(path / "bin" / "python", f'echo "{mpi}"' if mpi else "exit 1")
        if launcher:
            script(
                path / "bin" / launcher, f"echo {launcher}: $*; echo $PRTE_MCA_hwloc_default_binding_policy"
            )

    def run(self, *args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """As Slurm does it: a copy of the script, in the folder that the job was submitted from."""
        spool = self.root / "spool" / "slurm_script"
        spool.parent.mkdir(exist_ok=True)
        shutil.copy(self.repo / "slurm" / "train.sh", spool)
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
        environ = {"PATH": f"{self.bin}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(self.repo), **job, **extra}
        return subprocess.run(
            ["bash", spool, *args], cwd=self.root, env=environ, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_environment_s_own_launcher_comes_first(site: Site) -> None:
    site.environment(site.repo / ".venv", OPEN_MPI, "mpirun")
    site.has_srun("none pmix")
    job = site.run("my config.yaml", "train.steps=3")
    assert job.returncode == 0, job.stderr
    said, started, binding = job.stdout.splitlines()
    assert f"{OPEN_MPI}; 4 ranks on 2 nodes start with: {site.repo}/.venv/bin/mpirun" in said
    assert started.endswith("/.venv/bin/python -m mpipipe.train my config.yaml train.steps=3")
    assert started.startswith("mpirun: -n 4 ")
    assert binding == "none"


@pytest.mark.parametrize(("mpi", "plugin"), [(OPEN_MPI, "pmix"), (MPICH, "pmi2")])
def test_srun_starts_the_site_s_mpi_when_it_speaks_its_language(site: Site, mpi: str, plugin: str) -> None:
    site.environment(site.repo / ".venv", mpi)
    site.has_srun(f"cray_shasta {plugin}")
    job = site.run("c.yaml", SLURM_CPUS_PER_TASK="3")
    assert f"srun: --mpi={plugin} --cpus-per-task=3 -n 4 " in job.stdout
    assert job.returncode == 0


def test_the_site_s_mpirun_is_what_remains(site: Site) -> None:
    site.environment(site.repo / ".venv", OPEN_MPI)
    script(site.bin / "mpirun", "echo site: $*")
    job = site.run("c.yaml")
    assert "this srun has no pmix" in job.stdout
    assert "\nsite: -n 4 " in job.stdout


def test_the_user_may_name_the_launcher(site: Site) -> None:
    site.environment(site.repo / ".venv", OPEN_MPI, "mpirun")
    assert "\nsrun: --mpi=pmi2 -n 4 " in site.run("c.yaml", MPIPIPE_LAUNCHER="srun --mpi=pmi2").stdout


def test_environments_without_mpipipe_are_passed_over_in_the_order_stated(site: Site) -> None:
    named, active, conda = (site.root / name for name in ("named", "active", "conda"))
    for path, mpi in ((named, OPEN_MPI), (active, OPEN_MPI), (conda, "")):
        site.environment(path, mpi, "mpirun")
    site.environment(site.repo / ".venv", OPEN_MPI, "mpirun")
    for given, found in (
        ({"CONDA_PREFIX": conda}, site.repo / ".venv"),
        ({"CONDA_PREFIX": conda, "VIRTUAL_ENV": active}, active),
        ({"VIRTUAL_ENV": active, "MPIPIPE_VENV": named}, named),
    ):
        job = site.run("c.yaml", **{name: str(path) for name, path in given.items()})
        assert f"train.sh: {found} has" in job.stdout


def test_what_cannot_work_says_what_to_do(site: Site) -> None:
    for job, says in (
        (site.run("c.yaml"), "run make setup, or set MPIPIPE_VENV"),
        (site.run(), "which config?"),
        (site.run("c.yaml", SLURM_JOB_ID=""), "submit it with sbatch"),
    ):
        assert job.returncode == 2
        assert says in job.stderr
    site.environment(site.repo / ".venv", OPEN_MPI)
    (site.bin / "srun").unlink()
    job = site.run("c.yaml", PATH=str(site.bin) + ":" + str(tools(site.root)))
    assert job.returncode == 2
    assert f"no launcher for {OPEN_MPI}" in job.stderr


def tools(root: Path) -> Path:
    """The few programs that the script needs, and no mpirun that this machine may have."""
    folder = root / "tools"
    folder.mkdir()
    for name in ("bash", "sh", "sed", "dirname", "grep", "id"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder
