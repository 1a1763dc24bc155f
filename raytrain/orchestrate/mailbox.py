"""What workers tell the driver, and the little that it tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True, slots=True)
class Message:
    """Something that rank 0 told.

    Attributes:
        kind: name of the Session's method that takes it.
        args: its arguments.
    """

    kind: str
    args: tuple[Any, ...]


@ray.remote(num_cpus=0)
class Mailbox:
    """Holds messages in their order until the driver takes them. Lives beside the driver.

    Args:
        earlier_seconds: training clock where this command's part of the run begins.
    """

    def __init__(self, earlier_seconds: float) -> None:
        self._messages: list[Message] = []
        self._clock_zero: float | None = None
        self._earlier_seconds = earlier_seconds
        self._stop = False
        self._final_fault: str | None = None
        self._steps = 0

    def begin(self, start: int, world_size: int) -> float:
        """Rank 0 of an attempt is about to make step ``start``; gives the training clock."""
        if self._clock_zero is None:
            self._clock_zero = time.monotonic() - self._earlier_seconds
        seconds = time.monotonic() - self._clock_zero
        self._messages.append(Message("begin", (start, world_size, seconds)))
        return seconds

    def put(self, kind: str, *args: Any) -> bool:
        """Leave a message; gives whether the run should stop."""
        self._messages.append(Message(kind, args))
        self._steps += kind == "metrics"
        return self._stop

    def take(self) -> list[Message]:
        """All messages since the last call, in order."""
        taken, self._messages = self._messages, []
        return taken

    def stop(self) -> None:
        """Ask the workers to stop at the next exchange of their meters."""
        self._stop = True

    def fault(self, message: str, *, final: bool) -> None:
        """A worker failed. A final fault would only come again, so no attempt follows it."""
        if final or self._steps == 0:
            self._final_fault = self._final_fault or message
        self._messages.append(Message("fault", (message,)))

    def final_fault(self) -> str | None:
        """The fault after which no attempt makes sense; None where there was none."""
        return self._final_fault


def mailbox_beside_me(earlier_seconds: float) -> Any:
    """A Mailbox on this machine, so that its clock is the driver's."""
    node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    make: Callable[..., Any] = Mailbox.options(scheduling_strategy=node).remote  # type: ignore[attr-defined]
    return make(earlier_seconds)
