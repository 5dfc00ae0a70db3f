"""What fails on one rank ends all of them, with what another start may mend told from what it may not."""

from __future__ import annotations

import errno
import os

import pytest

from mpipipe.cluster.comm import Communicator
from mpipipe.cluster.local import run_local
from mpipipe.errors import CheckpointError, UnreadableError
from mpipipe.state.gather import together

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("by_rank", "kind"),
    [
        ([STALE], "failed"),
        ([FULL], "error"),
        ([None, STALE, None], "failed"),
        ([STALE, UnreadableError("not just now")], "failed"),
        ([None, UnreadableError("not yours to read", kind="error")], "error"),
        ([STALE, FULL], "error"),
        ([STALE, CheckpointError("nothing saved")], "error"),
        ([STALE, ValueError("a defect")], "error"),
    ],
)
def test_another_start_may_mend_what_it_may_mend_on_each_rank(
    by_rank: list[Exception | None], kind: str
) -> None:
    def body(comm: Communicator) -> tuple[str, str]:
        def work() -> None:
            if error := by_rank[comm.rank]:
                raise error

        with pytest.raises(CheckpointError) as caught:
            together(comm, "there", work)
        return caught.value.kind, str(caught.value)

    said = run_local(len(by_rank), body)
    assert len(set(said)) == 1
    assert said[0][0] == kind
    assert all(str(error.args[-1]) in said[0][1] for error in by_rank if error)
