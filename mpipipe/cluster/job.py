"""One launch of ranks, from outside: its processes, what its launcher said last, and its end.

A launcher may not return when ranks or daemons have died, and may leave ranks behind when it dies itself.
So what belongs to a job is found in /proc, by two marks that survive a dead parent: the session that it
was started in, and the run folder in the arguments of its ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mpipipe.cluster.node import command_line

PROGRAM = "mpipipe.train"
GRACE_S = 5.0  # between TERM and KILL, and for the system to end what was killed
TAIL = 60  # lines of stderr that are remembered


class Job:
    """A launcher in a session of its own. Its stderr goes through this process, so that its last lines say
    who died; stdout is untouched."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], mark: str, awaited: Sequence[str] = ()
    ) -> None:
        """mark: an argument that the ranks have; awaited: words of lines on stderr; `heard` are those
        that came. Raises OSError when the launcher cannot be started."""
        self.mark, self.awaited, self.heard = mark, awaited, set[str]()
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self._tail: deque[str] = deque(maxlen=TAIL)
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._copy, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def _copy(self, stream: BinaryIO) -> None:
        for raw in stream:
            with suppress(OSError, ValueError):  # of a terminal that is gone; ranks write all the same
                sys.stderr.buffer.write(raw)
                sys.stderr.buffer.flush()
            line = raw.decode(errors="replace").rstrip("\n")
            self._tail.append(line)
            # not from the last lines, as a launcher may add one for each node behind it
            self.heard.update(words for words in self.awaited if words in line)

    @property
    def said(self) -> list[str]:
        """Its last lines on stderr."""
        return list(self._tail)

    def wait(self, limit_s: float) -> int | None:
        """The launcher's exit code, negative after a signal; None if it has not ended by then."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """To the launcher alone, which hands it on, or ends its ranks."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Ends what is left of it on this machine. The launcher goes first, by TERM, and KILL after a while:
        it may end ranks on other machines. Ranks would take a TERM for a wish to stop, with a checkpoint."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0.0) is None:
                self.signal(number)
                self.wait(GRACE_S)
        kill_all(remains(self.mark, self._process.pid))
        self._reader.join(1.0)  # what still holds the pipe is nobody's of ours


def kill_all(pids: Sequence[int]) -> None:
    """KILL; waits until they are gone, or as good as gone."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)


def remains(mark: str, session: int | None = None, proc: Path = Path("/proc")) -> list[int]:
    """Processes of this user on this machine that run ranks with the argument `mark`, or belong to a session;
    not this one."""
    if not mark.startswith("run.dir=/"):
        raise ValueError(f"{mark!r} is no mark of one run: run.dir= and an absolute path")
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            of_session = session is not None and _stat(entry)[3] == str(session)
            words = command_line(entry)
            if of_session or (mark in words and PROGRAM in words):
                found.append(int(entry.name))
    return [pid for pid in found if _lives(pid, proc)]


def _stat(entry: Path) -> list[str]:
    """State, parent, process group, session, ... (proc(5)); what is before may hold spaces."""
    return (entry / "stat").read_text().rpartition(")")[2].split()


def _lives(pid: int, proc: Path = Path("/proc")) -> bool:
    try:
        return _stat(proc / str(pid))[0] not in "ZX"
    except OSError:
        return False


def main(argv: Sequence[str]) -> int:
    """`python -m mpipipe.cluster.job MARK`: ends what is left of a job on this machine, which thereby has
    answered. The supervisor starts it on each host."""
    kill_all(remains(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
