"""Who a worker is. All that a worker adds to the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """A worker's place among the workers that share each step.

    Attributes:
        rank: this worker, 0 to size - 1. Rank 0 writes the checkpoints and tells the metrics.
        size: number of workers.
        local_size: workers on this worker's machine, which share its CPU cores.
        device: torch device name, such as ``cpu`` or ``cuda:3``.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    device: str = "cpu"

    @property
    def is_first(self) -> bool:
        return self.rank == 0
