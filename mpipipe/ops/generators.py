"""torch's, numpy's and Python's own generators belong to the whole process: ranks that are threads, and the
thread that loads data, take turns. For what draws from them and cannot be given a generator of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PROCESS_GENERATORS = threading.RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's default generator starts from `seed` here, and stands afterwards as before."""
    with PROCESS_GENERATORS, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
