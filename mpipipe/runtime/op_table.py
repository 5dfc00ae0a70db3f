"""Which operators become our own in a run with bits = fast: those that are faster so here. Collective.

    forms of the model -> each rank times both ways -> the total decides, for all -> `Numerics.op_table`

Decided once, at the first start: the table decides bits. It is kept like the costs, for this model on these
kinds of machine, so that the next start has the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpipipe.cluster.agree import code_version
from mpipipe.cluster.comm import Communicator
from mpipipe.graph.contest import Contest, Seconds
from mpipipe.graph.variants import Variants
from mpipipe.ops import KERNELS_VERSION
from mpipipe.runtime.costing import clock_of, device_kind
from mpipipe.runtime.setting import kernel_set
from mpipipe.values import Numerics, digest

GAIN = 1.03  # times faster than torch: less is noise
Table = dict[str, str]  # form -> "torch", or the instruction set of the kernels


def table_name(comm: Communicator, variants: Variants, numerics: Numerics) -> str:
    """Under which a later start finds the table."""
    n = numerics
    kinds = sorted(set(comm.allgather_object(device_kind(n.instruction_set))))
    facts = (variants.graph.hash, kinds, n.torch, n.threads, n.gemm, n.precision, variants.rows)
    return digest(*map(repr, facts), code_version(KERNELS_VERSION))


def decide(comm: Communicator, variants: Variants, numerics: Numerics, known: Mapping[str, Table]) -> Table:
    """The table of this run. known: on rank 0, those of earlier starts by `table_name`."""
    found = comm.bcast_object(known.get(table_name(comm, variants, numerics)))
    if found is not None:
        return found
    contest = Contest(variants.primary, numerics.precision, clock_of(comm, numerics.threads)[0], comm.size)
    forms = sorted({m.form for m in variants.primary.matches if m.contested})
    comm.barrier()
    times = comm.allgather_object(contest.times())
    return {form: winner([t[form] for t in times if form in t]) for form in forms}


def winner(times: Sequence[Seconds]) -> str:
    """Of one form on all ranks that had the time for it; ours where none had."""
    torch_s, ours_s = (sum(column) for column in zip(*times, strict=True)) if times else (1.0, 0.0)
    return kernel_set() if ours_s * GAIN < torch_s else "torch"
