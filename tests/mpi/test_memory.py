"""What a step takes it gives back: nothing grows from the third step on."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny import Case, even_cuts, placement, plan_of

from mpipipe.cluster.mpi import MpiCommunicator
from mpipipe.planner.copies import legal_copies
from mpipipe.runtime.process import resident_memory
from mpipipe.runtime.setting import set_threads
from mpipipe.runtime.trainer import Trainer

pytestmark = pytest.mark.mpi
SETTLING_BYTES = 2 << 20  # of the heap from the third step on
CREEP_BYTES = 256 << 10  # in the second half of a thousand steps: half a KiB in each
CASES = [
    ("1f1b", Case("gpt", batch=7)),  # micro-batches of 2, 2, 2 and 1; tied embeddings
    ("gpipe", Case("gpt", tied="eager", batch=7)),
    ("zb-v", Case("conv and norm", batch=10)),  # BatchNorm, ragged
    ("interleaved", Case("skips", batch=12, micro_batches=12)),  # as many as 1, 2, 3 or 4 ranks divide
    ("zb-h1", Case("gpt", precision="bf16")),
    ("zb-h2", Case("gpt", evaluate=True)),
    ("zb-planned", Case("skips", batch=8, evaluate=True)),
    ("v-half", Case("thrice", batch=12, micro_batches=6)),
    ("v-planned", Case("gpt", batch=7)),
    ("interleaved-planned", Case("thrice", tied="eager", batch=12, micro_batches=6)),
    ("1f1b", Case("conv and norm", batch=17, micro_batches=8, blocks=4, evaluate=True)),  # 2 or 4 replicas
    ("zb-h1", Case("gpt", batch=15, micro_batches=8, reduce="fast")),  # as many replicas as ranks
]
RECOMPUTED = {"zb-h2": ("selective", "full"), "v-half": ("full", "selective")}
EVALUATED_STEPS = 5  # from one evaluation to the next
UP_TO_TWO = pytest.mark.mpi(fast_up_to=2)
ON_TWO = pytest.mark.mpi(min_size=2, fast_up_to=2)
LONG = CASES[-2]  # replicas with exact sums, BatchNorm and evaluations
OFTEN = (*CASES[2:4], *CASES[-2:])  # several stages on a rank, and replicas: on every number of ranks


def tensors() -> int:
    """That this process can reach."""
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def held(comm: MpiCommunicator, schedule: str, case: Case, at: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tensors and resident bytes of this rank after these steps."""
    memory = resident_memory()
    set_threads(1)
    copies = max(n for n in legal_copies(case.numerics) if comm.size % n == 0)
    order = placement(schedule, comm.size // copies)
    cuts = even_cuts(case.variants.graph.groups, len(order))
    recompute = RECOMPUTED.get(schedule, ())
    plan = plan_of(case, schedule, cuts, 8, order, copies, recompute)
    trainer = Trainer(comm, case.variants, plan, case.settings, case.dataset)
    found = []
    for step in range(1, max(at) + 1):
        trainer.step(step - 1)
        if case.evaluate and step % EVALUATED_STEPS == 1:
            trainer.evaluate(2, case.batch - 1)
        if step in at:
            found.append((tensors(), memory.sample()))
    return found


@pytest.mark.parametrize(
    ("schedule", "case"),
    [
        pytest.param(*case, marks=() if case in OFTEN else UP_TO_TWO, id=" ".join(map(str, case)))
        for case in CASES
    ],
)
def test_no_tensor_outlives_its_step(comm: MpiCommunicator, schedule: str, case: Case) -> None:
    (early, _), (late, _) = held(comm, schedule, case, (3, 8))
    assert max(comm.allgather_object(late - early)) <= 0  # fewer: the loader of the case before has ended


@pytest.mark.parametrize(
    ("schedule", "case", "steps"),
    [
        pytest.param(*CASES[-1], 100, marks=UP_TO_TWO),
        *(pytest.param(s, c, 1000, marks=ON_TWO if (s, c) == LONG else pytest.mark.full) for s, c in CASES),
    ],
    ids=str,
)
def test_nothing_grows_over_a_thousand_steps(
    comm: MpiCommunicator, schedule: str, case: Case, steps: int
) -> None:
    """Of all in the full suite; and of fast replicas over a hundred, in seconds."""
    (early, first), (_, middle), (late, last) = held(comm, schedule, case, (3, steps // 2, steps))
    grown = comm.allgather_object((late - early, last - first, last - middle))
    print(f"{schedule} {case}: tensors, bytes, bytes of the second half, by rank: {grown}")
    assert max(tensors for tensors, _, _ in grown) <= 0, grown
    assert max(nbytes for _, nbytes, _ in grown) <= SETTLING_BYTES, grown
    assert max(nbytes for _, _, nbytes in grown) <= CREEP_BYTES, grown
