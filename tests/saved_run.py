"""Checkpoints of made-up runs: the bits of each step are known, so what is read back can be compared."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.state.checkpoint import Reader
from mpipipe.state.digests import tensor_digest
from mpipipe.state.resume import RunState, step_folder
from mpipipe.state.saving import Saver
from mpipipe.values import Numerics

NUMERICS = Numerics(
    batch=8, micro_batch=2, micro_batches=4, blocks=1, threads=1, bits="torch", gemm="mkl", precision="fp32",
    tied="per_use", op_table={}, torch="2.13.0", instruction_set="avx2", seed=0,
)  # fmt: skip
ORDER = ["wte.weight", "blocks.0.weight", "blocks.1.weight", "norm.mean"]
Named = dict[str, Tensor]


def facts(step: int) -> RunState:
    optimizer = {
        "kind": "Own",
        "numbers": {"a/step": step, "a/on": True, "a/scale": 1.0, "a/tiny": 0.1 + 0.2},
    }
    return RunState(
        step,
        NUMERICS,
        "g",
        optimizer,
        extra={"note": [1, "a", None, {"best": [float("inf"), float("-inf")]}]},
    )


def tensors(step: int) -> tuple[Named, Named]:
    """A model and its optimizer, other bits for each step."""
    g = torch.Generator().manual_seed(step)
    model = {name: torch.randn(4, 3, generator=g) for name in ORDER}
    state = {f"{n}/{s}": torch.randn(4, 3, generator=g) for n in ORDER[:3] for s in ("exp_avg", "exp_avg_sq")}
    return model, state | {f"{n}/step": torch.tensor(float(step)) for n in ORDER[:3]}


def share(named: Named, comm: Communicator) -> Named:
    """What one rank owns: every size-th parameter with its state; ranks beyond the fourth have nothing."""
    return {n: t for n, t in named.items() if ORDER.index(n.partition("/")[0]) % comm.size == comm.rank}


def save(
    comm: Communicator, folder: Path, model: Named, optimizer: Named, order: list[str], facts: RunState
) -> RunState:
    saver = Saver(comm)
    saver.save(folder, model, optimizer, order, facts)
    assert saver.saved is not None
    return saver.saved


def save_step(run_dir: Path, step: int, ranks: int = 2) -> RunState:
    def body(comm: Communicator) -> RunState:
        model, optimizer = (share(t, comm) for t in tensors(step))
        return save(comm, step_folder(run_dir, step), model, optimizer, ORDER, facts(step))

    states = run_local(ranks, body)
    assert all(state == states[0] for state in states)
    return states[0]


def forget_data(folder: Path) -> None:
    """The checkpoint is as one of a version that kept nothing of the data."""
    path = folder / "run.json"
    facts = json.loads(path.read_text())["run"]
    del facts["data"]
    body = json.dumps(facts)
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f'{{"checkpoint": 1, "sha256": "{sha256}", "run":\n{body}\n}}\n')


def read_all(folder: Path) -> tuple[Named, Named]:
    found = []
    for source in (Reader(folder, "model"), Reader(folder, "optimizer")):
        named = {n: torch.empty(s.shape, dtype=getattr(torch, s.dtype)) for n, s in source.specs.items()}
        for name, out in named.items():
            source.read(name, out)
        found.append(named)
    return found[0], found[1]


def digests(*parts: Named) -> dict[str, str]:
    return {name: tensor_digest(name, t) for part in parts for name, t in part.items()}
