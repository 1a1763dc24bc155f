"""What workers tell the driver, and the little that it tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@dataclass(frozen=True, slots=True)
class Message:
    """Something that rank 0 told.

    Attributes:
        kind: name of the Session's method that takes it; for ``checkpoint`` the argument is a dict
            of its fields, since this process would have to import torch to hold the class itself.
        args: its arguments.
    """

    kind: str
    args: tuple[Any, ...]


@ray.remote(num_cpus=0)
class Mailbox:
    """Holds messages in their order until the driver takes them. Lives beside the driver.

    Workers that Ray gave up, because their machine had lost its network, may still run, and speak
    up when it comes back. So each worker names its group: what an earlier group than the running
    one tells is not heard.

    Args:
        earlier_seconds: training clock where this command's part of the run begins.
        recorded_steps: steps in the record of the run.
    """

    def __init__(self, earlier_seconds: float, recorded_steps: int) -> None:
        self._recorded_steps = recorded_steps
        self._groups_begun = 0
        self._messages: list[Message] = []
        self._clock_zero: float | None = None
        self._earlier_seconds = earlier_seconds
        self._stop = False
        self._final_faults: list[str] = []
        self._made_steps = False
        self._world_size = 0
        self._fault_told = False

    def enter(self) -> int | None:
        """A worker has started; gives its group's number, or None: there is nothing left to do.

        All of a group's workers enter before its rank 0 begins.
        """
        return None if self._stop or self._final_faults else self._groups_begun

    def begin(self, group: int, start: int, world_size: int) -> float:
        """Rank 0 of a group is about to make step ``start``; gives the training clock."""
        self._groups_begun = max(self._groups_begun, group + 1)
        if self._clock_zero is None:
            self._clock_zero = time.monotonic() - self._earlier_seconds
        elif world_size <= self._world_size and not self._fault_told:  # more: not for a fault
            self._tell_fault("the workers ended without a word (killed, or a lost machine)")
        self._world_size, self._fault_told = world_size, False
        seconds = time.monotonic() - self._clock_zero
        self._messages.append(Message("begin", (start, world_size, seconds)))
        return seconds

    def put(self, group: int, kind: str, *args: Any) -> bool:
        """Leave a message; gives whether the group should stop."""
        if self._is_past(group):
            return True
        self._messages.append(Message(kind, args))
        if kind == "metrics":
            self._made_steps = True
            self._recorded_steps = args[0][-1].step + 1
        return self._stop

    def recorded_steps(self) -> int:
        """Steps that are in the record, or will be when the driver has taken all messages."""
        return self._recorded_steps

    def take(self) -> list[Message]:
        """All messages since the last call, in order."""
        taken, self._messages = self._messages, []
        return taken

    def stop(self) -> None:
        """Ask the workers to stop at the next exchange of their meters."""
        self._stop = True

    def fault(self, group: int, message: str, *, final: bool) -> None:
        """A worker failed.

        Args:
            group: its group.
            message: one line.
            final: it would only come again, so no attempt follows. So would one before the first
                steps, whatever it is.
        """
        if self._is_past(group):
            return
        if final or not self._made_steps:
            self._final_faults.append(message)
        if not self._fault_told:
            self._tell_fault(message)

    def lost_peer(self, group: int) -> None:
        """A worker lost the connection to another one."""
        if not self._is_past(group) and not self._fault_told:
            self._tell_fault("a worker was lost")

    def final_faults(self) -> list[str]:
        """The faults after which no attempt makes sense, one for each worker that told one."""
        return self._final_faults

    def _is_past(self, group: int) -> bool:
        """Whether a later group than this has begun."""
        return self._groups_begun > group + 1

    def _tell_fault(self, message: str) -> None:
        self._fault_told = True
        self._messages.append(Message("fault", (message,)))


def mailbox_beside_me(earlier_seconds: float, recorded_steps: int) -> Any:
    """A Mailbox on this machine, so that its clock is the driver's."""
    here = ray.get_runtime_context().get_node_id()
    node = NodeAffinitySchedulingStrategy(here, soft=False)
    make: Callable[..., Any] = Mailbox.options(scheduling_strategy=node).remote  # type: ignore[attr-defined]
    return make(earlier_seconds, recorded_steps)
