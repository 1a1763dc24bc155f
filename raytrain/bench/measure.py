"""Measuring rivals against each other on a machine that is never quite quiet."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from raytrain.run.record import cpu_model

Pass = Callable[[], int]
"""Does some work once; gives how many images that were."""

Name = TypeVar("Name")


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one thing.

    Attributes:
        median: of the values.
        low: the least value.
        high: the greatest value.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))

    def times(self, factor: float) -> Spread:
        """The same in another unit; the factor is positive."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


def this_machine() -> dict[str, str | int | float]:
    """What a measurement ran on, and how busy it was with other work."""
    return {"cpu": cpu_model(), "cores": os.cpu_count() or 1, "load": round(os.getloadavg()[0], 1)}


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    installed = {d.name.lower() for d in metadata.distributions()}
    return {name: metadata.version(name) for name in packages if name in installed}


def images_per_core_second(
    passes: Mapping[Name, Pass], repeats: int, seconds: float
) -> dict[Name, list[float]]:
    """Images a second of CPU time for each of several rivals.

    Rivals take turns in this process, so that what else the machine does meets all of them. What
    counts is CPU time of all threads: the same as wall time on one idle core, not lengthened by
    other programs, and fair to rivals that start threads.

    Args:
        passes: the rivals. Each makes a pass before the first turn, for what it builds lazily.
        repeats: turns of each rival.
        seconds: CPU seconds that a turn lasts at least, and one pass in any case.

    Returns:
        For each rival one value a turn, in the order of the turns.
    """
    for work in passes.values():
        work()
    rates: dict[Name, list[float]] = {name: [] for name in passes}
    console = Console(stderr=True)
    for _ in track(range(repeats), "measuring", console=console, transient=True):
        for name, work in passes.items():
            rates[name].append(_rate(work, seconds))
    return rates


def _rate(work: Pass, seconds: float) -> float:
    began, images, spent = time.process_time(), 0, 0.0
    while spent < seconds or images == 0:
        images += work()
        spent = time.process_time() - began
    return images / spent


def ratios(ours: Sequence[float], rival: Sequence[float]) -> Spread:
    """Ours over the rival's, turn by turn."""
    return Spread.of(a / b for a, b in zip(ours, rival, strict=True))
