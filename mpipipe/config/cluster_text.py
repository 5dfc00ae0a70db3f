"""A cluster's file, written: `load_cluster` reads it back as the same value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mpipipe.config.cluster import ClusterConfig
from mpipipe.config.sections import Section

_SWITCH = "switch: {latency_s: ..., bytes_per_s: ...}"


def cluster_text(cluster: ClusterConfig, head: str) -> str:
    """head: lines for people, above it. The link between nodes, where it is not given, is a comment to be
    filled in."""
    return "\n".join([*(f"# {line}" for line in head.splitlines()), *_lines(cluster)]) + "\n"


def _lines(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.device is not None:
        yield "device:"
        yield from (f"  {key}: {_flow(value)}" for key, value in _given(cluster.device))
    else:
        yield "devices:  # in the order of the ranks"
        yield from (f"- {_flow(device)}" for device in cluster.devices)
    for key, value in _given(cluster):
        if key not in ("device", "devices", "links") and not (
            key == "ranks_per_node" and cluster.node_of_rank
        ):
            yield f"{key}: {_flow(value)}"
    links = [f"  {level}: {_flow(link)}" for level, link in _given(cluster.links)]
    if not links:
        yield "links: {}  # one rank has none; of several nodes:"
        yield f"# links: {{{_SWITCH}}}"
        return
    yield "links:"
    yield from links
    if cluster.links.switch is None:
        yield f"  # {_SWITCH}"


def _given(section: Section) -> list[tuple[str, object]]:
    """Keys that say something, with their values."""
    given = [(key, value) for key, value in section if value is not None and value != ()]
    return [(key, _Size(value) if key == "memory" else value) for key, value in given]


class _Size(int):
    """Bytes, written in MiB where they are whole ones."""

    def __str__(self) -> str:
        return f"{self >> 20} MiB" if self % (1 << 20) == 0 else int.__str__(self)


def _flow(value: object) -> str:
    """On one line."""
    if isinstance(value, Section):
        value = dict(_given(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(x)}" for key, x in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        return f"{value:.3e}" if float(f"{value:.3e}") == value else repr(value)
    return json.dumps(value) if isinstance(value, str) else str(value)
