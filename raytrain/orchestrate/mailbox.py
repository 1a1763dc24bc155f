"""What workers tell the driver, and the little that it tells them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_WITHOUT_A_WORD = "the workers ended without a word (killed, or a lost machine)"
_PARTS = ("stopped", "opened", "entered", "begun", "stepped")  # of a restart, in their order


_MOST_IN_PLACE = 30  # faults, or formings of the team, without a step that was told


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
        most_restarts: None where the driver counts restarts. Else a group's workers go on without
            those that are lost, whose successors join the same group, and what is counted here is
            restarts from a checkpoint within a group, when all of it was lost.
    """

    def __init__(
        self, earlier_seconds: float, recorded_steps: int, most_restarts: int | None = None
    ) -> None:
        self._regroups = most_restarts is not None
        self._restarts_left = most_restarts or 0
        self._formed_in_place = self._faults_in_place = 0
        self._groups_opened = self._world_size = 0
        self._open_group: int | None = None
        self._standing_by: dict[int, list[str]] = {}
        self._recorded_steps = recorded_steps
        self._groups_begun = 0
        self._messages: list[Message] = []
        self._clock_zero: float | None = None
        self._earlier_seconds = earlier_seconds
        self._stop = False
        self._handing_over = False
        self._nodes: list[str] = []
        self._times: dict[str, float] = {}
        self._final_faults: list[str] = []
        self._made_steps = False
        self._fault_told = False

    def open(self, number: int | None) -> None:
        """The driver's group of this number may enter, and no other; None: none may."""
        self._open_group = number
        self._handing_over, self._nodes = False, []
        self._groups_opened += 1
        self._times["opened"] = time.monotonic()

    def stand_by(self, number: int, node: str, world_size: int) -> None:
        """A worker of a group that waits for its turn has started.

        Args:
            number: of the group, the driver's.
            node: ID of its machine in Ray.
            world_size: workers of the group.
        """
        nodes = self._standing_by.setdefault(number, [])
        nodes.append(node)
        if len(nodes) == world_size:
            self._messages.append(Message("standing_by", (world_size,)))

    def standing_by(self, number: int) -> list[str]:
        """IDs of the machines with workers of a group that waits for its turn."""
        return self._standing_by.get(number, [])

    def enter(self, number: int, node: str, rank: int, pid: int, machine: str) -> int | None:
        """A worker may go on; gives its group's number among those that begun, or None: it isn't
        wanted, or all is done.

        All of a group's workers enter before its rank 0 begins, but those that take the place of
        one that was lost.

        Args:
            number: of its group, the driver's.
            node: ID of its machine in Ray.
            rank: its place among the workers.
            pid: its process.
            machine: name of its machine.
        """
        if number != self._open_group:
            return None
        self._nodes.append(node)
        self._times["entered"] = time.monotonic()
        if self._stop or self._final_faults:
            return None
        self._messages.append(Message("worker", (rank, pid, machine)))
        return self._groups_opened - 1 if self._regroups else self._groups_begun

    def begin(self, group: int, start: int, world_size: int) -> float:
        """Rank 0 of a group is about to make step ``start``; gives the training clock."""
        again = self._regroups and self._groups_begun > group
        self._groups_begun = max(self._groups_begun, group + 1)
        if self._clock_zero is None:
            self._clock_zero = time.monotonic() - self._earlier_seconds
        elif again and world_size < self._world_size and not self._fault_told:
            self._tell_fault("a worker was lost without a word; the others went on")
        elif not again and not self._fault_told:
            self._tell_fault(_WITHOUT_A_WORD)
        if self._regroups:
            self._count(start)
        self._fault_told, self._world_size = False, world_size
        self._recorded_steps = min(self._recorded_steps, start)
        self._times["begun"] = time.monotonic()
        seconds = time.monotonic() - self._clock_zero
        kind = "regroup" if again else "begin"
        self._messages.append(Message(kind, (start, world_size, seconds)))
        return seconds

    def put(self, group: int, kind: str, *args: Any) -> bool:
        """Leave a message; gives whether the group should stop."""
        if self._is_past(group):
            return True
        self._messages.append(Message(kind, args))
        if kind == "metrics":
            self._made_steps = True
            self._formed_in_place = self._faults_in_place = 0
            self._end_restart()
            self._recorded_steps = args[0][-1].step + 1
        return self._stop or self._handing_over or (self._regroups and bool(self._final_faults))

    def saved(self, checkpoint: dict[str, Any]) -> None:
        """The driver has written a checkpoint of what workers that are gone had told.

        Args:
            checkpoint: fields of a Checkpoint.
        """
        self._messages.append(Message("checkpoint", (checkpoint,)))

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

    def hand_over(self) -> None:
        """Ask the workers to stop after a checkpoint at that exchange, for others to go on."""
        self._handing_over = self._fault_told = True
        self._times = {"stopped": time.monotonic()}

    def nodes(self) -> list[str]:
        """IDs of the machines that the group's workers run on."""
        return self._nodes

    def ended(self, num_steps: int, *, failed: bool) -> tuple[bool, bool]:
        """Whether the group that has ended had started, and whether the run is over.

        Args:
            num_steps: of the whole run.
            failed: whether workers were lost.
        """
        if failed and self._made_steps and self._nodes and not self._fault_told:
            self._tell_fault(_WITHOUT_A_WORD)
        done = self._stop or not self._handing_over or self._recorded_steps >= num_steps
        return bool(self._nodes), done

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
        self._faults_in_place += 1
        stuck = self._regroups and self._faults_in_place > _MOST_IN_PLACE
        if final or stuck or not self._made_steps:
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

    def _count(self, start: int) -> None:
        """End the run where forming a group anew leads nowhere."""
        self._formed_in_place += 1
        if start < self._recorded_steps - 1:  # one step less: a lost worker alone had made it
            self._restarts_left -= 1
        if self._restarts_left < 0 or self._formed_in_place > _MOST_IN_PLACE:
            self._final_faults.append(
                f"workers are lost again and again at step {start}; --verbose shows their logs"
            )

    def _is_past(self, group: int) -> bool:
        """Whether a later group than this has begun."""
        return self._groups_begun > group + 1

    def _tell_fault(self, message: str) -> None:
        self._fault_told = True
        if "opened" not in self._times:
            self._times["stopped"] = time.monotonic()
        self._messages.append(Message("fault", (message,)))

    def _end_restart(self) -> None:
        """Tell what a restart took, part by part, once its first steps are made."""
        now = time.monotonic()
        if all(name in self._times for name in _PARTS[:-1]):
            times = [self._times[name] for name in _PARTS[:-1]] + [now]
            parts = {f"{n}_s": b - a for n, a, b in zip(_PARTS[1:], times, times[1:], strict=False)}
            self._messages.append(Message("restarted", (parts,)))
        self._times = {"stopped": now}  # should all end without a word from here on


def mailbox_beside_me(
    earlier_seconds: float, recorded_steps: int, most_restarts: int | None
) -> Any:
    """A Mailbox on this machine, so that its clock is the driver's."""
    here = ray.get_runtime_context().get_node_id()
    node = NodeAffinitySchedulingStrategy(here, soft=False)
    make: Callable[..., Any] = Mailbox.options(scheduling_strategy=node).remote  # type: ignore[attr-defined]
    return make(earlier_seconds, recorded_steps, most_restarts)
