"""What disks, networks and people do to the files of a checkpoint, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

Files = dict[str, bytes]


def _place(draw: random.Random, content: bytes) -> int:
    """Often in the beginning, where headers are."""
    return draw.randrange(min(len(content), draw.choice((16, 256, 1 << 30))))


def flip(draw: random.Random, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def other_byte(draw: random.Random, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + bytes([draw.choice(b'0129-.,:[]{}"\\eE \n\0\xff')]) + content[at + 1 :]


def without(draw: random.Random, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + content[at + draw.randrange(1, 64) :]


def truncated(draw: random.Random, content: bytes) -> bytes:
    return content[: _place(draw, content)]


def twice(draw: random.Random, content: bytes) -> bytes:
    at = _place(draw, content)
    end = at + draw.randrange(1, 64)
    return content[:end] + content[at:end] + content[end:]


def zeroed(draw: random.Random, content: bytes) -> bytes:
    """A block that was never written."""
    at = _place(draw, content) // 64 * 64
    return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]


def longer(draw: random.Random, content: bytes) -> bytes:
    return content + draw.randbytes(draw.randrange(1, 16))


def noise(draw: random.Random, content: bytes) -> bytes:
    return draw.randbytes(len(content))


def digit(draw: random.Random, content: bytes) -> bytes:
    """Still JSON, where it was."""
    places = [i for i, byte in enumerate(content[:4096]) if byte in b"0123456789"]
    at = draw.choice(places or [0])
    return content[:at] + draw.choice(b"0123456789").to_bytes(1, "little") + content[at + 1 :]


WAYS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flip, other_byte, without, truncated, twice, zeroed, longer, noise, digit,
)  # fmt: skip


def corrupted(files: Files, draw: random.Random) -> Iterator[tuple[str, Files]]:
    """Endless: what was done, and the files, never as they were."""
    names = sorted(files)
    while True:
        name, other = draw.choice(names), draw.choice(names)
        kind = draw.randrange(12)
        changed = dict(files)
        if kind == 0:
            del changed[name]
            said = f"{name} is missing"
        elif kind == 1:
            changed[name], changed[other] = files[other], files[name]
            said = f"{name} and {other} are exchanged"
        else:
            way = draw.choice(WAYS)
            changed[name] = way(draw, files[name])
            said = f"{name}: {way.__name__}"
        if changed != files:
            yield said, changed
