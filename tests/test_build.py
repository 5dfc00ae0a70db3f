"""The part of `make setup` that decides: what is said before a download, and what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / ".ci" / "downloads.py"
spec = importlib.util.spec_from_file_location("downloads", PATH)
downloads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(downloads)


def report(*packages: str) -> dict:
    """In the shape of `pip install --report`; a package is "name version", the project itself a folder."""
    items = [
        {
            "metadata": dict(zip(("name", "version"), p.split(), strict=True)),
            "download_info": {"archive_info": {}},
        }
        for p in packages
    ]
    project = {
        "metadata": {"name": "mpipipe", "version": "0.1.0"},
        "download_info": {"dir_info": {"editable": True}},
    }
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
def test_gpu_builds_are_seen(tmp_path, capsys, packages, refused):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(*packages)))
    assert downloads.gpu_parts(downloads.packages(report(*packages))) == refused
    assert downloads.main(str(path), cuda=False) == bool(refused)
    said = capsys.readouterr()
    assert all(f"  {p}\n" in said.out for p in packages)
    assert "mpipipe 0.1.0" not in said.out
    assert all(p in said.err for p in refused)
    assert ("TORCH_INDEX" in said.err) == bool(refused)
    assert downloads.main(str(path), cuda=True) == 0
