"""Where each rank computes: threads, cores, NUMA domains. Ranks of the same form are told together, whatever
node they are on; where there are many forms, so are all that compute in the same domains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise

from mpipipe.cluster.doctor.facts import Finding, RankFacts, Ranks
from mpipipe.cluster.doctor.judge.words import SHOWN
from mpipipe.planner.sizes import counted, numbered


def places(ranks: Ranks, threads: int, section: str) -> Iterator[Finding]:
    """threads: of each rank. A finding for each form, at most `SHOWN` and one of how many more there are."""
    forms = _alike(ranks, lambda r: (r.binding.own, bool(r.binding.bound), _domains(r)))
    if len(forms) > SHOWN:
        forms = _alike(ranks, lambda r: (len(r.binding.own), bool(r.binding.bound), _domains(r)))
    for alike in forms[:SHOWN]:
        yield Finding(section, "ok", _told(alike, threads))
    if rest := sum(map(len, forms[SHOWN:])):
        yield Finding(section, "ok", f"{counted(rest, 'rank')} more, in other ways: --json tells")


def _alike(ranks: Ranks, form: Callable[[RankFacts], Hashable]) -> list[list[RankFacts]]:
    found: dict[Hashable, list[RankFacts]] = {}
    for rank in ranks:
        found.setdefault(form(rank), []).append(rank)
    return list(found.values())


def _domains(rank: RankFacts) -> tuple[int, ...]:
    """The numbers of the NUMA domains in which it may compute."""
    own = set(rank.binding.own)
    return tuple(i for i, cores in enumerate(rank.binding.numa) if not own.isdisjoint(cores))


def _told(alike: Sequence[RankFacts], threads: int) -> str:
    first, several = alike[0], len(alike) > 1
    own, together = first.binding.own, sorted({core for r in alike for core in r.binding.own})
    where = numbered("core", own, spans)
    if len(together) > len(own):
        where = f"{counted(len(own), 'core')} each of {spans(together)}"
    domains = _domains(first)
    numa = f", NUMA {spans(domains)}" if domains else ""
    by = ", bound by mpipipe" if first.binding.bound else ""
    who = numbered("rank", [r.rank for r in alike], spans)
    return f"{who}: {counted(threads, 'thread')}{' each' if several else ''} on {where}{numa}{by}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, those that follow each other as one; of many such spans the first.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    texts = [f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True)]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
