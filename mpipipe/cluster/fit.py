"""A line through what messages took, whatever a noisy neighbour did to some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from mpipipe.values import Float64

NOISE = 0.1  # relative: what differs by more counts less and less
_LEAST_S, _LEAST_S_PER_BYTE = 1e-9, 1e-15  # a link is never infinite


@dataclass(frozen=True)
class Line:
    """seconds = latency_s + bytes / bytes_per_s (Hockney 1994)."""

    latency_s: float
    bytes_per_s: float
    residual: float  # median of the relative differences between the line and what was measured

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line of least soft-L1 differences between logarithms, so that 8 bytes count as much as a megabyte
    (Triggs et al. 2000, robust least squares).

    nbytes, seconds: (n,), of at least two lengths; seconds above 0.
    """
    n, t = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    small, large = (float(np.median(t[n == length])) for length in (n.min(), n.max()))
    slope = max((large - small) / (n.max() - n.min()), _LEAST_S_PER_BYTE)

    def differences(logs: Float64) -> Float64:
        latency_s, s_per_byte = np.exp(logs)
        return np.asarray(np.log(latency_s + n * s_per_byte) - np.log(t), np.float64)

    start = np.log([max(small, _LEAST_S), slope])
    low = np.log([_LEAST_S, _LEAST_S_PER_BYTE])
    found = least_squares(
        differences, np.maximum(start, low), bounds=(low - 1, np.inf), loss="soft_l1", f_scale=NOISE
    )
    latency_s, s_per_byte = np.exp(found.x)
    residual = float(np.median(np.abs(np.expm1(differences(found.x)))))
    return Line(float(latency_s), float(1.0 / s_per_byte), residual)
