"""A cluster that is not here, as a YAML file: what each rank computes on, and the links between them.

Keys mean what they mean in `values.Cluster`; `examples/cluster.yaml` is one with every key, and
`python -m mpipipe calibrate` writes one of the ranks that it is started on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, Strict, ValidationError, model_validator

from mpipipe.config.read import lines_of, place_of, read_sections, read_text
from mpipipe.config.sections import Above0, Count, Positive, Section, Size
from mpipipe.config.whole import Config
from mpipipe.errors import ConfigError, PlanError, did_you_mean, nearest
from mpipipe.values import LEVELS, Cluster, Device, Gemm, Link


class FlopsConfig(Section):
    fp32: Above0  # operations per second that matrix products reach, all threads of a rank together
    bf16: Above0  # the same with train.precision: bf16


class DeviceConfig(Section):
    kind: str  # what a person calls it
    threads: Positive  # cores of a rank
    memory: Size  # that a rank may take: bytes, or a text such as 24 GiB
    flops_per_s: FlopsConfig
    bytes_per_s: Above0  # between memory and the cores of a rank
    speed: Above0 | None = None  # relative to the first device; null = as flops_per_s says


class CountedConfig(DeviceConfig):
    count: Positive  # ranks on such a device


class LinkConfig(Section):
    latency_s: Above0
    bytes_per_s: Above0  # of one message between two ranks
    contention: Annotated[float, Field(ge=1.0)] = 1.0  # times as long while all ranks of a node talk so


class LinksConfig(Section):
    core: LinkConfig | None = None  # two ranks on one core
    numa: LinkConfig | None = None  # in one NUMA domain
    node: LinkConfig | None = None  # on one node
    switch: LinkConfig | None = None  # two nodes


Numbers = Annotated[tuple[Count, ...], Strict(False)]


class ClusterConfig(Section):
    device: DeviceConfig | None = None  # the same for every rank
    devices: Annotated[tuple[CountedConfig, ...], Strict(False)] = ()  # or different ones, by rank
    gemm: Gemm | None = None  # library of the fp32 products whose rates these are; null = mkl
    ranks_per_node: Positive = 1
    ranks_per_numa: Positive | None = None  # that share a NUMA domain; null: not told apart from the node
    ranks_per_core: Positive | None = None  # that share a core
    node_of_rank: Numbers = ()  # instead of ranks_per_node: the number of each rank's node
    numa_of_rank: Numbers = ()  # and of its domain, numbered through all nodes
    core_of_rank: Numbers = ()
    links: LinksConfig

    @model_validator(mode="after")
    def _fits_together(self) -> ClusterConfig:
        if (self.device is None) == (not self.devices):
            raise ValueError("give either device, the same for every rank, or devices, a list with counts")
        for level in ("numa", "core"):
            told = getattr(self, f"ranks_per_{level}") or getattr(self, f"{level}_of_rank")
            if getattr(self.links, level) and not told:
                raise ValueError(
                    f"links.{level} is given, but not which ranks it links; add ranks_per_{level}"
                )
        given = [len(x) for x in (self.node_of_rank, self.numa_of_rank, self.core_of_rank) if x]
        units = self._all_units(min(given, default=0))
        for inner, outer in (("core", "numa"), ("core", "node"), ("numa", "node")):
            _check_inside(inner, units[inner], outer, units[outer])
        return self

    @property
    def first(self) -> DeviceConfig:
        """On which costs are taken."""
        return self.device or self.devices[0]

    def of(self, n_ranks: int, precision: str, threads: int, base_bytes: int, limit: int | None) -> Cluster:
        """The first `n_ranks` ranks. precision: "fp32" or "bf16", by which speeds are compared; base_bytes:
        taken on each rank before any weight; limit: of its memory, at most. Raises PlanError if
        there are fewer, or a link between two of them is not given."""
        counted: list[DeviceConfig] = [d for d in self.devices for _ in range(d.count)]
        counted = counted or [self.first] * n_ranks
        if len(counted) < n_ranks:
            raise PlanError(f"{n_ranks} ranks, but the cluster file counts {len(counted)} devices; add some")
        rate = getattr(self.first.flops_per_s, precision)
        devices = tuple(
            Device(
                kind=d.kind,
                speed=d.speed or getattr(d.flops_per_s, precision) / rate,
                memory_bytes=d.memory if limit is None else min(d.memory, limit),
                threads=threads,
                base_bytes=base_bytes,
            )
            for d in counted[:n_ranks]
        )
        links = {level: Link(**dict(link)) for level, link in self.links if link is not None}
        units = self._all_units(n_ranks)
        found = Cluster(devices, units["node"], links, units["numa"], units["core"])
        _check_links(found)
        return found

    def _all_units(self, n_ranks: int) -> dict[str, tuple[int, ...]]:
        """By level, as `Cluster` has them."""
        node = self._units("node", (0,) * n_ranks)
        numa = self._units("numa", node)
        return {"node": node, "numa": numa, "core": self._units("core", numa or node)}

    def _units(self, level: str, outer: tuple[int, ...]) -> tuple[int, ...]:
        """Of each rank; empty where nobody says. outer: what they lie in."""
        given, each = getattr(self, f"{level}_of_rank"), getattr(self, f"ranks_per_{level}")
        if given and len(given) < len(outer):
            raise PlanError(
                f"{len(outer)} ranks, but {level}_of_rank of the cluster file has {len(given)}; measure "
                f"so many, {_CALIBRATE.format(len(outer))}, or give ranks_per_{level} instead"
            )
        if given or each is None:
            return tuple(given[: len(outer)])
        seen: Counter[int] = Counter()
        numbers: dict[tuple[int, int], int] = {}
        units = []
        for unit in outer:
            units.append(numbers.setdefault((unit, seen[unit] // each), len(numbers)))
            seen[unit] += 1
        return tuple(units)


_CALIBRATE = "mpirun -n {} python -m mpipipe calibrate"
_WHERE = {
    "core": "on one core",
    "numa": "in one NUMA domain",
    "node": "on one node",
    "switch": "on two nodes",
}


def _check_inside(inner: str, of_inner: Sequence[int], outer: str, of_outer: Sequence[int]) -> None:
    """of_inner, of_outer: numbers, by rank; none where nobody says."""
    place: dict[int, int] = {}
    for rank, (a, b) in enumerate(zip(of_inner, of_outer, strict=False)):
        if place.setdefault(a, b) != b:
            raise ValueError(
                f"rank {rank} is in {inner} {a}, which is in {outer} {place[a]} and in {outer} {b}; number "
                f"each {inner} of another {outer} anew"
            )


def _check_links(cluster: Cluster) -> None:
    n_ranks = len(cluster.devices)
    for level in cluster.spanned:
        if level not in cluster.links:
            a, b = next(p for p in combinations(range(n_ranks), 2) if cluster.level(*p) == level)
            raise PlanError(
                f"of {n_ranks} ranks, {a} and {b} are {_WHERE[level]}, but links.{level} is missing in the "
                f"cluster file; write it, measure it, {_CALIBRATE.format(n_ranks)}, or say which ranks share "
                "a node by ranks_per_node"
            )


def load_cluster(path: str | Path) -> ClusterConfig:
    """The cluster of a YAML file. Raises ConfigError that names file, line, key and what is expected."""
    text = read_text(path)
    sections = read_sections(text, str(path), "device")
    training = sorted(sections.keys() & (Config.model_fields.keys() - ClusterConfig.model_fields.keys()))
    if training and not sections.keys() & ClusterConfig.model_fields.keys():
        raise ConfigError(
            f"{path}: this is a training config (its keys are {', '.join(training)}), not a cluster file; "
            "name one, such as `python -m mpipipe calibrate` writes"
        )
    try:
        return ClusterConfig.model_validate(sections)
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(error, str(path), lines_of(text)))) from error


def _messages(error: ValidationError, source: str, lines: dict[tuple[str, ...], int]) -> Iterator[str]:
    for detail in error.errors():
        path = tuple(map(str, detail["loc"]))
        place, key = place_of(path, source, lines), ".".join(path)
        if detail["type"] == "extra_forbidden":
            valid = _keys(path[:-1])
            meant = did_you_mean(nearest(path[-1], valid))
            yield f"{place}: '{key}' is not a key{meant} (valid here: {', '.join(valid)})"
        elif detail["type"] == "missing":
            yield f"{place}: '{key}' is missing; write it"
        elif detail["type"] == "value_error":
            yield f"{place}: {detail['ctx']['error']}"
        else:
            wanted = detail["msg"].removeprefix("Input should be ")
            if detail["type"] in ("model_type", "model_attributes_type"):
                wanted = f"keys {', '.join(_keys(path))}"
            yield f"{place}: {key} = {detail['input']!r}; expected {wanted}"


def _keys(path: tuple[str, ...]) -> list[str]:
    """Of the section at `path`."""
    sections: dict[str, Any] = {
        "device": DeviceConfig, "devices": CountedConfig, "flops_per_s": FlopsConfig, "links": LinksConfig,
        **dict.fromkeys(LEVELS, LinkConfig),
    }  # fmt: skip
    inside = [part for part in path if part in sections]
    return list(sections[inside[-1]].model_fields if inside else ClusterConfig.model_fields)
