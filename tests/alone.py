"""A run on one rank within the process of the test: a start takes seconds, most of them for imports."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

from mpipipe.cluster.local import run_local
from mpipipe.config import load
from mpipipe.train import train
from mpipipe.values import Report


def train_alone(folder: Path, *arguments: str, config: str = "config.yaml") -> Report:
    """As `python -m mpipipe.train config.yaml arguments...` in `folder`."""
    threads, place = torch.get_num_threads(), str(folder)
    flags = {word for word in arguments if word.startswith("--")}
    sys.path.insert(0, place)  # of code of one's own
    try:
        with contextlib.chdir(folder):
            settings = load(config, [word for word in arguments if word not in flags])
            resume, new_numerics = "--resume" in flags, "--new-numerics" in flags
            return run_local(1, lambda comm: train(comm, settings, resume, new_numerics))[0]
    finally:
        sys.path.remove(place)
        torch.set_num_threads(threads)
