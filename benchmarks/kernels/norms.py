"""The norm of each gradient in a flat buffer, against torch's norm of each view."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.harness import Case
from mpipipe.ops import norms

LAYER = [
    768,
    768,
    2304 * 768,
    2304,
    768 * 768,
    768,
    768,
    768,
    3072 * 768,
    3072,
    3072 * 768,
    768,
]  # of a GPT-85M
COUNTS = LAYER * 3


def cases() -> list[Case]:
    counts = torch.tensor(COUNTS, device="cpu")
    x, offsets = torch.randn(sum(COUNTS)), counts.cumsum(0) - counts
    views = x.split(COUNTS)
    theirs = {
        "vector_norm": lambda: [torch.linalg.vector_norm(v) for v in views],
        "foreach_norm": lambda: torch._foreach_norm(views),
    }
    ours = partial(norms, x, offsets, counts)
    return [Case("norms", "3 layers of GPT-85M", ours, theirs, None, x.nbytes, 0.0)]
