"""Slices of the cores of a node against brute force, and which ranks get one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpipipe.cluster import binding
from mpipipe.cluster.binding import Bound, bind_ranks, decided, slices
from mpipipe.cluster.doctor.facts import Binding
from mpipipe.cluster.local import run_local

Cores = tuple[int, ...]


def node(*lengths: int, per_core: int = 1, usable: Cores | None = None) -> Binding:
    """NUMA domains with so many cores each, of `per_core` hyperthreads: i, i + cores, ..."""
    cores = sum(lengths)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    numa = tuple(
        tuple(core + cores * i for i in range(per_core) for core in range(a, b)) for a, b in pairwise(ends)
    )
    every = tuple(range(cores * per_core))
    usable = every if usable is None else usable
    siblings = sorted({tuple(range(core % cores, cores * per_core, cores)) for core in usable})
    return Binding(usable, len(usable), every, tuple(siblings), numa)


def test_neighbours_are_near_each_other_and_no_domain_is_left_out() -> None:
    assert slices(node(2), 2, 1) == ((0,), (1,))
    assert slices(node(4, 4), 2, 2) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert slices(node(2, 2), 4, 1) == ((0,), (1,), (2,), (3,))
    assert slices(node(4, 4), 3, 2) == ((0, 1), (2, 3), (4, 5, 6, 7))
    five = slices(node(24, 24, 24, 24), 5, 8)
    assert [len(cores) for cores in five] == [12, 12, 24, 24, 24]
    assert [min(cores) for cores in five] == [0, 12, 24, 48, 72]


def test_a_slice_has_whole_cores_with_their_hyperthreads() -> None:
    assert slices(node(2, 2, per_core=2), 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert slices(node(2, 2, per_core=2), 4, 1) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert slices(node(2, per_core=2), 4, 1) == ()  # hyperthreads are no cores


def test_a_domain_is_crossed_only_by_the_slice_that_fits_into_none() -> None:
    assert slices(node(3, 3), 3, 2) == ((0, 1), (2, 5), (3, 4))
    assert slices(node(2, 2, 2, 2), 2, 3) == ((0, 1, 2, 3), (4, 5, 6, 7))  # into no domain, but two each


def test_domains_whose_cores_are_numbered_in_turn_stay_apart() -> None:
    odd = replace(node(4), numa=((0, 2), (1, 3)))
    assert slices(odd, 2, 2) == ((0, 2), (1, 3))
    assert slices(odd, 4, 1) == ((0,), (2,), (1,), (3,))
    assert slices(replace(node(4), numa=()), 2, 1) == ((0, 1), (2, 3))  # the kernel does not tell


@st.composite
def nodes(draw: st.DrawFn) -> Binding:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    per_core = draw(st.sampled_from([1, 2]))
    every = sum(lengths) * per_core
    return node(*lengths, per_core=per_core, usable=tuple(sorted(draw(
        st.sets(st.integers(0, every - 1), min_size=1)
    ))))  # fmt: skip


def cores_of(left: Binding) -> list[list[Cores]]:
    """Of each domain, those that are left, with the hyperthreads that are."""
    cores = [tuple(x for x in group if x in left.usable) for group in left.siblings]
    return [[core for core in cores if core[0] in domain] for domain in left.numa]


def most_inside(room: list[int], ranks: int, threads: int) -> int:
    """Ranks that can lie in one domain each, by trying."""
    tried = [
        1 + most_inside([*room[:i], length - threads, *room[i + 1 :]], ranks - 1, threads)
        for i, length in enumerate(room)
        if ranks and length >= threads
    ]
    return max(tried, default=0)


@given(nodes(), st.integers(1, 5), st.integers(1, 5))
def test_slices_are_disjoint_whole_and_cross_as_few_domains_as_can_be(
    left: Binding, ranks: int, threads: int
) -> None:
    found, domains = slices(left, ranks, threads), cores_of(left)
    lengths = [len(cores) for cores in domains]
    if sum(lengths) < ranks * threads:
        assert found == ()
        return
    assert len(found) == ranks
    taken = list(chain(*found))
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(left.usable)
    assert all(cores == tuple(sorted(cores)) for cores in found)
    every = list(chain(*domains))
    own = [[core for core in every if set(core) <= set(cores)] for cores in found]
    assert [set(chain(*cores)) for cores in own] == [set(cores) for cores in found]  # whole cores
    assert min(map(len, own)) >= threads
    inside = [cores for cores in own if any(set(cores) <= set(domain) for domain in domains)]
    assert len(inside) == most_inside(lengths, ranks, threads)
    if len(inside) == ranks:
        counts = product(range(ranks + 1), repeat=len(lengths))
        shares = [
            min(length // n for length, n in zip(lengths, each, strict=True) if n)
            for each in counts
            if sum(each) == ranks
        ]
        assert min(map(len, own)) == max(shares)
    starts = [every.index(cores[0]) for cores in own]
    assert starts == sorted(starts)


# -- who is bound ------------------------------------------------------------------------------


def test_ranks_of_a_node_that_have_the_same_cores_are_bound_and_no_others() -> None:
    same, half = node(4), node(4, usable=(0, 1))
    assert decided([same] * 2, (0, 0), 1) == [(0, 1), (2, 3)]
    assert decided([same, same, same], (0, 1, 1), 1) == [(), (0, 1), (2, 3)]  # the first is alone
    assert decided([same, half], (0, 0), 1) == [(), ()]  # the launcher binds them
    assert decided([same, None], (0, 0), 1) == [(), ()]
    assert decided([None, None], (0, 0), 1) == [(), ()]
    assert decided([same] * 2, (0, 0), 3) == [(), ()]  # more threads than cores
    assert decided([same] * 5, (0,) * 5, 1) == [()] * 5
    both = [node(4), node(4), node(2, 2), node(2, 2)]
    assert decided(both, (0, 0, 1, 1), 1) == [(0, 1), (2, 3)] * 2


def test_spares_keep_the_cores_of_all() -> None:
    assert decided([node(4)] * 3, (0, 0, 0), 2, spares=1) == [(0, 1), (2, 3), ()]
    assert decided([node(4)] * 2, (0, 0), 2, spares=1) == [(), ()]


class Process:
    """A rank that is a process."""

    transport = "some MPI"


@pytest.mark.parametrize(
    ("changes", "environ", "openmp", "alike", "shared"),
    [
        ({}, {}, (), True, False),
        ({}, {"SLURM_CPUS_ON_NODE": "8"}, (), True, False),
        ({}, {"SLURM_CPUS_ON_NODE": "4"}, (), True, False),  # it counts cores
        ({}, {"SLURM_CPUS_ON_NODE": "6"}, (), True, True),
        ({}, {"SLURM_CPUS_ON_NODE": "2"}, (), True, True),
        ({"quota": 2}, {}, (), True, True),
        ({}, {}, (0, 1), True, True),
        ({}, {}, (), False, True),  # cores of two kinds
    ],
)
def test_cores_that_others_use_too_are_not_divided(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], environ: dict[str, str], openmp: Cores,
    alike: bool, shared: bool,
) -> None:  # fmt: skip
    left = replace(node(4, per_core=2), **changes)
    monkeypatch.setattr(binding, "binding", lambda: left)
    monkeypatch.setattr(binding, "cores_of_openmp", lambda: frozenset(openmp))
    monkeypatch.setattr(binding, "are_alike", lambda cores: alike)
    comm: Any = Process()
    assert binding._to_share(comm, environ) == (None if shared else left)


def test_ranks_that_are_threads_of_one_process_are_left_as_they_are() -> None:
    before = os.sched_getaffinity(0)
    found = run_local(2, lambda comm: bind_ranks(comm, 1))
    assert [bound.by_rank for bound in found] == [((), ())] * 2
    assert os.sched_getaffinity(0) == before


THREADS = """
import os, threading
from pathlib import Path
from mpipipe.cluster.binding import _bind_process

stop = threading.Event()
threading.Thread(target=stop.wait).start()
first = min(os.sched_getaffinity(0))
print(_bind_process((first,)) == (first,))
threading.Thread(target=stop.wait).start()
print([os.sched_getaffinity(int(thread.name)) == {first} for thread in Path("/proc/self/task").iterdir()])
print(_bind_process((1 << 16,)))
stop.set()
"""


@pytest.mark.slow
def test_all_threads_of_a_process_are_bound_those_to_come_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["True", "[True, True, True]", "()"]


def test_what_was_bound_is_said_in_a_line() -> None:
    said = [
        str(Bound(frozenset({0, 1}), by_rank))
        for by_rank in (((), ()), ((0,), (1,)), ((0, 1), (2, 3, 4), ()), ((0, 1), (2, 3)))
    ]
    assert said[0] == ""
    assert said[1].startswith("binding: each rank to 1 core of its own, ")
    assert said[2].startswith("binding: 2 of 3 ranks to 2-3 cores of its own, ")
    assert said[3].startswith("binding: each rank to 2 cores of its own, ")
