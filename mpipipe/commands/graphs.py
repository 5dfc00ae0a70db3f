"""Graphs of other people's planners, from their text: two formats, each fault one message.

    JSON        of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020)
    graph.txt   a profile of PipeDream (Narayanan et al., SOSP 2019)

Both have milliseconds and bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from mpipipe.errors import PlanError
from mpipipe.planner.placement import Layer, Operator, Problem, Profile

MS = 1e-3
_COSTS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


def is_profile(text: str) -> bool:
    """Whether it looks like a graph.txt rather than JSON."""
    return text.lstrip()[:1] not in ("{", "[") and " -- " in text


# -- JSON of dnn-partitioning ------------------------------------------------------------------


def parse_json(
    text: str, source: str, n_accelerators: int | None = None, capacity_bytes: float | None = None
) -> Problem:
    """n_accelerators, capacity_bytes: instead of what the file says of them. Raises PlanError that names the
    file, the node or edge, what stands there and what may."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source}, line {error.lineno}: neither JSON ({error.msg}) nor PipeDream's graph.txt; give one"
        ) from error
    if not isinstance(whole, dict):
        raise PlanError(f"{source}: a list, where an object with nodes and edges is expected")
    nodes, edges = (_entries(whole, key, source) for key in ("nodes", "edges"))
    places = [f"{source}: node {node.get('id', f'at position {i}')}" for i, node in enumerate(nodes)]
    at = _positions(nodes, places)
    ends = [
        tuple(_end(edge, key, at, i, source) for key in ("sourceId", "destId"))
        for i, edge in enumerate(edges)
    ]
    outputs = _outputs(edges, source)
    operators = [
        _operator(node, outputs.get(node["id"], 0.0), place)
        for node, place in zip(nodes, places, strict=True)
    ]
    return Problem(
        operators=tuple(operators),
        edges=tuple((a, b) for a, b in ends),
        n_accelerators=_accelerators(whole, source) if n_accelerators is None else n_accelerators,
        n_cpus=_whole(whole, "maxCPUs", source),
        capacity_bytes=_capacity_bytes(whole, source) if capacity_bytes is None else capacity_bytes,
    )


def _accelerators(whole: Mapping[str, Any], source: str) -> int:
    if "maxFPGAs" not in whole:
        raise PlanError(f"{source}: 'maxFPGAs' is missing; write it, or give --devices N")
    count = _whole(whole, "maxFPGAs", source)
    if not count:
        raise PlanError(
            f"{source}: maxFPGAs = 0, and CPUs alone are not planned; write 1 at least, or give --devices N"
        )
    return count


def _capacity_bytes(whole: Mapping[str, Any], source: str) -> float:
    if "maxSizePerFPGA" not in whole:
        raise PlanError(f"{source}: 'maxSizePerFPGA' is missing; write it, or give --memory SIZE")
    return _number(whole, "maxSizePerFPGA", source)


def _entries(whole: Mapping[str, Any], key: str, source: str) -> list[dict[str, Any]]:
    found = _value(whole, key, source)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise PlanError(f"{source}: '{key}' is no list of objects; write [{{...}}, ...]")
    return found


def _positions(nodes: list[dict[str, Any]], places: list[str]) -> dict[int | str, int]:
    at: dict[int | str, int] = {}
    for i, (node, place) in enumerate(zip(nodes, places, strict=True)):
        found = _value(node, "id", place)
        if isinstance(found, bool) or not isinstance(found, int | str):
            raise PlanError(f"{place}: id = {found!r}; give a whole number")
        if found in at:
            raise PlanError(
                f"{place}: its id is that of two nodes, number {at[found]} and {i}; give each its own"
            )
        at[found] = i
    return at


def _edge_place(edge: dict[str, Any], i: int, source: str) -> str:
    ends = [
        f"{w} {json.dumps(edge[key])}" for key, w in (("sourceId", "from"), ("destId", "to")) if key in edge
    ]
    return f"{source}: edge number {i}" + (f" ({' '.join(ends)})" if ends else "")


def _end(edge: dict[str, Any], key: str, at: dict[int | str, int], i: int, source: str) -> int:
    place = _edge_place(edge, i, source)
    found = _value(edge, key, place)
    if isinstance(found, bool) or not isinstance(found, int | str) or found not in at:
        if isinstance(found, str) and found in map(str, at):
            raise PlanError(
                f"{place}: {key} = {json.dumps(found)} is text, but the id of that node is "
                f"a number; write {found}"
            )
        if isinstance(found, int) and not isinstance(found, bool) and str(found) in at:
            raise PlanError(
                f'{place}: {key} = {found} is a number, but the id of that node is text; write "{found}"'
            )
        raise PlanError(f"{place}: {key} = {found!r} is the id of no node; add it, or take the edge out")
    return at[found]


def _outputs(edges: list[dict[str, Any]], source: str) -> dict[Any, float]:
    """The cost of each node's output, which every edge from it repeats. edges: of nodes that are there."""
    costs: dict[Any, float] = {}
    for i, edge in enumerate(edges):
        place = _edge_place(edge, i, source)
        cost, node = _number(edge, "cost", place), edge["sourceId"]
        if not math.isclose(costs.setdefault(node, cost), cost, rel_tol=1e-6):
            raise PlanError(
                f"{place}: cost = {cost}, but another edge from node {node} has {costs[node]}; they carry "
                "the same output: give both the same cost"
            )
    return costs


def _operator(node: dict[str, Any], output: float, place: str) -> Operator:
    name = str(node.get("name", node["id"]))
    place = f"{place} ({name})" if "name" in node else place
    supported, together = _flag(node, "supportedOnFpga", place), node.get("colorClass")
    if together is not None and (isinstance(together, bool) or not isinstance(together, int)):
        raise PlanError(f"{place}: colorClass = {together!r}; give a whole number, or leave it out")
    return Operator(
        id=node["id"],
        name=name,
        accelerator_s=_number(node, "fpgaLatency", place) * MS if supported else math.inf,
        cpu_s=_number(node, "cpuLatency", place) * MS,
        nbytes=_number(node, "size", place),
        output_s=output * MS,
        together=together,
        backward=_flag(node, "isBackwardNode", place),
    )


def _value(entry: Mapping[str, Any], key: str, place: str) -> Any:
    if key not in entry:
        raise PlanError(f"{place}: '{key}' is missing; write it")
    return entry[key]


def _number(entry: Mapping[str, Any], key: str, place: str) -> float:
    found = _value(entry, key, place)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise PlanError(f"{place}: {key} = {found!r}; give a finite number, 0 at least")
    return float(found)


def _whole(entry: Mapping[str, Any], key: str, place: str) -> int:
    found = _number(entry, key, place)
    if found != int(found):
        raise PlanError(f"{place}: {key} = {found!r}; give a whole number")
    return int(found)


def _flag(entry: Mapping[str, Any], key: str, place: str) -> bool:
    found = _value(entry, key, place)
    if found not in (0, 1):
        raise PlanError(f"{place}: {key} = {found!r}; give 0 or 1, false or true")
    return bool(found)


# -- graph.txt of PipeDream --------------------------------------------------------------------


def parse_profile(text: str, source: str) -> Profile:
    """Raises PlanError that names the file, the line, what stands there and what may.

    Inputs cost nothing, as in PipeDream's own optimizer: each stage that needs them reads them itself.
    """
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{source}, line {number}"
        if not line.strip():
            continue
        if not line[0].isspace():
            layer = _layer(line.strip(), place)
            if layer.id in layers:
                raise PlanError(f"{place}: {layer.id} is there a second time; give each node its own name")
            layers[layer.id] = layer
        elif len(ends := line.strip().split(" -- ")) == 2:
            edges.append((ends[0], ends[1], place))
        else:
            raise PlanError(f"{place}: {line.strip()!r} is no edge; write node1 -- node2")
    at = {name: i for i, name in enumerate(layers)}
    for a, b, place in edges:
        for end in (a, b):
            if end not in at:
                raise PlanError(f"{place}: {end!r} is no node of this file; add it, or take the edge out")
    return Profile(tuple(layers.values()), tuple((at[a], at[b]) for a, b, _ in edges))


def _layer(line: str, place: str) -> Layer:
    parts = line.split(" -- ")
    if len(parts) < 3:
        raise PlanError(f"{place}: {line!r} is no node; write node1 -- what it is -- {_COSTS[0]}=1.5, ...")
    name = parts[1]
    settings = dict(re.findall(r"(\w+)=(\[[^]]*\]|[^,\s]+)", parts[2]))
    forward, backward, activation, parameters = (
        _cost(settings, key, f"{place}: {parts[0]} ({name})") for key in _COSTS
    )
    if name.startswith("Input"):
        forward = backward = activation = 0.0
    return Layer(parts[0], name, (forward + backward) * MS, activation, parameters)


def _cost(settings: Mapping[str, str], key: str, place: str) -> float:
    """One number, or the sum of a list: an output of several tensors."""
    text = _value(settings, key, place)
    try:
        values = [float(part) for part in text.strip("[]").split(";")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= value < math.inf for value in values):
        raise PlanError(f"{place}: {key} = {text}; give a finite number, 0 at least")
    return sum(values)
