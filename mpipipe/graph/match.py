"""A part of a captured graph that one operator of our own may stand for, and how it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from mpipipe.graph.rewrite import item


@dataclass(frozen=True)
class Match:
    """Operators that `op(*args)` may stand for. form: what its speed depends on, but for the number of rows:
    the key of `Numerics.op_table`; results: those of `nodes` that others read, op's results in order."""

    op: Callable[..., Any]
    form: str
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    args: tuple[Any, ...]
    atomic: bool = True  # no cut may part it
    contested: bool = True  # whether it may be slower than torch's; if not, `form` is in no table
    same_bits: bool = False  # as torch's on a processor: used there whatever the bits are to be
    keeps_values: bool = True  # of its inputs or results, for backward: nothing may write them in place
    product: str = ""  # form of a matrix product in it, which `op` makes by the kernel gemm with own=True

    @property
    def question(self) -> str:
        """The form that a contest of this match answers: of itself, or of its product; "" for none."""
        return self.form if self.contested else self.product

    @property
    def first(self) -> fx.Node:
        """The result in whose place the operator runs."""
        return min(self.results, key=self.nodes.index)

    @property
    def inputs(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        fx.node.map_arg(self.args, lambda n: found.setdefault(n))
        return list(found)


def chosen(found: Iterable[Match], wanted: Callable[[Match], bool], body: set[fx.Node]) -> Iterator[Match]:
    """Of the matches that lie in `body` and are wanted, those that are used: none overlap."""
    taken: set[fx.Node] = set()
    for match in found:
        if wanted(match) and taken.isdisjoint(match.nodes) and body.issuperset(match.nodes):
            taken.update(match.nodes)
            yield match


def replace(match: Match, own: bool, env: dict[Any, fx.Node], inputs: Callable[[fx.Node], fx.Node]) -> None:
    """In a copy of the graph: the copies of the matched operators give way to ours. own: its product, too.
    env: node -> its copy, brought up to date; inputs: of a matched operator's input, its copy."""
    old = [env[n] for n in match.nodes]
    first = env[match.first]
    graph = first.graph
    with graph.inserting_before(first):
        args = fx.node.map_arg(match.args, inputs)
        new = graph.call_function(match.op, args, {"own": True} if own else {})
        values = [n.meta["val"] for n in match.results]
        new.meta["val"] = values[0] if len(values) == 1 else tuple(values)
        parts = [new]
        if len(values) > 1:
            parts = [graph.call_function(item, (new, i)) for i in range(len(values))]
    for result, part in zip(match.results, parts, strict=True):
        part.meta["val"] = result.meta["val"]
        env[result].replace_all_uses_with(part)
        env[result] = part
    for n in reversed(old):
        graph.erase_node(n)
