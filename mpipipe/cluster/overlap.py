"""Who moves large messages on while a rank computes: chosen at the start, by what this transport hides.

    helper      the thread of `progress.py` calls into the library every now and then
    otherwise   the rank itself, between two instructions and while it waits. That is enough where a receiver
                reads the sender's memory by itself, or the library has a progress thread that is switched on

Two ranks of each level try both: the sender computes while its message leaves, the receiver half as long,
then it waits. What the message adds to the time of both is *felt*; the choice is what is felt least. Between
nodes messages may go in parts, which is chosen beside it (`crossing.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mpipipe.cluster import crossing
from mpipipe.cluster.calibrate import TAG, both_ways, measure_pair, meet, pairs_of
from mpipipe.cluster.comm import EAGER_BYTES, Communicator
from mpipipe.cluster.crossing import Crossed
from mpipipe.cluster.node import cores_available
from mpipipe.values import Value, digest

LENGTHS = (1 << 18, 1 << 20)  # bytes, beyond every eager limit; the shorter one where the longer takes long
LONG_S = 0.01  # of a message, and of what the receiver computes meanwhile
SHORT_S = 0.002
GAIN = 1.1  # times as much must be felt without the helper: less is noise
BETWEEN = {"node": "within a node", "switch": "between nodes"}
# variables of MPI libraries that switch on a progress thread of their own, by how they begin
OWN_THREAD = ("OMPI_MCA_btl_tcp_progress_thread", "MPIR_CVAR_ASYNC_PROGRESS", "MPICH_ASYNC_PROGRESS",
              "I_MPI_ASYNC_PROGRESS")  # fmt: skip


@dataclass(frozen=True)
class Felt(Value):
    """Seconds of one message between two ranks, means over the pairs of a level."""

    level: str
    nbytes: int
    bare_s: float  # while neither does anything else
    helper_s: float  # felt by both together
    without_s: float


@dataclass(frozen=True)
class Overlap(Value):
    felt: tuple[Felt, ...]  # of each level that the job has; empty where there is no choice
    crossed: tuple[Crossed, ...] = ()  # between nodes, where there are several

    @property
    def parts(self) -> bool:
        """Messages between nodes go in parts."""
        return any(crossed.parts for crossed in self.crossed)

    @property
    def helper(self) -> bool:
        """Over all levels: there is one process, and one choice for it."""
        return sum(f.without_s for f in self.felt) > GAIN * sum(f.helper_s for f in self.felt)


def choose(comm: Communicator, known: Mapping[str, Overlap]) -> tuple[str, Overlap]:
    """Measures, unless rank 0 knows it from before, and switches parts, and the helper, on or off. With its
    name in `known`. The same on all ranks; collective. Takes a second at most for each level."""
    if not comm.helper_allowed:
        return "", Overlap(())
    comm.use_parts(False)
    pairs = pairs_of(comm)
    messages = {level: _message(comm, peers) for level, peers in pairs.items()}
    magnitudes = [(level, nbytes, round(math.log2(bare_s))) for level, (nbytes, bare_s) in messages.items()]
    room = len(cores_available())  # a helper of a rank that is bound to one core has that one alone
    of_job = magnitudes, comm.node_of_rank, comm.oversubscribed, room
    name = digest(comm.transport, f"parts of {EAGER_BYTES}", repr(of_job))
    name, overlap = comm.bcast_object((name, known.get(name)))
    if overlap is None:
        # whole ones: short parts fit into the system's buffers, and long messages of them would not
        felt = tuple(_felt(comm, level, pairs[level], *m) for level, m in messages.items())
        comm.use_helper(Overlap(felt).helper)  # as the run will have it
        between = [(pairs[level], *m) for level, m in messages.items() if level == "switch"]
        overlap = Overlap(felt, tuple(crossing.measure(comm, *m) for m in between))
    comm.use_parts(overlap.parts)
    comm.use_helper(overlap.helper)
    return name, overlap


def why(overlap: Overlap, transport: str) -> str:
    """For people: the choice, and what it was made by; empty where there was none."""
    if not overlap.felt:
        return ""
    if overlap.helper:
        who = "by a helper thread"
    else:
        own = [s for s in transport.split() if s.startswith(OWN_THREAD) and not s.endswith(("=0", "=no"))]
        who = f"by the library ({own[0]})" if own else "between instructions"
    figures = "; ".join(
        f"{BETWEEN[f.level]} a message of {f.nbytes >> 10} KiB, {_ms(f.bare_s)} ms long, costs "
        f"{_ms(f.helper_s)} ms with a helper thread, {_ms(f.without_s)} ms without"
        for f in overlap.felt
    )
    return f"messages move on {who}: {figures}" + "".join(map(_crossing, overlap.crossed))


def _crossing(crossed: Crossed) -> str:
    return (
        f"; {BETWEEN['switch']} they go {'in parts' if crossed.parts else 'whole'}: two of "
        f"{crossed.nbytes >> 10} KiB that cross take {_ms(crossed.parts_s)} ms in parts, "
        f"{_ms(crossed.whole_s)} ms whole"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _message(comm: Communicator, peers: Mapping[int, int]) -> tuple[int, float]:
    """Bytes and bare seconds of the message to try it with; the same on all ranks."""
    short, long = LENGTHS
    short_s = _bare_s(comm, peers, short)
    return (short, short_s) if short_s * long / short > LONG_S else (long, _bare_s(comm, peers, long))


def _bare_s(comm: Communicator, peers: Mapping[int, int], nbytes: int) -> float:
    """Median over the pairs; the same on all ranks."""
    comm.barrier()
    return float(np.median([x for x in comm.allgather_object(measure_pair(comm, peers, (nbytes,))) if x]))


def _felt(comm: Communicator, level: str, peers: Mapping[int, int], nbytes: int, bare_s: float) -> Felt:
    work, buf = _Work(min(max(2 * bare_s, SHORT_S), LONG_S)), np.zeros(nbytes, np.uint8)

    def felt(peer: int, on: bool) -> float:
        """By this rank, of a message to or from `peer`, with the helper or without."""
        sends = comm.rank < peer
        times = 2 if sends else 1
        comm.use_helper(on)
        meet(comm, peer)
        start = time.perf_counter()
        work(times)
        alone = time.perf_counter() - start
        meet(comm, peer)
        start = time.perf_counter()
        request = (comm.isend if sends else comm.irecv)(buf, peer, TAG)
        work(times)
        comm.wait(request)
        return max(0.0, time.perf_counter() - start - alone)

    by_rank = list(both_ways(comm, peers, felt).values())
    helper_s, without_s = (2 * np.mean(by_rank, axis=0)).tolist()
    return Felt(level, nbytes, bare_s, helper_s, without_s)


class _Work:
    """Computing that leaves Python's lock to others, as torch's operators do, for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._array, self._turns = np.linspace(-1, 1, 1 << 13), 1
        self._out = np.empty_like(self._array)
        self(1)
        start = time.perf_counter()
        self(1)
        self._turns = max(1, round(seconds / (time.perf_counter() - start)))

    def __call__(self, times: int) -> None:
        for _ in range(times * self._turns):
            np.tanh(self._array, out=self._out)
