"""What each room may touch, beyond the import contracts in pyproject.toml (make lint).

MPI           mpipipe/cluster/mpi.py
environment   cluster, native.py, and the arrows (running.py, train.py, commands, __main__.py)
files         config, cluster, data, state, report, native.py, and the arrows
pickle        the in-process carrier's copies, and what an npz of images holds, of which it makes arrays only
processes     who starts some: what runs without MPI or before it; tests/launch/test_forks.py has the rest
locks         of files: doctor alone, which tries one, as shared file systems often have none
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mpipipe"
SOURCES = sorted(PACKAGE.rglob("*.py"))
ARROWS = ("running.py", "train.py", "commands/", "__main__.py")
ENVIRONMENT = ("cluster/", "native.py", *ARROWS)
FILES = ("config/", "cluster/", "data/", "state/", "report/", "native.py", *ARROWS)
PROCESSES = (
    *("cluster/doctor/launcher.py", "cluster/starting.py", "cluster/partition.py", "commands/submit.py"),
    *("cluster/job.py", "cluster/hosts.py"),  # the supervisor's
    "data/tokenize.py",
    "report/fonts.py",  # which forbids them
)
PURE = ("errors", "values", "config", "planner", "cluster", "report")

FILE_MODULES = {"shutil", "tempfile", "glob", "mmap", "fileinput"}
FILE_CALLS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkdir", "unlink"),
    *("symlink_to", "iterdir", "rglob", "exists", "is_file", "is_dir"),
    *("memmap", "fromfile", "tofile", "save_file", "load_file"),
}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLE_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec"}
PROCESS_MODULES = {"subprocess", "multiprocessing", "pty"}
OS_PROCESSES = {"fork", "forkpty", "posix_spawn", "posix_spawnp", "spawnv", "spawnvp", "system", "popen"}
OS_ENVIRONMENT = {"environ", "getenv", "putenv", "environb"}
OS_FILES = {
    "open",
    "rename",
    "replace",
    "remove",
    "unlink",
    "mkdir",
    "makedirs",
    "listdir",
    "scandir",
    "walk",
    "fsync",
}


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All of them; walking takes longer than looking."""
    return tuple(ast.walk(tree))


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import; name is empty for `import module`."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def dotted(node: ast.AST) -> str:
    """`name` or `module.name`; empty for anything else. Writing out every call takes seconds."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def of_os(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines that use one of these names of the module os."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and dotted(node) == f"os.{node.attr}":
            yield node.lineno
    yield from (line for line, module, name in imported(tree) if module == "os" and name in names)


def mpi_uses(tree: ast.AST) -> Iterator[int]:
    yield from (line for line, module, _ in imported(tree) if module.split(".")[0] == "mpi4py")


def environment_uses(tree: ast.AST) -> Iterator[int]:
    yield from of_os(tree, OS_ENVIRONMENT)


def file_uses(tree: ast.AST) -> Iterator[int]:
    yield from of_os(tree, OS_FILES)
    yield from (line for line, module, _ in imported(tree) if module.split(".")[0] in FILE_MODULES)
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in FILE_CALLS:
                yield node.lineno


def pickle_uses(tree: ast.AST) -> Iterator[int]:
    """What would run code that a file holds."""
    yield from (line for line, module, _ in imported(tree) if module.split(".")[0] in PICKLES)
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in PICKLE_CALLS:
            yield node.lineno


def process_uses(tree: ast.AST) -> Iterator[int]:
    yield from of_os(tree, OS_PROCESSES)
    yield from (line for line, module, _ in imported(tree) if module.split(".")[0] in PROCESS_MODULES)


def lock_uses(tree: ast.AST) -> Iterator[int]:
    yield from of_os(tree, {"lockf"})
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in ("fcntl.flock", "fcntl.lockf"):
            yield node.lineno


RULES = {
    "imports mpi4py": (mpi_uses, ("cluster/mpi.py",)),
    "reads the environment": (environment_uses, ENVIRONMENT),
    "touches files": (file_uses, FILES),
    "unpickles": (pickle_uses, ("cluster/local.py", "data/image_files.py")),
    "starts processes": (process_uses, PROCESSES),
    "locks files": (lock_uses, ("cluster/doctor/files.py",)),
}


@cache
def tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("what", RULES)
@pytest.mark.slow
def test_outside_things_stay_in_their_rooms(what):
    uses, rooms = RULES[what]
    found = [
        f"mpipipe/{path.relative_to(PACKAGE).as_posix()}:{line} {what}; only {', '.join(rooms)} may"
        for path in SOURCES
        if not path.relative_to(PACKAGE).as_posix().startswith(rooms)
        for line in uses(tree(path))
    ]
    assert found == []


def test_the_rules_can_fail():
    def count(uses, text):
        return len(list(uses(ast.parse(text))))

    assert count(mpi_uses, "def f():\n    from mpi4py import MPI\nimport mpi4py.util") == 2
    assert count(pickle_uses, "import pickle\nfrom torch import load\ntorch.load('a')\nnp.load('a')") == 3
    assert count(environment_uses, "import os\nos.environ['A']\nfrom os import getenv\nos.sched_yield()") == 2
    assert count(process_uses, "import subprocess\nfrom multiprocessing import Pool\nos.fork()") == 3
    assert count(lock_uses, "import fcntl, os\nfcntl.flock(1, 2)\nos.lockf(1, 2, 3)") == 2
    assert (
        count(
            file_uses,
            "open('a')\nnp.memmap('a')\nimport shutil\nos.rename(a, b)\n'a'.replace('a', 'b')",
        )
        == 4
    )


@pytest.mark.slow
def test_pure_rooms_run_without_torch_and_mpi():
    """Really imported, in a fresh process: a plan can be made and read on a laptop without either."""
    modules = [
        ".".join(("mpipipe", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in PURE
    ]
    assert len(modules) > len(PURE)
    program = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n" + (
        "print(*sorted({'torch', 'mpi4py'} & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
