"""Each operator that could become our own, both ways: as torch has it, and as we have it; and each matrix
product of a linear layer, by torch and by the kernel `gemm`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from mpipipe.graph.anatomy import Anatomy, Lowering
from mpipipe.graph.cut import Code, extract
from mpipipe.graph.match import Match
from mpipipe.graph.profile import Profiler
from mpipipe.graph.source import TRACING
from mpipipe.ops.device import on_host

# Of all contests of a rank together, but that each one has a pair at least. They are held once, and on a busy
# machine a quarter of it decided otherwise each time.
BUDGET_S = 2.0
ROUNDS = 9  # pairs of each

Seconds = tuple[float, float]  # of torch's and of our form: forward and backward, the shortest


def in_question(anatomy: Anatomy) -> list[Match]:
    """The matches of which something is to be measured: the kernel of products is the processor's alone."""
    return [m for m in anatomy.matches if m.question and (m.contested or on_host())]


class Contest(Profiler):
    """Times pairs with made-up inputs. The caches stay as they are: both ways profit alike."""

    def times(self) -> dict[str, Seconds]:
        """By form. Those that move most in a micro-batch come first; all share the time equally."""
        forms, found, left_s = self._forms(), dict[str, Seconds](), BUDGET_S
        for i, (form, match) in enumerate(forms.items()):
            start = time.perf_counter()
            with TRACING:
                found[form] = self._both(match, start + left_s / (len(forms) - i))
            left_s = max(0.0, left_s - (time.perf_counter() - start))
        return found

    def _forms(self) -> Mapping[str, Match]:
        matches = in_question(self.anatomy)
        moved: Counter[str] = Counter()
        for match in matches:
            moved[match.question] += _size(match)
        first = {m.question: m for m in reversed(matches)}
        return {form: first[form] for form in sorted(first, key=lambda form: (-moved[form], form))}

    def _both(self, match: Match, end: float) -> Seconds:
        """The first pair does not count: libraries choose and compile what they need."""
        runs = [(code, *self._arguments(code)) for code in self._codes(match)]
        best = [math.inf, math.inf]
        for i in range(1 + ROUNDS):
            for way, (code, received, rest) in enumerate(runs):
                seconds = sum(self._once(code, received, rest, False))
                if i:
                    best[way] = min(best[way], seconds)
            if i and time.perf_counter() > end:
                break
        return best[0], best[1]

    def _codes(self, match: Match) -> Iterator[Code]:
        inside, a = set(match.nodes), self.anatomy
        received = [n for op in match.nodes for n in op.all_input_nodes if n in a.index and n not in inside]
        for lowering in self._ways(match):
            lowered = replace(a, lowering=lowering)
            yield extract(lowered, match.nodes, list(dict.fromkeys(received)), match.results, [], {})

    def _ways(self, match: Match) -> tuple[Lowering, Lowering]:
        """By torch, and by ours: an operator, whose product is torch's in both, or a product alone. Then all
        that is contested is torch's, or there would be no values of a product in the middle of one."""
        if match.contested:
            return Lowering(), Lowering("fast")
        around = dict.fromkeys((m.form for m in self.anatomy.matches if m.contested), "torch")
        return Lowering("fast", around), Lowering("fast", {**around, match.product: "gemm"})


def _size(match: Match) -> int:
    """Elements that it reads and makes."""
    values = [n.meta["val"] for n in (*match.inputs, *match.nodes)]
    return sum(v.numel() for v in values if isinstance(v, torch.Tensor))  # of a tuple the parts are nodes too
