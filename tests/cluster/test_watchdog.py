"""Watchdogs of ranks that are threads of this process, with limits of a fraction of a second."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unseen import shows

from mpipipe.cluster import watchdog
from mpipipe.cluster.flight import Doing, Flight, Sign
from mpipipe.cluster.watchdog import CALLED, FOLDER, STOOD_STILL, Outside, Watchdog, clear, explained
from mpipipe.values import from_json, to_json

LIMIT_S, LONG_S = 0.3, 20.0


class Counting(Outside):
    """A view whose counter goes on while it is told to."""

    goes_on, count = True, 0

    def progress(self) -> int:
        self.count += self.goes_on
        return self.count


@pytest.fixture
def ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Watchdog], list[int], Callable[[], bool]]]:
    """Two of them, the exit codes that they left with, and a wait for both to have left."""
    monkeypatch.setattr(watchdog, "GATHER_S", 2.0)
    codes: list[int] = []
    both = threading.Semaphore(0)

    def leave(code: int) -> None:
        codes.append(code)
        both.release()

    made = [Watchdog(rank, 2, tmp_path, LIMIT_S, threading.get_ident(), leave) for rank in range(2)]
    for dog in made:
        dog.watch(Counting(dog.rank, 2), 1.0)
    yield made, codes, lambda: all(both.acquire(timeout=LONG_S) for _ in made)
    for dog in made:
        dog.close()


def stand_still(made: list[Watchdog], left: Callable[[], bool], rank: int) -> None:
    """In training, as the counter of one rank rests."""
    with made[0].during("training", counts=True), made[1].during("training", counts=True):
        for dog in made:
            dog.start()
        made[rank].view.goes_on = False
        assert left()


@pytest.mark.slow
def test_a_counter_that_rests_ends_all_ranks_with_records(ranks, tmp_path, capfd) -> None:
    made, codes, left = ranks
    stand_still(made, left, 1)
    assert codes == [STOOD_STILL] * 2
    records = [from_json(Flight, (tmp_path / FOLDER / f"rank-{r}.json").read_bytes()) for r in range(2)]
    assert [record.rank for record in records] == [0, 1]
    assert any("test_a_counter_that_rests" in line for line in records[0].stacks["MainThread"])
    said = capfd.readouterr().err
    assert said.count("mpipipe: watchdog: no progress for ") == 1
    assert explained(tmp_path).startswith("rank 1 (")
    assert "is in training, since " in explained(tmp_path)


@pytest.mark.slow
def test_no_rank_leaves_at_once_when_one_has_spoken(ranks, monkeypatch) -> None:
    """Whichever leaves first ends the job, and a launcher may drop what was said just then."""
    made, _, left = ranks
    at: dict[str, list[float]] = {"said": [], "left": []}
    monkeypatch.setattr(watchdog, "say", lambda text: at["said"].append(time.monotonic()))
    for dog in made:

        def leave(code: int, leave: Callable[[int], object] = dog._exit) -> None:
            at["left"].append(time.monotonic())
            leave(code)

        monkeypatch.setattr(dog, "_exit", leave)
    stand_still(made, left, 0)
    assert len(at["said"]) == 1
    assert min(at["left"]) - at["said"][0] > 0.8 * watchdog.PASSED_ON_S


@pytest.mark.slow
def test_what_ranks_of_other_nodes_have_written_is_looked_for_anew(ranks, tmp_path, monkeypatch) -> None:
    made, codes, left = ranks
    write, call = Path.write_text, Watchdog._call

    def unseen(path: Path, text: str) -> int:
        return write(path.with_name(f"{path.name}.unseen") if path.name == "rank-1.json" else path, text)

    def called_unseen(dog: Watchdog) -> bool:
        first = call(dog)
        if first:
            (dog.folder / CALLED).rename(dog.folder / f"{CALLED}.unseen")
        return first

    monkeypatch.setattr(Path, "write_text", unseen)
    monkeypatch.setattr(Watchdog, "_call", called_unseen)
    monkeypatch.setattr(watchdog, "look_anew", shows)
    monkeypatch.setattr(made[0].view, "doing", lambda *_: Doing(0, "a message", (1,), "somewhere"))
    stand_still(made, left, 0)
    assert codes == [STOOD_STILL] * 2
    assert "is in training, since " in explained(tmp_path), "and is not taken for dead"


@pytest.mark.slow
def test_outside_of_the_counted_phases_it_may_rest(ranks, tmp_path) -> None:
    made, codes, _ = ranks
    for dog in made:
        dog.view.goes_on = False
        dog.start()
    threading.Event().wait(4 * LIMIT_S)
    assert codes == []
    assert not (tmp_path / FOLDER / CALLED).exists()


def works(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.slow
def test_outside_of_the_counted_phases_who_computes_does_not_rest(ranks, monkeypatch, tmp_path) -> None:
    made, codes, left = ranks
    monkeypatch.setattr(watchdog, "OTHER_S", LIMIT_S)
    monkeypatch.setattr(watchdog, "WORK_S", LIMIT_S / 10)
    for dog in made:
        dog.view.goes_on = False
        dog.start()
    works(4 * LIMIT_S)
    assert codes == []
    assert left(), "this thread waits now, which is not a wait for a rank"
    assert "is in the start" in explained(tmp_path)


@pytest.mark.slow
def test_nor_do_those_that_wait_for_who_computes(ranks, monkeypatch, tmp_path) -> None:
    made, codes, left = ranks
    monkeypatch.setattr(watchdog, "OTHER_S", LIMIT_S)
    monkeypatch.setattr(watchdog, "WORK_S", LIMIT_S / 10)

    def wait_for(dog: Watchdog, other: int) -> None:
        monkeypatch.setattr(dog, "_waits", lambda: True)
        monkeypatch.setattr(dog, "_work", lambda: {"waits": (1, 2)})
        monkeypatch.setattr(dog.view, "doing", lambda *_: Doing(0, "a broadcast", (other,)))

    wait_for(made[0], 1)
    for dog in made:
        dog.view.goes_on = False
        dog.start()
    works(4 * LIMIT_S)
    assert codes == []
    wait_for(made[1], 0)
    works(LIMIT_S)
    assert left()
    assert explained(tmp_path) == (
        "ranks 0 and 1 wait for each other: a message is lost, or the program is at fault"
    )


@pytest.mark.slow
def test_within_steps_who_waits_for_one_outside_of_them_does_not_rest(ranks, monkeypatch, tmp_path) -> None:
    """It captures a variant of the model, say, and has come there later or takes longer."""
    made, codes, left = ranks
    monkeypatch.setattr(made[0], "_waits", lambda: True)
    monkeypatch.setattr(made[0].view, "doing", lambda *_: Doing(1, "1F0", (1,)))
    with made[0].during("training", counts=True), made[1].during("training", counts=True):
        made[0].view.goes_on = False
        with made[1].during("a capture"):
            for dog in made:
                dog.start()
            time.sleep(4 * LIMIT_S)
            assert codes == []
        made[1].view.goes_on = False
        assert left()
    assert "rank 1 (" in explained(tmp_path)
    assert "is in training" in explained(tmp_path)


@pytest.mark.slow
def test_a_rank_without_a_sign_of_life_is_noticed_by_the_one_before(ranks, tmp_path, monkeypatch) -> None:
    made, codes, _ = ranks
    monkeypatch.setattr(watchdog, "GATHER_S", 0.1)
    (tmp_path / FOLDER).mkdir()
    sign = Sign(3, "n1", 7, Doing(5, "2F1", (0,)))
    (tmp_path / FOLDER / "rank-1.alive").write_text(to_json(sign))
    made[0].start()
    made[0]._thread.join(LONG_S)
    assert codes == [STOOD_STILL]
    assert "rank 1 (n1, pid 7) gives no sign of life since 0 s, when it waited for 2F1" in explained(tmp_path)


def test_a_rank_gives_its_first_sign_before_it_goes_on(ranks, tmp_path) -> None:
    """One that is stopped a moment after its start is known by its name."""
    ranks[0][1].start()
    sign = from_json(Sign, (tmp_path / FOLDER / "rank-1.alive").read_bytes())
    assert (sign.beat, sign.doing.what) == (1, "the start")


@pytest.mark.slow
def test_a_rank_that_has_closed_is_not_missed(ranks, tmp_path) -> None:
    made, codes, _ = ranks
    for dog in made:
        dog.start()
    threading.Event().wait(LIMIT_S)
    made[1].close()
    threading.Event().wait(3 * LIMIT_S)
    assert codes == []
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["rank-0.alive", "rank-0.stack"]


@pytest.mark.slow
def test_in_a_recovery_a_rank_watches_itself_alone(ranks, tmp_path, monkeypatch) -> None:
    made, codes, _ = ranks
    monkeypatch.setattr(watchdog, "GATHER_S", 0.1)  # no record of the lost one comes
    for dog in made:
        dog.start()
    threading.Event().wait(LIMIT_S / 2)
    made[0]._ended.set()  # lost: its last sign stays
    made[0]._thread.join()
    made[1].alone()
    assert not (tmp_path / FOLDER / "rank-0.alive").exists(), "or the supervisor ends a sound recovery"
    (tmp_path / FOLDER / "rank-0.alive").write_text("stale")
    threading.Event().wait(3 * LIMIT_S)
    assert codes == []
    with made[1].during("a recovery", counts=True):  # for the limit of the steps, as the other is minutes
        made[1]._thread.join(LONG_S)
    assert codes == [STOOD_STILL]
    assert "rank 1 (" in explained(tmp_path)
    assert "is in a recovery" in explained(tmp_path)


def test_new_numbers_leave_the_files_of_others(ranks, tmp_path) -> None:
    made, _, _ = ranks
    made[1].start()
    made[1].close(taken=2)
    assert (tmp_path / FOLDER / "rank-1.stack").exists()


@pytest.mark.slow
def test_a_rank_on_a_full_disk_leaves_and_is_missed_only_when_it_gives_no_sign(
    ranks, tmp_path, monkeypatch, capfd
) -> None:
    made, codes, left = ranks
    monkeypatch.setattr(watchdog, "GATHER_S", 0.1)

    def full(path: Path, text: str) -> int:
        path.open("w").close()
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with made[0].during("training", counts=True), made[1].during("training", counts=True):
        for dog in made:
            dog.start()
        threading.Event().wait(3 * LIMIT_S)
        assert codes == []
        made[1].view.goes_on = False
        assert left()
    assert codes == [STOOD_STILL] * 2
    assert "mpipipe: watchdog: no progress for " in capfd.readouterr().err


def test_off_does_nothing(tmp_path) -> None:
    dog = Watchdog(0, 1, tmp_path, "off")
    dog.start()
    dog.close()
    assert list(tmp_path.iterdir()) == []


def test_auto_is_a_minute_or_ten_steps(tmp_path) -> None:
    dog = Watchdog(0, 1, tmp_path, "auto")
    assert dog.limit_s == 60
    dog.watch(Outside(0, 1), 2.0)
    assert dog.limit_s == 60
    dog.watch(Outside(0, 1), 30.0)
    assert dog.limit_s == 300


def test_what_was_explained_is_kept_once(tmp_path) -> None:
    folder = tmp_path / FOLDER
    for text in ("first", "second"):
        folder.mkdir()
        (folder / "diagnosis.txt").write_text(text)
        clear(tmp_path)
    assert (tmp_path / "flight.before" / "diagnosis.txt").read_text() == "second"
    folder.mkdir()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["flight.before"]


@pytest.mark.slow
def test_the_rest_of_a_spare_is_no_standstill_but_it_leaves_with_the_others(ranks, tmp_path) -> None:
    made, codes, left = ranks
    over = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        over.set()

    spare = Watchdog(2, 2, tmp_path, LIMIT_S, threading.get_ident(), leave)
    spare.start()
    time.sleep(4 * LIMIT_S)
    assert codes == []
    sign = from_json(Sign, (tmp_path / FOLDER / "rank-2.alive").read_bytes())
    assert sign.doing.what == "its wait, as a spare"
    stand_still(made, left, 1)
    assert over.wait(LONG_S)
    assert codes == [STOOD_STILL] * 3
    spare.close()
