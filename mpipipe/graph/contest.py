"""Each operator that could become our own, both ways: as torch has it, and as we have it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mpipipe.graph.anatomy import Lowering
from mpipipe.graph.cut import Code, extract
from mpipipe.graph.patterns import Match
from mpipipe.graph.profile import Profiler
from mpipipe.graph.source import TRACING

BUDGET_S = 0.5  # of all contests of a rank together
ROUNDS, LEAST = 5, 2  # of each

Seconds = tuple[float, float]  # of torch's and of our form: forward and backward, the shortest


class Contest(Profiler):
    """Times pairs with made-up inputs. The caches stay as they are: both ways profit alike."""

    def times(self) -> dict[str, Seconds]:
        """By form, the smallest first, as many as there is time for."""
        end, found = time.perf_counter() + BUDGET_S, {}
        for form, match in sorted(self._forms().items(), key=lambda pair: _size(pair[1])):
            if time.perf_counter() > end:
                break
            with TRACING:
                found[form] = self._both(match, end)
        return found

    def _forms(self) -> Mapping[str, Match]:
        forms: dict[str, Match] = {}
        for match in self.anatomy.matches:
            if match.contested:
                forms.setdefault(match.form, match)
        return forms

    def _both(self, match: Match, end: float) -> Seconds:
        runs = [(code, *self._arguments(code)) for code in self._codes(match)]
        best = [math.inf, math.inf]
        for i in range(1 + ROUNDS):
            for way, (code, received, rest) in enumerate(runs):
                seconds = sum(self._once(code, received, rest, True, False))
                if i:  # the first one chooses and compiles what libraries need
                    best[way] = min(best[way], seconds)
            if i >= LEAST and time.perf_counter() > end:
                break
        return best[0], best[1]

    def _codes(self, match: Match) -> Iterator[Code]:
        inside, a = set(match.nodes), self.anatomy
        received = [n for op in match.nodes for n in op.all_input_nodes if n in a.index and n not in inside]
        for bits in ("torch", "fast"):
            lowered = replace(a, lowering=Lowering(bits))
            yield extract(lowered, match.nodes, list(dict.fromkeys(received)), match.results, [], {})


def _size(match: Match) -> int:
    """Elements that it reads and makes."""
    values = [n.meta["val"] for n in (*match.inputs, *match.nodes)]
    return sum(v.numel() for v in values)
