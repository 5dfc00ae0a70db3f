from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpipipe.cluster.mpi import MpiCommunicator, connect


@pytest.fixture(scope="module")
def comm() -> Iterator[MpiCommunicator]:
    communicator = connect()
    yield communicator
    communicator.close()
