"""What a command's time goes into before its first step, part by part."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartUp:
    """Seconds of each part, in their order.

    Args:
        earlier: part -> seconds of what came before.
    """

    def __init__(self, **earlier: float) -> None:
        self.parts: dict[str, float] = dict(earlier)
        self._last = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Of all parts that have ended."""
        return sum(self.parts.values())

    def ended(self, part: str) -> None:
        """A part has ended; it began with the end of the one before."""
        now = time.perf_counter()
        self.parts[part] = now - self._last
        self._last = now

    def ended_as_two(self, first: str, second: str, seconds: float) -> None:
        """Two parts have ended, of which the second took so many seconds."""
        self.ended(first)
        seconds = min(seconds, self.parts[first])
        self.parts[first] -= seconds
        self.parts[second] = seconds

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"start-up {self.seconds:.1f} s: {parts}"


def process_age() -> float:
    """Seconds since this process began; 0 where the system doesn't tell (it isn't Linux)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5): ticks after the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
