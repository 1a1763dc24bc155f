"""One group of workers after another, until a run is done.

Each group is a run of Ray Train's with a fixed number of workers. Ray Train can also resize a group
itself; but it takes no checkpoint before, counts lost and draining machines as room for up to 20 s,
and waits for the end of a drain notice. Here a group hands over with a checkpoint, and the next one
is as large as the live machines allow at that moment.

With ``faults.standby`` a group of the same size is started beside the running one, as soon as that
makes steps. Its workers do all that needs no turn (processes, imports, process group), then wait.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.train
from ray.autoscaler.sdk import request_resources
from ray.train.torch import TorchTrainer

from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import Placement
from raytrain.orchestrate.gate import gate_beside_me
from raytrain.orchestrate.keeper import keeper_beside_me
from raytrain.orchestrate.ray_private import draining_nodes
from raytrain.orchestrate.validate import last_line
from raytrain.recipe.types import Faults
from raytrain.run.checkpoint import Checkpoint, Packed
from raytrain.session import Session

LOOK_SECONDS = 1.0
"""Time between two looks at the cluster's machines."""
_ASK_SECONDS = 5.0  # as often as Ray's autoscaler looks
_POLL_SECONDS = 0.2
_GIVE_UP_SECONDS = 30  # for workers that stood by to end; those that came later have no slots then
_SETTINGS = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a lost worker is seen after as long
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # then a smaller group is tried
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # Watch does that, and doesn't wait
}


@dataclass(frozen=True)
class Turn:
    """When a group's workers may go on.

    Attributes:
        number: of the group, the driver's.
        gate: where they wait, with all done that can be done before; None: it is their turn.
    """

    number: int
    gate: Any = None


class Groups:
    """Runs groups of workers until one ends the run.

    Args:
        session: the run.
        placement: how many workers there may be.
        mailbox: what they tell.
        trainer: makes Ray Train's trainer for a number of workers and their turn.
    """

    def __init__(
        self,
        session: Session,
        placement: Placement,
        mailbox: Any,
        trainer: Callable[[int, Turn], TorchTrainer],
    ) -> None:
        self._session = session
        self._placement = placement
        self._mailbox = mailbox
        self._trainer = trainer
        self._faults: Faults = session.job.recipe.faults
        keeps = session.job.recipe.checkpoint.memory_steps is not None
        self.keeper = keeper_beside_me() if keeps else None
        self._gate = gate_beside_me(0) if self._faults.standby else None
        self._numbers = itertools.count()
        self._reserve: _Group | None = None
        self._steps_made = threading.Event()
        self.workers = 0
        """Workers that the group under way is to have; of replicas, fewer may be there."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)

    def hear(self, kind: str) -> None:
        """Take note of a message of the workers."""
        if kind == "metrics":
            self._steps_made.set()

    def run(self) -> None:
        """Run groups until the run is done, or the driver asked to stop.

        Raises:
            RaytrainError: a fault that would only come again, more restarts than may be, or too
                few machines for too long.
        """
        restarts, waiting_since = 0, time.monotonic()
        num_steps = self._session.job.plan.num_steps
        with _asking_for(self._placement), self._none_left_standing_by():
            while (workers := self._wait_for_room(waiting_since)) > 0:
                failure = self._run_group(workers)
                entered, over = ray.get(
                    self._mailbox.ended.remote(num_steps, failed=failure is not None)
                )
                if entered:
                    waiting_since = time.monotonic()
                if failure is None and over:
                    return
                if failure is None:
                    continue  # handed over
                self._save_kept()
                if not entered and isinstance(failure, ray.train.ControllerError):
                    self._session.say(f"no group: {_told_by_ray(failure)}; trying again")
                    continue  # machines that aren't there after all; bounded by the wait for room
                restarts += 1
                if restarts > self._faults.max_restarts:
                    raise RaytrainError(_told_by_ray(failure)) from failure

    def _run_group(self, workers: int) -> ray.train.TrainingFailedError | None:
        self._steps_made.clear()
        self.workers = workers
        reserve = self._take_reserve(workers)
        turn = reserve.turn if reserve else Turn(next(self._numbers))
        ray.get(self._mailbox.open.remote(turn.number))
        if turn.gate is not None:
            ray.get(turn.gate.open.remote(turn.number + 1))
        group = reserve or self._start(workers, turn)
        if self._gate is not None:
            while group.is_running and not self._steps_made.wait(_POLL_SECONDS):
                pass
            if group.is_running:
                self._reserve = self._start(workers, Turn(next(self._numbers), self._gate))
        failure = group.failure()
        if faults := ray.get(self._mailbox.final_faults.remote()):
            raise RaytrainError(faults[0])
        return failure

    def _save_kept(self) -> None:
        """Make a checkpoint of the state in memory, where it is of use; without it a run goes on.

        Where the storage or the process that holds the state is away, the user is told.
        """
        if self.keeper is None:
            return
        recorded = ray.get(self._mailbox.recorded_steps.remote())
        try:
            checkpoint = self._write_kept(self.keeper, recorded)
        except (RaytrainError, OSError, ray.exceptions.RayError) as error:
            self._session.say(
                f"warning: the copy of the state in memory is lost: {last_line(error)}"
            )
            return
        if checkpoint is not None:
            ray.get(self._mailbox.saved.remote(asdict(checkpoint)))

    def _write_kept(self, keeper: Any, recorded: int) -> Checkpoint | None:
        """Write it where it is newer than all on the storage, and the record reaches it."""
        step = ray.get(keeper.step.remote())
        if not 0 < step <= recorded:
            return None
        checkpoints = self._session.job.checkpoints
        newest = checkpoints.newest(self._session.say)
        if newest is not None and newest.step >= step:
            return None
        kept = ray.get(keeper.kept.remote())
        return checkpoints.write_copy(Packed(*kept)) if kept else None

    def _start(self, workers: int, turn: Turn) -> _Group:
        return _Group(workers, turn, self._trainer(workers, turn))

    def _take_reserve(self, workers: int) -> _Group | None:
        """The group that stands by, if it is what is needed now; it is given up if not."""
        if (reserve := self._reserve) is None:
            return None
        nodes = ray.get(self._mailbox.standing_by.remote(reserve.turn.number))
        fits = reserve.workers == workers and not set(nodes) & set(draining_nodes())
        if fits and reserve.is_running:
            self._reserve = None
            return reserve
        self._give_up_reserve()
        return None

    def _give_up_reserve(self) -> None:
        """Let the group that stands by end; its slots are free then."""
        reserve, self._reserve = self._reserve, None
        if reserve is None:
            return
        if not reserve.is_running and (failure := reserve.failure()) is not None:
            self._session.say(f"no workers stood by: {_told_by_ray(failure)}")
            return
        ray.get(self._mailbox.open.remote(None))
        ray.get(reserve.turn.gate.open.remote(reserve.turn.number + 1))
        reserve.wait(_GIVE_UP_SECONDS)

    @contextmanager
    def _none_left_standing_by(self) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone, and they with it
                self._give_up_reserve()

    def _wait_for_room(self, since: float) -> int:
        """Workers that the next group can have; 0: the run is to stop."""
        fewest, most = self._placement.workers
        told = False
        while not self._session.should_stop:
            room = room_for_workers(self._placement)
            if time.monotonic() - since > self._faults.wait_s:
                raise RaytrainError(
                    f"no group of at least {fewest} workers has started for "
                    f"{self._faults.wait_s:.0f} s (faults.wait_s), and the cluster has room for "
                    f"{room}; add machines, and the same command goes on from the newest checkpoint"
                )
            if room >= fewest:
                return min(room, most)
            if not told:
                self._session.say(f"waiting for machines: room for {room} of {fewest} workers")
                told = True
            time.sleep(LOOK_SECONDS)
        return 0


class _Group:
    """A run of Ray Train's, in a thread of its own.

    Args:
        workers: how many it has.
        turn: when they may go on.
        trainer: what runs them.
    """

    def __init__(self, workers: int, turn: Turn, trainer: TorchTrainer) -> None:
        self.workers = workers
        self.turn = turn
        self._trainer = trainer
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="raytrain-group", daemon=True)
        self._thread.start()

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error  # told by failure()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        """Wait for its end, so long at most."""
        self._thread.join(seconds)

    def failure(self) -> ray.train.TrainingFailedError | None:
        """Wait for its end; gives what it failed of, if it did."""
        self.wait()
        if self._error is None or isinstance(self._error, ray.train.TrainingFailedError):
            return self._error
        raise self._error


class Watch:
    """Looks at the machines while a group runs, and asks it to hand over where that helps.

    Args:
        session: the run.
        placement: how many workers there may be.
        mailbox: what the workers tell.
        groups: runs the group.
    """

    def __init__(
        self, session: Session, placement: Placement, mailbox: Any, groups: Groups
    ) -> None:
        self._session = session
        self._groups = groups
        self._placement = placement
        self._mailbox = mailbox
        self._resize = session.job.recipe.resize
        self._next_look = 0.0
        self._room_seen = (0, 0.0)
        self._handing_over = False
        self._stepped_at: float | None = None
        self._paused_since: float | None = None
        self._resumed_at = time.monotonic()
        self._pause: float | None = None

    def hear(self, kind: str) -> None:
        """Take note of a message of the workers; how long they pause is measured with it."""
        now = time.monotonic()
        if kind == "begin":
            self._handing_over, self._paused_since = False, self._stepped_at
        elif kind == "metrics":
            if self._paused_since is not None:
                self._pause, self._paused_since = now - self._paused_since, None
                self._resumed_at = now
            self._stepped_at = now

    def look(self) -> None:
        """Look at the machines, once a second."""
        now = time.monotonic()
        if now < self._next_look or self._handing_over or not self._session.world_size:
            return
        self._next_look = now + LOOK_SECONDS
        leaving = draining_nodes()
        if leaving and (here := set(leaving) & set(ray.get(self._mailbox.nodes.remote()))):
            names = ", ".join(sorted(node[:8] for node in here))
            self._hand_over(f"machine {names} is about to leave the cluster")
        elif self._placement.elastic:
            self._look_for_more(now)

    def _look_for_more(self, now: float) -> None:
        room = min(room_for_workers(self._placement), self._placement.workers[1])
        if room != self._room_seen[0]:
            self._room_seen = (room, now)
        if self._paused_since is not None:
            return
        settled = now - self._room_seen[1] >= self._resize.settle_s
        rested = now - self._resumed_at >= self._resize.rest_s
        workers = self._groups.workers
        if not (settled and rested and room > workers):
            return
        gain = seconds_saved(self._session.seconds_left, workers, room)
        if gain >= self._resize.min_gain * self.pause:
            self._hand_over(
                f"room for {room} workers saves about {gain:.0f} s, a restart costs about "
                f"{self.pause:.0f} s"
            )

    @property
    def pause(self) -> float:
        """Seconds without a step that a new group costs: as measured, or before that the start."""
        return self._session.startup_seconds if self._pause is None else self._pause

    def _hand_over(self, reason: str) -> None:
        self._handing_over = True
        self._session.hand_over(reason)
        self._mailbox.hand_over.remote()


def seconds_saved(seconds_left: float | None, workers: int, room: int) -> float:
    """How much sooner a run ends with more workers, where twice as many are twice as fast.

    Args:
        seconds_left: with the workers that it has; None: not known yet, so nothing is saved.
        workers: how many those are.
        room: how many there could be.
    """
    return 0.0 if seconds_left is None else seconds_left * (1 - workers / room)


def room_for_workers(placement: Placement) -> int:
    """Workers that the machines which are alive and stay have slots for."""
    leaving = draining_nodes()
    unit = "GPU" if placement.use_gpu else "CPU"
    stay = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in leaving]
    slots = sum(int(node["Resources"].get(unit, 0)) for node in stay)
    return slots - placement.validator_gpu


@contextmanager
def _asking_for(placement: Placement) -> Iterator[None]:
    """Inside, a cluster that can grow is asked for the most workers that the run can use.

    A cluster keeps the last request only, whoever made it, and Ray Data and Ray Train make one
    every 20 s for what runs: so this one is made again and again.
    """
    if not placement.elastic:
        yield
        return
    unit = "GPU" if placement.use_gpu else "CPU"
    bundles = [{unit: 1}] * (placement.workers[1] + placement.validator_gpu)
    over = threading.Event()

    def ask() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone; the run tells of it
            request_resources(bundles=bundles)
            while not over.wait(_ASK_SECONDS):
                request_resources(bundles=bundles)

    asking = threading.Thread(target=ask, name="raytrain-ask", daemon=True)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join(_GIVE_UP_SECONDS)
        with contextlib.suppress(ray.exceptions.RayError):
            request_resources(bundles=[])


def _told_by_ray(error: ray.train.TrainingFailedError) -> str:
    failures = getattr(error, "worker_failures", None)
    cause = next(iter(failures.values())) if failures else error
    return f"training failed: {type(cause).__name__}: {last_line(cause)}; --verbose shows more"
