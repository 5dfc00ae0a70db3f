"""A small timeline and a report to draw."""

from __future__ import annotations

import numpy as np
import pytest

from mpipipe.values import Op, Program, RankReport, Report, Timeline

# Two stages, two micro-batches, unit forward and double backward, from second 10 on.
ROWS = [
    [
        (Op.F, 0, 0, 0, 1), (Op.SEND_ACT, 0, 0, 1, 1), (Op.F, 0, 1, 1, 2), (Op.SEND_ACT, 0, 1, 2, 2),
        (Op.RECV_GRAD, 0, 0, 2, 4), (Op.B, 0, 0, 4, 6), (Op.RECV_GRAD, 0, 1, 6, 7), (Op.B, 0, 1, 7, 9),
        (Op.NORM, -1, -1, 9, 10), (Op.STEP, 0, -1, 10, 11),
    ],
    [
        (Op.RECV_ACT, 1, 0, 0, 1), (Op.F, 1, 0, 1, 2), (Op.I, 1, 0, 2, 3), (Op.W, 1, 0, 3, 4),
        (Op.RECV_ACT, 1, 1, 4, 4), (Op.F, 1, 1, 4, 5), (Op.B, 1, 1, 5, 7),
        (Op.NORM, -1, -1, 7, 10), (Op.STEP, 1, -1, 10, 11),
    ],
]  # fmt: skip


@pytest.fixture
def timeline() -> Timeline:
    codes = tuple(np.array([(*row[:3], -1, -1, -1) for row in rank], dtype=np.int32) for rank in ROWS)
    times = tuple(np.array([row[3:] for row in rank], dtype=np.float64) + 10 for rank in ROWS)
    memory = tuple(np.full(len(rank), (r + 1) << 20) + np.arange(len(rank)) for r, rank in enumerate(ROWS))
    return Timeline(Program((0, 1), 2, 4, codes), times, memory)


@pytest.fixture
def report() -> Report:
    return Report(
        val_loss=2.25, unigram_entropy=3.0, step_s=0.55, predicted_step_s=0.5,
        peak_bytes=(300 << 20, 250 << 20), predicted_peak_bytes=(200 << 20, 250 << 20),
        bubble=0.125, predicted_bubble=0.1, ranks=(
            RankReport((0,), 7, 1_230_000, 0.4, 0.44, 0.2, 0.21, 0.0123, 3 << 20),
            RankReport((1,), 9, 45_678, 0.45, 0.5, 0.1, 0.09, 0.0, 1 << 20),
        ), metrics={}, per_s=7447.5, unit="tokens", exact_resume=True,
        weights_sha256="ab" * 32, steps=200, final_loss=2.2, plan_hash="cd" * 32, stopped_by=None,
    )  # fmt: skip
