"""How much memory a process and all it has started hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import getpid
from pathlib import Path

_EVERY_SECONDS = 0.25


class Peak:
    """The most memory that was seen.

    Attributes:
        bytes: of this process and its descendants, shared pages divided among those that hold
            them (Linux's proportional set size).
    """

    def __init__(self) -> None:
        self.bytes = 0

    def look(self) -> None:
        """Take the memory at this moment into account."""
        self.bytes = max(self.bytes, sum(_held_by(pid) for pid in _family(getpid())))


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Look several times a second, in a thread."""
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_SECONDS):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
        peak.look()
    finally:
        ended.set()
        thread.join()


def _family(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _held_by(pid: int) -> int:
    with suppress(OSError):  # it has ended, or isn't ours
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
