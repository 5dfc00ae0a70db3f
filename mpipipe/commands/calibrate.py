"""`mpirun -n N python -m mpipipe calibrate [-o cluster.yaml]`: the ranks that it is started on, measured.

places, rates, links of each rank -> gathered -> ClusterConfig -> cluster.yaml     for `plan --cluster`
"""

from __future__ import annotations

import argparse
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpipipe.cluster.binding import bind_ranks
from mpipipe.cluster.calibrate import memory_share
from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.devices import Rates, devices_of, rounded
from mpipipe.cluster.doctor.machine import binding
from mpipipe.cluster.doctor.watch import Watch
from mpipipe.cluster.ending import end
from mpipipe.cluster.launch import launcher_rank, others_here
from mpipipe.cluster.links import MeasuredLink, measure_levels
from mpipipe.cluster.mpi import connect
from mpipipe.cluster.node import cores_available
from mpipipe.cluster.node import load as load_average
from mpipipe.cluster.places import places
from mpipipe.cluster.routes import Route, fastest, together
from mpipipe.commands.arguments import positive
from mpipipe.commands.output import writing
from mpipipe.config.cluster import ClusterConfig, DeviceConfig, LinkConfig, LinksConfig
from mpipipe.config.cluster_text import cluster_text
from mpipipe.errors import ConfigError, LaunchError
from mpipipe.planner.sizes import counted, size_text
from mpipipe.report.table import text_table
from mpipipe.runtime.costing import device_kind
from mpipipe.runtime.routes import measure_routes, triad_bytes_per_s
from mpipipe.runtime.setting import instruction_set, set_threads
from mpipipe.state.files import write_text
from mpipipe.values import Cluster, Gemm

LIMIT_S = 120.0  # it takes seconds; a rank that does not answer takes for ever
ROUNDS = 3  # of the rates; the best counts, because what else runs on a machine only adds
SUFFIXES = (".yaml", ".yml")


def main(argv: Sequence[str]) -> int:
    """The exit code; on an error, ends every rank of the job with a non-zero one."""
    options = _parser().parse_args(argv)
    comm: Communicator | None = None
    watch = Watch(LIMIT_S, _stuck)
    try:
        watch.doing = "the start of MPI"
        comm = connect()
        bind_ranks(comm, options.threads, wanted=options.bind == "auto")
        text = calibrate(comm, options.threads, options.gemm, options.output, watch)
        if comm.rank == 0:
            print(text, flush=True)
        comm.close()
        return 0
    except BaseException as error:
        return end(comm, error)
    finally:
        watch.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpipipe calibrate",
        description="Measures the ranks that it is started on, by mpirun or srun as a training would be: "
        "rates of each, links at every level, into the file that `plan --cluster` reads.",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("cluster.yaml"), metavar="FILE",
                        help="where it is written (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=positive, default=1, metavar="N",
                        help="pipeline.threads of the training (default: %(default)s, as there)")  # fmt: skip
    parser.add_argument("--bind", choices=("auto", "none"), default="auto",
                        help="pipeline.bind of the training (default: %(default)s, as there)")  # fmt: skip
    parser.add_argument("--gemm", choices=("auto", "mkl", "onednn"), default="auto",
                        help="kernels.gemm of the training (default: %(default)s, as there)")  # fmt: skip
    return parser


def _stuck(doing: str) -> None:
    if launcher_rank(os.environ) == 0:
        print(f"mpipipe calibrate: no end after {LIMIT_S:.0f} s: a rank is stuck in {doing}; "
              "`python -m mpipipe doctor` tells more", flush=True)  # fmt: skip


def calibrate(
    comm: Communicator, threads: int, gemm: Literal["auto"] | Gemm, file: Path, watch: Watch
) -> str:
    """What to tell people; rank 0 has written the file. Collective. Raises ConfigError where it cannot be,
    LaunchError where a rank has fewer cores than threads."""
    begun = time.perf_counter()
    _check(comm, threads, file)
    said = [_crowded(comm), others_here(comm, load_average())]
    watch.doing = "the rates"
    measured = _measured(comm, threads)
    by_rank = comm.allgather_object(measured.routes)
    chosen: Gemm = fastest(together(by_rank)) if gemm == "auto" else gemm
    ranks = comm.allgather_object(measured.rates(threads, memory_share(comm), chosen))
    watch.doing = "the links"
    where = places(comm, binding())
    links = measure_levels(comm, where)
    if comm.rank != 0:
        return ""
    config = configured(ranks, where, links, chosen)
    spent_s = time.perf_counter() - begun
    head = f"{counted(comm.size, 'rank')} on {counted(len(set(comm.node_of_rank)), 'node')}, {spent_s:.1f} s"
    notes = [f"note: {text}" for text in (*said, _missing(where)) if text]
    above = "\n".join([f"Measured by python -m mpipipe calibrate: {head}", *notes])
    with writing(file, ConfigError):
        write_text(file, cluster_text(config, above))
    more = f"\n\n{_link_table(links)}" if links else ""
    more += "".join(f"\n\n{textwrap.fill(note, 110)}" for note in notes)
    plan = f"python -m mpipipe plan config.yaml --ranks {comm.size} --cluster {file}"
    return f"measured: {head}\n\n{_device_table(config)}{more}\n\n{file} is written; plan with it:\n  {plan}"


def _check(comm: Communicator, threads: int, file: Path) -> None:
    """Before anything takes long. Raises ConfigError, LaunchError. Collective."""
    cores = [len(found) for found in comm.allgather_object(cores_available())]
    if file.suffix not in SUFFIXES and not (file.exists() and not file.is_file()):
        raise ConfigError(f"-o {file}: a cluster is written as YAML; name a file that ends with .yaml")
    if threads > min(cores):
        bound = min(cores)
        raise LaunchError(
            f"--threads {threads}, but rank {cores.index(bound)} may use {counted(bound, 'core')}: the rates "
            "would be those of fewer threads; start with `mpirun --bind-to none` or "
            f"`--map-by slot:PE={threads}`, or give --threads {bound}"
        )


def _crowded(comm: Communicator) -> str | None:
    """Collective."""
    if not any(comm.allgather_object(comm.oversubscribed)):
        return None
    return (
        "ranks outnumber the cores of a node, and a plan from this file counts each of them with a core of "
        "its own; calibrate with one rank for each core at most"
    )


def _missing(where: Cluster) -> str | None:
    """What was not measured, because the ranks are on one node."""
    if "switch" in where.spanned:
        return None
    return (
        "links between nodes (switch) were not measured, as all ranks are on one node; a plan for several "
        "nodes needs them: calibrate on two nodes, or fill in the line that stands in the file"
    )


@dataclass(frozen=True)
class _Measured:
    """Of this rank, the best of all rounds."""

    routes: tuple[Route, ...]
    bytes_per_s: float

    def rates(self, threads: int, memory_bytes: int, gemm: Gemm) -> Rates:
        flops = {route.name: route.flops_per_s for route in self.routes}
        kind = device_kind(instruction_set())
        return Rates(kind, threads, memory_bytes, flops[gemm], flops["bf16"], self.bytes_per_s)


def _measured(comm: Communicator, threads: int) -> _Measured:
    """While all others compute too. Collective."""
    set_threads(threads)
    routes, nbytes = [], []
    for _ in range(ROUNDS):
        comm.barrier()
        routes.append(measure_routes())
        comm.barrier()
        nbytes.append(triad_bytes_per_s())
    best = (max(of_route, key=lambda r: r.flops_per_s) for of_route in zip(*routes, strict=True))
    return _Measured(tuple(best), max(nbytes))


def configured(
    ranks: Sequence[Rates], where: Cluster, links: Mapping[str, MeasuredLink], gemm: Gemm
) -> ClusterConfig:
    """The file's value; figures are rounded, so that it is read back as the same."""
    devices = devices_of(ranks)
    one = DeviceConfig(**{k: v for k, v in devices[0] if k != "count"}) if len(devices) == 1 else None
    found = {
        level: LinkConfig(
            latency_s=rounded(m.link.latency_s),
            bytes_per_s=rounded(m.link.bytes_per_s),
            contention=rounded(m.link.contention),
        )
        for level, m in links.items()
    }
    units = {"node": where.node_of_rank, "numa": where.numa_of_rank, "core": where.core_of_rank}
    keys: dict[str, Any] = {}
    for level, numbers in units.items():
        keys |= _regular(level, numbers, where.node_of_rank)
    return ClusterConfig(
        device=one, devices=() if one else devices, gemm=gemm, links=LinksConfig(**found), **keys
    )


def _regular(level: str, numbers: tuple[int, ...], nodes: tuple[int, ...]) -> dict[str, Any]:
    """How many ranks share a unit, where all have as many and come one after the other; else each one's."""
    if not numbers:
        return {}
    each = numbers.count(numbers[0])
    if numbers == tuple(rank // each for rank in range(len(numbers))) and nodes.count(nodes[0]) % each == 0:
        return {f"ranks_per_{level}": each}
    return {f"{level}_of_rank": numbers}


def _device_table(config: ClusterConfig) -> str:
    headers = ("device", "ranks", "threads", "fp32 Gflop/s", "bf16 Gflop/s", "memory GB/s", "memory")
    rows = [
        (
            d.kind, str(getattr(d, "count", "all")), str(d.threads), f"{d.flops_per_s.fp32 / 1e9:.4g}",
            f"{d.flops_per_s.bf16 / 1e9:.4g}", f"{d.bytes_per_s / 1e9:.3g}", size_text(d.memory),
        )
        for d in ([config.device] if config.device else config.devices)
    ]  # fmt: skip
    return text_table(headers, rows, 110)


def _link_table(links: Mapping[str, MeasuredLink]) -> str:
    headers = ("level", "latency us", "GB/s", "pairs", "all at once", "residual")
    rows = [
        (
            level, f"{m.link.latency_s * 1e6:.3g}", f"{m.link.bytes_per_s / 1e9:.3g}", str(m.pairs),
            f"{m.link.contention:.3g} times", f"{m.residual:.0%}",
        )
        for level, m in links.items()
    ]  # fmt: skip
    return text_table(headers, rows, 110)
