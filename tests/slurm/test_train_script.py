"""What slurm/train.sh itself does, on a Slurm and environments made of a few lines each (no cluster)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# `plan` and `launch` as the script sees them; what starts is a program that waits to be stopped
PYTHON = """\
case "$*" in
-c*) exit 0 ;;
*--unfinished) echo runs/slurm-7; exit {unfinished} ;;
*--from-allocation*) echo "plan: $*" ;;
*launch*) echo "launch: $*" >&2; echo "env A=b {starts}" ;;
esac
"""


def script(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)


class Site:
    """A folder with a repository, its .venv, and the programs of a cluster in bin/."""

    def __init__(self, root: Path) -> None:
        self.root, self.repo, self.bin = root, root / "my repo", root / "bin"
        (self.repo / "slurm").mkdir(parents=True)
        shutil.copy(REPOSITORY / "slurm" / "train.sh", self.repo / "slurm")
        shown = f"echo JobId=7 Command={self.repo}/slurm/train.sh WorkDir=/"
        script(self.bin / "scontrol", f'[ "$1" = show ] && {shown} || echo "scontrol: $*"')

    def environment(self, path: Path, starts: str = "echo started:", unfinished: int = 1) -> None:
        script(path / "bin" / "python", PYTHON.format(starts=starts, unfinished=unfinished))

    def start(self, *args: str, **extra: str) -> subprocess.Popen[str]:
        """As Slurm does it: a copy of the script, in the folder that the job was submitted from."""
        spool = self.root / "spool" / "slurm_script"
        spool.parent.mkdir(exist_ok=True)
        shutil.copy(self.repo / "slurm" / "train.sh", spool)
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
        path = f"{self.bin}:/usr/bin:/bin"
        own = {"PATH": path, "SLURM_SUBMIT_DIR": str(self.repo), "TMPDIR": str(self.root), **job, **extra}
        return subprocess.Popen(
            ["bash", spool, *args], cwd=self.root, env=own, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *args: str, **extra: str) -> subprocess.CompletedProcess[str]:
        with self.start(*args, **extra) as job:
            out, err = job.communicate(timeout=60)
        return subprocess.CompletedProcess(args, job.returncode, out, err)

    def signalled(self, number: int, after: str, **extra: str) -> tuple[int, str]:
        """The exit code, and what is printed after the line at which the signal is sent."""
        with self.start("c.yaml", **extra) as job:
            assert job.stdout is not None
            while job.stdout.readline() != f"{after}\n":
                time.sleep(0.01)
            job.send_signal(number)
            out, _ = job.communicate(timeout=60)
        return job.returncode, out


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_plan_comes_first_and_the_launch_uses_it(site: Site) -> None:
    site.environment(site.repo / ".venv")
    job = site.run("my config.yaml", "train.steps=3")
    assert job.returncode == 0, job.stderr
    said, plan, started = job.stdout.splitlines()
    assert said == f"train.sh: {site.repo}/.venv/bin/python, start 0 of job 7"
    assert plan.startswith("plan: -m mpipipe plan my config.yaml train.steps=3 --from-allocation -o ")
    assert job.stderr.splitlines() == [
        f"launch: -m mpipipe launch my config.yaml train.steps=3 --assignment {plan.split()[-1]}"
    ]
    assert started == "started:"


def test_environments_without_mpipipe_are_passed_over_in_the_order_stated(site: Site) -> None:
    named, active, conda = (site.root / name for name in ("named", "active", "conda"))
    for path in (named, active, site.repo / ".venv"):
        site.environment(path)
    script(conda / "bin" / "python", "exit 1")
    for given, found in (
        ({"CONDA_PREFIX": conda}, site.repo / ".venv"),
        ({"CONDA_PREFIX": conda, "VIRTUAL_ENV": active}, active),
        ({"VIRTUAL_ENV": active, "MPIPIPE_VENV": named}, named),
    ):
        job = site.run("c.yaml", **{name: str(path) for name, path in given.items()})
        assert f"train.sh: {found}/bin/python, start" in job.stdout


def test_modules_a_container_and_an_archive(site: Site) -> None:
    script(site.bin / "apptainer", 'echo "apptainer: $*" >&2; shift 2; exec "$0-$@"')
    script(site.bin / "apptainer-python3", PYTHON.format(starts="echo started:", unfinished=1))
    contained = site.run("c.yaml", MPIPIPE_CONTAINER="image.sif")
    assert contained.stderr.startswith("apptainer: exec image.sif python3 -m mpipipe plan c.yaml --from")
    assert contained.stdout.endswith("started:\n")

    site.environment(site.root / "loaded")
    activate = site.root / "loaded" / "activate"
    script(activate, f"export VIRTUAL_ENV={activate.parent}")
    module = {"BASH_FUNC_module%%": f'() {{ echo "module: $*"; . {activate}; }}'}  # an exported function
    loaded = site.run("c.yaml", MPIPIPE_MODULES="openmpi/5 python", **module)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith(
        f"module: load openmpi/5 python\ntrain.sh: {site.root}/loaded/bin/python, start"
    )

    site.environment(site.root / "named")
    script(site.bin / "sbcast", 'echo "sbcast: $*"; cp "$2" "$3"')
    script(site.bin / "srun", 'echo "srun: $1 $2"; while [ "$1" != sh ]; do shift; done; exec "$@"')
    own = site.root / "mpipipe-7"
    staged = site.run("c.yaml", MPIPIPE_VENV=str(site.root / "named"), MPIPIPE_STAGE="archive")
    assert f"sbcast: -f {own}.tar {own}.copy\nsrun: -N 2\ntrain.sh: {own}/bin/python, start" in staged.stdout
    assert list(site.root.glob("mpipipe-7*")) == [], "it is removed from the nodes at the end"


@pytest.mark.parametrize(
    ("number", "unfinished", "requeued"),
    [(signal.SIGUSR1, 0, True), (signal.SIGUSR1, 1, False), (signal.SIGTERM, 0, False)],
)
def test_who_is_asked_to_stop_is_queued_again_unless_it_was_to_end(
    site: Site, number: int, unfinished: int, requeued: bool
) -> None:
    script(
        site.bin / "wait-for-it",
        'trap "echo stops; exit 0" USR1',
        "echo waits",
        "while :; do sleep 0.05; done",
    )
    site.environment(site.repo / ".venv", "wait-for-it", unfinished)
    code, out = site.signalled(number, after="waits")
    assert out.startswith("stops\n")
    assert ("scontrol: requeue 7" in out) == requeued
    assert code == 0


def test_where_it_cannot_be_queued_again_the_line_that_goes_on_is_said(site: Site) -> None:
    """The next job has another number, after which its folder would be named."""
    shown = f"echo JobId=7 PreemptTime=2999-11-26T01:02:03 Command={site.repo}/slurm/train.sh WorkDir=/"
    script(site.bin / "scontrol", f'[ "$1" = show ] && {shown} || exit 1')
    site.environment(site.repo / ".venv", "echo saved", unfinished=0)
    job = site.run("c.yaml")
    assert job.returncode == 2
    assert "submit the same line again with run.dir=runs/slurm-7: it resumes" in job.stderr


def test_a_task_of_an_array_asks_for_itself_alone(site: Site) -> None:
    """The id of the array is also that of one of its tasks, and means all of them to scontrol."""
    all_of_them = 'echo "JobId=8 Command=/none WorkDir=/"'
    one = f"echo JobId=7 Command={site.repo}/slurm/train.sh WorkDir=/"
    script(
        site.bin / "scontrol",
        f'if [ "$1" = show ]; then {one}; [ "$4" = 7_3 ] || {all_of_them}; else echo "scontrol: $*"; fi',
    )
    script(site.bin / "stops", 'trap "exit 0" USR1', "echo waits", "while :; do sleep 0.05; done")
    site.environment(site.repo / ".venv", "stops", unfinished=0)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    code, out = site.signalled(signal.SIGUSR1, after="waits", **array)
    assert out.endswith("scontrol: requeue 7_3\n")
    assert code == 0


@pytest.mark.parametrize(
    ("when", "requeued"), [("2999-11-26T01:02:03", True), ("2020-01-01T00:00:00", False), ("None", False)]
)
def test_a_job_that_is_preempted_is_queued_again(site: Site, when: str, requeued: bool) -> None:
    """Its ranks were asked by Slurm, which the script does not see. An earlier start does not count."""
    shown = f"echo JobId=7 PreemptEligibleTime=2026-11-26T00:00:00 PreemptTime={when} Command=/none WorkDir=/"
    script(site.bin / "scontrol", f'[ "$1" = show ] && {shown} || echo "scontrol: $*"')
    site.environment(site.repo / ".venv", "echo saved")
    python = site.repo / ".venv" / "bin" / "python"
    python.write_text(
        python.read_text().replace("*--unfinished)", "*--asked\\ --unfinished) exit 0 ;;\n*--unfinished)")
    )
    job = site.run("c.yaml")
    assert job.returncode == 0
    assert ("scontrol: requeue 7" in job.stdout) == requeued


@pytest.mark.slow
def test_a_signal_waits_for_who_does_not_catch_it_yet(site: Site) -> None:
    script(
        site.bin / "slow", "echo starts", "sleep 0.3", 'trap "echo stops; exit 0" USR1', "sleep 0.5 & wait"
    )
    site.environment(site.repo / ".venv", "slow", unfinished=0)
    code, out = site.signalled(signal.SIGUSR1, after="starts")
    assert out.startswith("stops\n")
    assert code == 0


@pytest.mark.slow
def test_who_dies_of_being_asked_is_queued_again_where_there_is_a_checkpoint(site: Site) -> None:
    script(site.bin / "dies", "trap '' USR1", "echo waits", "sleep 0.5; exit 3")
    site.environment(site.repo / ".venv", "dies", unfinished=0)
    code, out = site.signalled(signal.SIGUSR1, after="waits")
    assert "scontrol: requeue 7" in out
    assert code == 0


def test_a_failure_is_the_job_s_and_is_not_queued_again(site: Site) -> None:
    script(site.bin / "fails", "exit 3")
    site.environment(site.repo / ".venv", "fails", unfinished=0)
    job = site.run("c.yaml")
    assert job.returncode == 3
    assert "requeue" not in job.stdout


@pytest.mark.parametrize(
    "site_file", sorted((REPOSITORY / "slurm" / "sites").glob("*.sh")), ids=lambda f: f.stem
)
def test_the_files_for_sites_say_whether_they_are_tested_and_are_shell(site_file: Path) -> None:
    done = subprocess.run(["bash", "-eu", site_file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\n# Tested: " in site_file.read_text()


def test_what_cannot_work_says_what_to_do(site: Site) -> None:
    for job, says in (
        (site.run("c.yaml"), "run make setup, or set MPIPIPE_VENV"),
        (site.run(), "which config?"),
        (site.run("c.yaml", SLURM_JOB_ID=""), "submit it with sbatch"),
    ):
        assert job.returncode == 2
        assert says in job.stderr
