"""A message that MPI says has failed: what is told, without an MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpipipe.cluster.mpi import _MpiRequest
from mpipipe.errors import RecoveryError

OTHER, TRUNCATE = 15, 14


class Failed(Exception):
    """As mpi4py's."""

    def Get_error_class(self) -> int:
        return OTHER


class Part:
    def Test(self, status: Any) -> bool:
        raise Failed("Other MPI error, error stack:\ncma_copy(74): process_vm_readv failed (errno 3)")


def test_a_message_that_failed_is_no_defect_and_tells_where_to_look() -> None:
    """As under MPICH where the other rank was killed in the midst of it: another start may do."""
    comm: Any = SimpleNamespace(
        _mpi=SimpleNamespace(Exception=Failed, ERR_TRUNCATE=TRUNCATE),
        _status=None,
        _live=set(),
        _translated=lambda error: error,
    )
    request = _MpiRequest(comm, [Part()], 16384, 16384, "receive from rank 1 with tag 13")  # type: ignore[list-item]
    comm._live.add(request)
    says = (
        r"^receive from rank 1 with tag 13 of 16384 bytes failed: Other MPI error, .*; .* other rank has died"
    )
    with pytest.raises(RecoveryError, match=says) as caught:
        request.done()
    assert "\n" not in str(caught.value)
    assert "process_vm_readv failed (errno 3)" in str(caught.value)
    assert caught.value.kind == "failed"
    assert not comm._live
