"""N ranks under a real MPI train to the bits of one: every loss and norm, every weight and buffer.

The launch with one rank leaves its results in build/bits/<key>/, those with 2, 3 and 4 compare with them;
where they are missing, rank 0 computes them itself. The key is made of all that may change the bits of a
case, so an old file is never believed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import built_in_tiny
import hf_tiny
import kinds
import pytest
import tiny
import torch
from built_in_tiny import BuiltInCase
from kinds import KINDS
from tiny import BITS, Case, Result, differences

from mpipipe import ops
from mpipipe import train as product
from mpipipe.cluster.agree import code_version
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.cluster.mpi import MpiCommunicator
from mpipipe.config import Config, parse
from mpipipe.planner.copies import legal_copies
from mpipipe.runtime import copies as runtime_copies
from mpipipe.runtime.setting import instruction_set
from mpipipe.state.checkpoint import load
from mpipipe.state.digests import tensor_digest
from mpipipe.state.files import write_text
from mpipipe.values import Recompute

pytestmark = pytest.mark.mpi
FOLDER = Path(__file__).resolve().parents[2] / "build" / "bits"
Run = Callable[[Communicator], Result]


def key() -> str:
    """Of the package, of torch, of the processor and of the tests themselves."""
    files = [tiny.__file__, built_in_tiny.__file__, hf_tiny.__file__, kinds.__file__, __file__]
    tests = [Path(file).read_text() for file in files]
    parts = [code_version(ops.KERNELS_VERSION), torch.__version__, instruction_set(), *tests]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def expect_bits_of_one_rank(comm: Communicator, name: str, got: Result, run: Run, keep: bool = True) -> None:
    """Compares `got` with what `run` gives on one rank; there, keeps it for the launches to come."""
    file = FOLDER / key() / f"{name}.json"
    if comm.size == 1 and keep:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(got, indent=1))
        return
    expected: Result = {}
    if comm.rank == 0:
        expected = json.loads(file.read_text()) if file.exists() else run_local(1, run)[0]
    assert differences(comm.bcast_object(expected), got) == []


UP_TO_TWO = pytest.mark.mpi(fast_up_to=2)


def up_to_two_but(often: Collection[Any], values: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Tuples of parameters: some on every number of ranks, the others on three and four in the full suite."""
    return [v if v in often else pytest.param(*v, marks=UP_TO_TWO) for v in values]


BY_GPIPE = [
    Case("gpt", tied="eager"),
    Case("gpt", batch=4, micro_batches=2),
    Case("gpt", batch=16, micro_batches=8, blocks=4, tied="eager"),
    Case("conv and norm", evaluate=True),
    Case("gpt", bits="fast", batch=7, evaluate=True),
]
OFTEN = [*itertools.product(BITS, ["1f1b"]), *itertools.product(BY_GPIPE, ["gpipe"])]


@pytest.mark.parametrize(
    ("case", "schedule"), up_to_two_but(OFTEN, itertools.product(BITS, ["1f1b", "gpipe"])), ids=str
)
def test_the_bits_of_one_rank(comm: MpiCommunicator, case: Case, schedule: str) -> None:
    """The cuts are even; with one rank, both schedules must agree."""
    got = tiny.train(comm, case, schedule)
    expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case), schedule == "1f1b")


IN_TWO_OR_SEVERAL = [
    "interleaved", "zb-h1", "zb-h2", "zb-planned", "zb-v", "v-half", "v-planned", "interleaved-planned",
]  # fmt: skip
MANY_MICRO_BATCHES = Case("gpt", batch=24, micro_batches=12, tied="eager")
CASES_SCHEDULES = [
    *itertools.product([Case("gpt"), Case("skips", evaluate=True)], IN_TWO_OR_SEVERAL),
    *up_to_two_but(
        [(MANY_MICRO_BATCHES, "interleaved"), (MANY_MICRO_BATCHES, "v-planned")],
        itertools.product([MANY_MICRO_BATCHES], IN_TWO_OR_SEVERAL),
    ),
    *itertools.product([Case("conv and norm", evaluate=True)], ["interleaved", "zb-h2", "zb-v", "v-planned"]),
    *itertools.product([Case("gpt", precision="bf16", tied="eager")], ["zb-planned", "v-half"]),
    *itertools.product([Case("gpt", bits="fast", batch=7, evaluate=True)], ["interleaved", "zb-h2"]),
]


@pytest.mark.parametrize(("case", "schedule"), CASES_SCHEDULES, ids=str)
def test_the_bits_of_one_rank_with_backwards_in_two_or_several_stages(
    comm: MpiCommunicator, case: Case, schedule: str
) -> None:
    if schedule == "interleaved" and case.micro_batches % comm.size:
        pytest.skip(f"{case.micro_batches} micro-batches do not go round {comm.size} ranks")
    got = tiny.train(comm, case, schedule, window=16)
    expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case), keep=False)


OF_GPT = Case("gpt", batch=15, micro_batches=8, blocks=4, evaluate=True, steps=2)
OF_NORMS = Case("conv and norm", batch=11, blocks=4, evaluate=True, steps=2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("case", "schedule", "recompute"),
    [
        (OF_GPT, "1f1b", ()),
        (OF_NORMS, "1f1b", ()),
        (Case("thrice", batch=12, micro_batches=6, blocks=6, tied="eager", steps=2), "1f1b", ()),
        (OF_GPT, "zb-planned", ("selective", "full")),
        (OF_NORMS, "zb-h2", ("full", "selective")),
    ],
    ids=str,
)
def test_the_bits_of_one_rank_with_replicas(
    comm: MpiCommunicator, case: Case, schedule: str, recompute: Sequence[Recompute]
) -> None:
    """Two and four, of 4 ranks also two of two stages; three with 6 blocks; and unlike numbers for each
    stage, such as 2+1 and 1+2+1."""
    legal = legal_copies(case.numerics)
    even = [n for n in legal if n > 1 and comm.size % n == 0]
    unlike = [shape for p in (2, 3) for shape in itertools.product(legal, repeat=p)
              if sum(shape) == comm.size and len({*shape}) > 1]  # fmt: skip
    for copies in (*even, *unlike):
        got = tiny.train(comm, case, schedule, copies=copies, recompute=recompute)
        expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("bucket_bytes", [1000, runtime_copies.BUCKET_BYTES])
@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (OF_GPT, "interleaved"),
        (OF_NORMS, "zb-v"),
        (Case("gpt", batch=8, micro_batches=4, blocks=4, tied="eager", steps=2), "v-half"),
        (Case("thrice", batch=12, micro_batches=6, blocks=6, tied="eager", steps=2), "interleaved-planned"),
    ],
    ids=str,
)
def test_the_bits_of_one_rank_with_replicas_of_several_stages_on_a_rank(
    comm: MpiCommunicator, case: Case, schedule: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of one stage travel, in one bucket or many, while its rank waits for messages of another. Two
    replicas, of 4 ranks also four; three with 6 blocks; and unlike numbers for each rank, such as 2+1."""
    monkeypatch.setattr(runtime_copies, "BUCKET_BYTES", bucket_bytes)
    legal = legal_copies(case.numerics)
    even = [n for n in legal if n > 1 and comm.size % n == 0]
    unlike = [pair for pair in itertools.permutations(legal, 2) if sum(pair) == comm.size]
    for copies in (*even, *unlike):
        got = tiny.train(comm, case, schedule, window=16, copies=copies)
        expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case))


@pytest.mark.mpi(min_size=2)
def test_fast_replicas_of_equal_shares_give_the_bits_of_as_many_blocks(comm: MpiCommunicator) -> None:
    fast = Case("conv and norm", batch=25, micro_batches=12, evaluate=True, steps=2, reduce="fast")
    exact = replace(fast, reduce="exact", blocks=comm.size)
    got = tiny.train(comm, fast, copies=comm.size)
    expect_bits_of_one_rank(comm, str(exact), got, lambda one: tiny.train(one, exact), keep=False)


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", ("selective", "full")), ("zb-h1", ("full", "selective"))]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", precision="bf16", tied="eager"),
        Case("gpt", bits="fast", batch=7, evaluate=True),
        Case("conv and norm", evaluate=True),
        pytest.param(BuiltInCase("resnet", batch=7, evaluate=True, steps=2), marks=UP_TO_TWO),
        pytest.param(BuiltInCase("resnet", bits="fast", batch=7, evaluate=True, steps=2), marks=UP_TO_TWO),
        pytest.param(BuiltInCase("lstm", steps=2), marks=UP_TO_TWO),
    ],
    ids=str,
)
def test_the_bits_of_one_rank_with_recomputation(
    comm: MpiCommunicator, case: Case, schedule: str, recompute: Sequence[Recompute]
) -> None:
    got = tiny.train(comm, case, schedule, window=16, recompute=recompute)
    expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case), keep=False)


IN_TWO = itertools.cycle(["zb-h1", "zb-h2", "zb-planned"])
OF_EVERY_KIND = [*itertools.product(KINDS, ["1f1b"]), *zip(KINDS, IN_TWO, strict=False)]
TIED_THRICE = hf_tiny.tiny_t5(steps=2)


@pytest.mark.parametrize(("case", "schedule"), up_to_two_but([(TIED_THRICE, "1f1b")], OF_EVERY_KIND), ids=str)
def test_the_bits_of_one_rank_for_every_kind_of_model(
    comm: MpiCommunicator, case: Case, schedule: str
) -> None:
    if isinstance(case, hf_tiny.HfCase):
        pytest.importorskip("transformers")
    got = tiny.train(comm, case, schedule)
    expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case), schedule == "1f1b")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", [Case("gpt", tied="eager"), Case("gpt, untied")], ids=str)
def test_any_cut(comm: MpiCommunicator, case: Case) -> None:
    """All stages but one as small as can be, at either end."""
    groups, n = case.variants.graph.groups, comm.size - 1
    for cuts in (groups[1 : n + 1], groups[-n:]):
        got = tiny.train(comm, case, cuts=cuts)
        expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", [Case("gpt", tied="eager"), Case("gpt, untied")], ids=str)
def test_any_order_of_the_ranks(comm: MpiCommunicator, case: Case) -> None:
    for order in (tuple(reversed(range(comm.size))), (*range(1, comm.size), 0)):
        got = tiny.train(comm, case, order=order)
        expect_bits_of_one_rank(comm, str(case), got, lambda one: tiny.train(one, case))


# -- the product as it is called -----------------------------------------------------------------------

CONFIG = """
model: {layers: 2, d_model: 32, heads: 2, context: 16, dropout: 0.1}
train: {steps: 4, batch: 7, lr: 0.01, warmup: 2, clip: 0.1}
eval: {every: 2, batches: 2, batch: 5}
pipeline: {micro_batches: 4}
sample: {length: 6, prompt: "def "}
"""


def train(comm: Communicator, config: Config) -> Result:
    """The whole way, costs and cuts measured; results as the files of the run tell them."""
    report = product.train(comm, config)
    comm.barrier()  # rank 0 is the one that writes
    run = Path(config.run.dir or "")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = load(run / "checkpoint")
    assert report.steps == len(steps) == config.train.steps
    assert report.val_loss == steps[-1]["val_loss"]
    assert report.final_loss == steps[-1]["loss"]
    return {
        "losses": [step["loss"].hex() for step in steps],
        "norms": [step["grad_norm"].hex() for step in steps],
        "validation": [step.get("val_loss", 0.0).hex() for step in steps],
        "weights": {name: tensor_digest(name, t) for name, t in weights.items()}
        | {"all": report.weights_sha256, "sample": (run / "sample.txt").read_text()},
    }


def config(run_dir: Path) -> Config:
    return parse(CONFIG, overrides=[f"run.dir={run_dir}", f"data.path={tiny.__file__}"])


def test_the_product_with_measured_costs(comm: MpiCommunicator, tmp_path: Path) -> None:
    folder = comm.bcast_object(tmp_path)  # one run folder for all ranks
    got = train(comm, config(folder / "run"))
    expect_bits_of_one_rank(comm, "product", got, lambda one: train(one, config(folder / "one")))
