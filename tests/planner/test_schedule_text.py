"""Orders from a file: there and back, and what is wrong shown at its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planner_cases import HUGE, cluster

from mpipipe.config.read import parse
from mpipipe.configured import schedule_name
from mpipipe.errors import ConfigError, DeadlockError, PlanError
from mpipipe.planner import SCHEDULES
from mpipipe.planner.misfit import MORE_MEMORY
from mpipipe.planner.partition import Wish
from mpipipe.planner.prediction import predict
from mpipipe.planner.programs import program_for
from mpipipe.planner.schedules import from_text, grid, register_text, to_text
from mpipipe.planner.schedules.text import from_lines
from mpipipe.planner.search import make_plan, plan_of
from mpipipe.values import Cluster, Costs, Device, GroupCost, Layout, Link, Numerics, Plan

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
NUMBERS = {"interleaved": (4, 4), "zb-v": (4, 5), "v-half": (4, 5), "v-planned": (4, 5),
           "interleaved-planned": (4, 5)}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_comes_back(name):
    schedule = SCHEDULES[name](*NUMBERS.get(name, (3, 5)))
    again = from_text(to_text(schedule))
    assert again.rank_of_stage == schedule.rank_of_stage
    assert again.n_micro == schedule.n_micro
    assert all(np.array_equal(a, b) for a, b in zip(again.codes, schedule.codes, strict=True))


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
@pytest.mark.slow
def test_torch_reads_the_same_actions_and_finds_them_valid(name):
    from torch.distributed.pipelining import schedules as torch_schedules  # takes seconds

    schedule = SCHEDULES[name](*NUMBERS[name])
    rows = [line.split(",") for line in to_text(schedule).splitlines()]
    orders = {rank: [torch_schedules._Action.from_str(word) for word in row] for rank, row in enumerate(rows)}
    assert [[str(action) for action in orders[rank]] for rank in orders] == rows
    homes = torch_schedules._validate_schedule(orders, len(orders), schedule.n_stages, schedule.n_micro)
    assert homes == dict(enumerate(schedule.rank_of_stage))


def torch_text(name: str, n_ranks: int, n_micro: int, folder: Path, *how: str) -> str:
    """What a schedule of torch with two stages per rank writes for all ranks; the stages are never run."""
    from torch.distributed.pipelining import schedules as torch_schedules  # takes seconds

    stage = SimpleNamespace(num_stages=2 * n_ranks, group_size=n_ranks, group_rank=0, submod=None)
    getattr(torch_schedules, name)([stage, stage], n_micro)._dump_csv(folder / "torch.csv", *how)
    return (folder / "torch.csv").read_text()


@pytest.mark.parametrize(("n_ranks", "n_micro"), [(2, 4), (2, 6), (3, 6), (4, 8)])
@pytest.mark.slow
def test_what_torch_writes_is_read_as_the_same_order(n_ranks: int, n_micro: int, tmp_path: Path) -> None:
    """(Its one with a single stage per rank has no CSV.) In its ZBV the last weight gradients come sooner."""

    def read(name: str) -> str:
        found = from_text(torch_text(name, n_ranks, n_micro, tmp_path, "compute_only"))
        assert (found.n_stages, found.n_micro, len(found.codes)) == (2 * n_ranks, n_micro, n_ranks)
        lowered = torch_text(name, n_ranks, n_micro, tmp_path)
        assert "UNSHARD" in lowered
        assert "SEND_F" in lowered
        assert to_text(from_text(lowered)) == to_text(found), "messages say nothing"
        return to_text(found)

    def without_weights(text: str) -> list[list[str]]:
        return [[word for word in line.split(",") if "W" not in word] for line in text.splitlines()]

    interleaved, zb_v = (to_text(SCHEDULES[name](2 * n_ranks, n_micro)) for name in ("interleaved", "zb-v"))
    assert read("ScheduleInterleaved1F1B") == interleaved
    assert without_weights(read("ScheduleZBVZeroBubble")) == without_weights(zb_v)
    assert "W" in read("ScheduleInterleavedZeroBubble")


@pytest.mark.slow
def test_what_torch_overlaps_follows_each_other(tmp_path: Path) -> None:
    text = torch_text("ScheduleDualPipeV", 2, 4, tmp_path, "compute_only")
    assert "(0F3;3B1)OVERLAP_F_B" in text
    assert "0F3,3B1" in to_text(from_text(text))


def test_empty_cells_and_blanks_say_nothing():
    assert to_text(from_text("\ufeff" + GOOD)) == GOOD, "the mark of UTF-8 that spreadsheets write"
    assert to_text(from_text("0F0, 0F1,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\n\n")) == GOOD


@pytest.mark.parametrize(
    ("text", "words", "mark"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "micro-batch 1 has F; it needs F and B", "1F1  [no 1B1]"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B0\n", "1B0 on rank 1 comes twice", "1B1  [1B0]"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,0F1\n", "0F1 is on rank 1, its stage on rank 0", "[0F1]"),
        ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n", "1B0 comes before 1F0", "[1B0]  1F0"),
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n", "backward of micro-batch 0 comes after", "0B1  [0B0]"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "each rank waits: rank 0 for 1B0", "0F0  [0B0]  0F1"),
        ("0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1I0,1W0,1F1,1I1\n", "micro-batch 1 has F I", "1I1  [no 1W1]"),
        ("0F0,0F1\n1F0,1F1\n", "micro-batch 0 has F; it needs F and B", "0F1  [no 0B0]"),
        ("0F0,0F1,0B0\n1F0,1I0,1W0,1F1,1I1,1W1\n", "micro-batch 1 has F; it needs F and B", "0B0  [no 0B1]"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1, micro-batch 0 has nothing", "[no 1F0]"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_shown_at_its_place(text, words, mark):
    with pytest.raises((PlanError, DeadlockError), match=f"orders.csv: .*{words}") as caught:
        from_text(text, "orders.csv")
    shown = [line for line in str(caught.value).splitlines() if line.endswith("<-- here")]
    assert mark in shown[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,F1,0B0\n", "x.csv, line 1: 'F1' is no action; write the stage, F, B, I or W"),
        ("0F0\n1UNSHARD\n", "x.csv, line 2: has no action"),
        ("0F0,(1F0;2UNSHARD\n", r"x.csv, line 1: '\(1F0;2UNSHARD' is no action"),
        ("\n", "x.csv: is empty"),
        (",,\n,\n", "x.csv: is empty"),
        ("\n0F0,0B0\n", "x.csv, line 1: has no action; .* remove the line"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "x.csv, line 2: has no action"),
        (
            "0F99999999999,0B0\n",
            "x.csv, line 1: '0F99999999999' is of micro-batch 99999999999, in an order of 2",
        ),
        (
            "0F0,0B0\n99999999999F0\n",
            "x.csv, line 2: '99999999999F0' is of stage 99999999999, .* without gaps",
        ),
        (f"0F{'9' * 5000}\n", "is of micro-batch 999999999999, in an order of 1 actions"),
    ],
)
def test_what_is_no_action_is_named(text, words):
    with pytest.raises(PlanError, match=words):
        from_text(text, "x.csv")


def test_memory_that_lacks_behind_the_last_action_is_told(registered):
    """What replicas exchange is too much there: no backward could come sooner."""
    registered("mine.csv", "0F0,0B0\n")
    groups = tuple(GroupCost(f"g{i}", 1.0, 1.0, 1.0, 10000, 10, 10, 1, 1) for i in range(2))
    costs = Costs(groups, cluster([1.0] * 2, [45000] * 2), (), 4.0, 0.0, "modelled", 0.0, 0.0, 2)
    numerics = Numerics(2, 1, 2, 2, 1, "torch", "mkl", "fp32", "per_use", {}, "", "", 0)
    with pytest.raises(PlanError, match=r"5000 bytes short; set pipeline\.recompute=auto, or give") as caught:
        make_plan(costs, numerics, "mine.csv", 1, 2, 2)
    assert str(caught.value).splitlines()[-1].endswith("0B1  [end]  <-- here")


def test_any_number_of_leading_zeros_is_read():
    zeros = "0" * 5000  # more digits than Python takes for a number
    assert to_text(from_text(f"{zeros}F{zeros},{zeros}B0\n", "x.csv")) == to_text(from_text("0F0,0B0\n"))


def test_an_order_of_a_function_has_no_larger_numbers_than_actions():
    with pytest.raises(
        PlanError, match="schedule 'mine', stage 1: 'F7' is of micro-batch 7, in an order of 4"
    ):
        from_lines("mine", ["F0 B0", "F7 B0"], 2, 8)


def test_a_line_of_a_function_has_an_action():
    with pytest.raises(PlanError, match="schedule 'mine': the line of rank 1 has no action; give each rank"):
        from_lines("mine", ["0F0 1F0 1B0 0B0", ""], 2, 1)


def test_a_long_order_of_many_ranks_is_shown_around_its_mark():
    schedule = SCHEDULES["1f1b"](40, 60)
    lines = grid(schedule.codes, {20: 70}).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "  ... and 32 more ranks"
    (marked,) = [line for line in lines if line.endswith("<-- here")]
    assert marked.startswith("  rank 20")
    assert marked.count("20") == 15


@pytest.fixture
def registered():
    yield lambda name, text: register_text(name, text)
    for name in [name for name in SCHEDULES if name.endswith(".csv")]:
        del SCHEDULES[name]


def test_a_file_is_a_schedule_of_its_numbers(registered):
    registered("mine.csv", GOOD)
    assert to_text(SCHEDULES["mine.csv"](2, 2)) == GOOD
    for n_stages, n_micro in ((2, 3), (3, 2)):
        with pytest.raises(PlanError) as caught:
            SCHEDULES["mine.csv"](n_stages, n_micro)
        assert str(caught.value) == (
            "mine.csv: is written for 2 ranks and 2 micro-batches, and a replica has "
            f"{n_stages} ranks and {n_micro} here; start 2 ranks with pipeline.micro_batches=2 (of two "
            f"replicas twice as many of both), or write an order for {n_stages} and {n_micro}"
        )
    with pytest.raises(PlanError, match=r"mine\.csv: is of 2 stages, here are 4; cut the model into 2, or "):
        SCHEDULES["mine.csv"](4, 2, 2)


def test_a_config_names_a_file(registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = parse("pipeline: {schedule: mine.csv, micro_batches: 2}", "c.yaml")
    with pytest.raises(
        ConfigError, match=r"mine.csv: cannot be read .* name an existing CSV file in pipeline.schedule"
    ):
        schedule_name(config)
    Path("mine.csv").write_text(GOOD)
    assert schedule_name(config) == "mine.csv"
    assert to_text(SCHEDULES["mine.csv"](2, 2)) == GOOD


TWO_EACH = """
def two_each(n_stages, n_micro):
    n_ranks = n_stages // 2
    turns = lambda kind, stage: [f"{stage}{kind}{micro}" for micro in range(n_micro)]
    return [
        " ".join(turns("F", r) + turns("F", n_ranks + r) + turns("B", n_ranks + r) + turns("B", r))
        for r in range(n_ranks)
    ]

two_each.stages_per_rank = 2
"""


def test_a_config_names_a_function_of_several_stages_per_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_in_two.py").write_text(TWO_EACH)
    monkeypatch.syspath_prepend(tmp_path)
    name = schedule_name(parse("pipeline: {schedule: 'mine_in_two:two_each'}", "c.yaml"))
    try:
        layout = planned(of_groups(8, 2), name, 4).layout
        replicas = make_plan(of_groups(8, 4), replace(numerics(4), blocks=2), name, 4, 4, 2)[0].layout
    finally:
        del SCHEDULES[name]
    assert layout.ranks == ((0,), (1,), (0,), (1,))
    assert layout.cuts == ("g2", "g4", "g6")
    assert replicas.ranks == ((0, 2), (1, 3), (0, 2), (1, 3))


# -- in a plan -------------------------------------------------------------------------------------


def of_groups(n: int, ranks: int, memory: int = HUGE) -> Costs:
    group = {"param_bytes": 0, "stash_bytes": 10, "workspace_bytes": 0, "act_bytes": 0, "grad_bytes": 0}
    groups = tuple(GroupCost(f"g{i}", 1.0, 1.0, 1.0, **group) for i in range(n))
    return Costs(groups, cluster([1.0] * ranks, [memory] * ranks), (), 1.0, 0.0, "modelled", 0.0)


def numerics(m: int) -> Numerics:
    return Numerics(m, 1, m, 1, 1, "torch", "mkl", "fp32", "per_use", {}, "", "", 0)


def test_a_layout_with_two_stages_per_rank_is_predicted():
    costs, names = of_groups(4, 2), [f"g{i}" for i in range(4)]
    for schedule, ranks, idle in (("zb-v", (0, 1, 1, 0), 1), ("interleaved", (0, 1, 0, 1), 3)):
        layout = Layout(("g1", "g2", "g3"), tuple((rank,) for rank in ranks), schedule, 4)
        plan = plan_of(costs, numerics(4), layout)
        assert plan.prediction.step_s == 6 * 4 + idle
        assert len(plan.prediction.peak_bytes) == 2
        assert plan.prediction.lower_bound_s == 6 * 4
        program_for(layout, numerics(4), (), names, train=False)
    wrong = Layout(("g1", "g2", "g3"), ((0,), (1,), (0,), (1,)), "zb-v", 4)
    with pytest.raises(PlanError, match="the same stages must be together"):
        program_for(wrong, numerics(4), (), names)


def test_too_much_memory_is_shown_at_its_place(registered):
    """Three forwards ahead where there is room for two stashes."""
    registered("mine.csv", "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    costs, names = of_groups(2, 2, memory=20), ["g0", "g1"]
    layout = Layout(("g1",), ((0,), (1,)), "mine.csv", 4)
    program = program_for(layout, numerics(3), (), names)
    with pytest.raises(PlanError, match="rank 0 needs 30 bytes and has 20 bytes") as caught:
        predict(costs, layout, program)
    assert "rank 0   0F0   0F1  [0F2]  0B0   0B1   0B2   <-- here" in str(caught.value)


def test_an_order_of_ones_own_has_the_receives_posted_that_it_needs(registered):
    """Rank 1 sends 64 gradients while rank 0 does forwards: no built-in order needs so many receives."""
    m = 64
    ahead = [f"0F{i}" for i in range(m)] + [f"0B{i}" for i in range(m)]
    in_turn = [f"1{kind}{i}" for i in range(m) for kind in "FB"]
    registered("mine.csv", f"{','.join(ahead)}\n{','.join(in_turn)}\n")
    window = planned(of_groups(2, 2), "mine.csv", m).layout.receive_window
    layout = Layout(("g1",), ((0,), (1,)), "mine.csv", window)
    program_for(layout, numerics(m), (), ["g0", "g1"])
    with pytest.raises(DeadlockError, match=f"with receive_window {window - 1} and no buffering"):
        program_for(replace(layout, receive_window=window - 1), numerics(m), (), ["g0", "g1"])


def planned(costs: Costs, schedule: str, m: int, recompute: Wish = "none") -> Plan:
    return make_plan(costs, numerics(m), schedule, 4, len(costs.cluster.devices), 1, recompute)[0]


def test_a_plan_shows_where_an_order_from_a_file_needs_too_much(registered):
    """It is for its ranks alone: no other number of them is a way out."""
    name = "orders.csv"
    registered(name, "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert planned(of_groups(3, 2, memory=30), name, 3).prediction.peak_bytes == (30, 20)
    with pytest.raises(PlanError) as caught:
        planned(of_groups(3, 2, memory=29), name, 3)
    assert str(caught.value) == (
        "rank 0 needs 30 bytes and has 29 bytes, 1 byte short; do a backward of this rank sooner in "
        f"orders.csv, set pipeline.recompute=auto, or {MORE_MEMORY}\n"
        "  rank 0   0F0   0F1  [0F2]  0B0   0B1   0B2   <-- here\n"
        "  rank 1   1F0   1B0   1F1   1B1   1F2   1B2 "
    )


def test_the_place_is_that_of_the_cuts_that_lack_least_even_with_full_recomputation(registered):
    """The fastest cut would have three groups on rank 0."""
    registered("orders.csv", GOOD)
    costs = of_groups(4, 2)
    groups = tuple(replace(g, fwd_s=1.0 + 8 * (i == 3), param_bytes=10) for i, g in enumerate(costs.groups))
    costs = replace(costs, groups=groups, cluster=cluster([1.0] * 2, [29] * 2))
    with pytest.raises(
        PlanError,
        match=r"rank 1 needs 40 bytes and has 29 bytes, 11 bytes short even with full recomputation \(none "
        r"and selective were tried, too\); give more memory \(a larger .*\)\n",
    ):
        planned(costs, "orders.csv", 2, "auto")


def test_contention_counts_a_rank_once():
    devices = (Device("cpu", 1.0, HUGE, 1),) * 2
    machine = Cluster(devices, (0, 0), {"node": Link(0.0, 1.0, 2.0)})
    assert machine.loaded((0, 1, 1, 0)) == machine.loaded((0, 1))
