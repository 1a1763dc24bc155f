"""Elastic steps on processes of this machine, without Ray: a Lighthouse, a driver, replicas."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raytrain.data.reader import Batch, TrainingImages, read_with_threads
from raytrain.data.shards import ShardSet
from raytrain.inline import local_hardware
from raytrain.parallel.replicas import ReplicaTeam, Waits
from raytrain.recipe.types import Recipe
from raytrain.run.checkpoint import Checkpoint, CheckpointFolder, Snapshot
from raytrain.run.rows import StepRow
from raytrain.session import Session
from raytrain.train import Clock, Job, Parts, train
from raytrain.world import World
from tests.workers import PLAIN


class Driver:
    """What the replicas tell, in a run's record; called from their processes."""

    def __init__(self, job: Job) -> None:
        self.session = Session(job, local_hardware("cpu"), None)
        self._lock = threading.Lock()
        self._clock: Clock | None = None
        self.steps = 0
        self.stop = False
        self.workers = 0
        self.formings: list[tuple[float, int, int]] = []
        self.told_at: list[tuple[float, int]] = []

    def recorded_steps(self) -> int:
        with self._lock:
            return self.steps

    def begin(self, start: int, world_size: int) -> float:
        with self._lock:
            first = self._clock is None
            self._clock = self._clock or Clock(self.session.earlier_seconds)
            tell = self.session.begin if first else self.session.regroup
            tell(start, world_size, self._clock.seconds())
            self.steps, self.workers = min(self.steps, start), world_size
            self.formings.append((time.monotonic(), start, world_size))
            return self._clock.seconds()

    def metrics(self, rows: list[StepRow]) -> bool:
        with self._lock:
            self.session.metrics(rows)
            self.steps = max(self.steps, rows[-1].step + 1)
            self.told_at.append((time.monotonic(), self.steps))
            return self.stop

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        with self._lock:
            self.session.checkpoint(checkpoint)


class _Server(BaseManager):
    """Serves the driver over a socket, which survives the death of a replica."""


@dataclass
class _Outside:
    """What the loop needs, over the socket."""

    driver: Any
    pause_s: float
    threads: int = 1

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        for batch in read_with_threads(images, images.units(start, most_images=1), 1):
            time.sleep(self.pause_s)
            yield batch

    def recorded_steps(self) -> int:
        return int(self.driver.recorded_steps())

    def begin(self, start: int, world_size: int) -> float:
        return float(self.driver.begin(start, world_size))

    def metrics(self, rows: list[StepRow]) -> bool:
        return bool(self.driver.metrics(rows))

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self.driver.checkpoint(checkpoint)

    def keep(self, snapshot: Snapshot) -> None:
        raise AssertionError(f"step {snapshot.step}: the others have the state")

    def checkpoint_failed(self, step: int, reason: str) -> None:
        if "left out" not in reason:  # one more is left out where this machine is busy
            raise AssertionError(f"step {step}: {reason}")

    def validation(self, row: object) -> bool:
        raise AssertionError("validation is beside the training")

    def say(self, message: str) -> None:
        pass


class Replicas:
    """A run with elastic steps, whose processes a test may kill, stop and start.

    Args:
        recipe: of the run.
        shards: the data.
        run_dir: of the run.
        parts: the model.
        pause_s: seconds that each batch takes longer than it must.
        hang_s: as in the recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        shards: Path,
        run_dir: Path,
        parts: Parts = PLAIN,
        pause_s: float = 0.0,
        hang_s: float = 5.0,
    ) -> None:
        from torchft.coordination import LighthouseServer

        self.job = replace(Job(recipe, ShardSet.open(shards), run_dir, parts), beside=True)
        self.driver = Driver(self.job)
        self._pause_s = pause_s
        self._waits = Waits(exchange_s=hang_s, quorum_s=60)
        self._lighthouse = LighthouseServer(bind="127.0.0.1:0", **self._waits.lighthouse(fewest=1))
        _Server.register("driver", callable=lambda: self.driver)
        self._key = os.urandom(8)
        self._server = _Server(("127.0.0.1", 0), self._key).get_server()
        threading.Thread(target=self._serve, daemon=True).start()
        self._processes = mp.get_context("forkserver")  # which imports torch once
        self._processes.set_forkserver_preload(["tests.replicas", "torchft", "torch._dynamo"])
        self.processes: dict[int, BaseProcess] = {}
        self.lost = 0
        self._slow: dict[int, float] = {}
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None

    def start(self, *ranks: int) -> None:
        """Start a process for each of the given seats."""
        lighthouse = self._lighthouse.address()
        for rank in ranks:
            setup = _Setup(rank, self._waits, self._pause_s, self._slow.pop(rank, 0.0))
            args = (setup, self.job, lighthouse, self._server.address, self._key)
            process = self._processes.Process(target=_replica, args=args, daemon=True)
            process.start()
            self.processes[rank] = process

    def slow_writer(self, rank: int, seconds: float) -> None:
        """Let the first process of a seat take longer over each checkpoint that is validated."""
        self._slow[rank] = seconds

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.processes[rank].join()

    def pid(self, rank: int) -> int | None:
        process = self.processes.get(rank)
        return process.pid if process is not None and process.exitcode is None else None

    def replace_lost(self) -> None:
        """Start a new process for each that ended badly, as Ray does, until the run is closed."""

        def watch() -> None:
            while not self._closing.wait(0.1):
                for rank, process in list(self.processes.items()):
                    if process.exitcode not in (None, 0):
                        self.lost += 1
                        self.start(rank)

        self._keeper = threading.Thread(target=watch, daemon=True)
        self._keeper.start()

    def wait_for(self, steps: int, workers: int | None = None, timeout: float = 120) -> None:
        """Until that many steps were told, and that many workers share a step."""
        deadline = time.monotonic() + timeout
        while self.driver.steps < steps or self.driver.workers != (workers or self.driver.workers):
            assert time.monotonic() < deadline, f"{self.driver.steps} steps, not {steps}"
            codes = {rank: p.exitcode for rank, p in self.processes.items()}
            assert None in codes.values(), f"all ended: {codes}"
            time.sleep(0.01)

    def finish(self, timeout: float = 120) -> None:
        """Until all processes have ended well."""
        deadline = time.monotonic() + timeout
        while codes := [c for c in map(self._exit, list(self.processes)) if c != 0]:
            assert time.monotonic() < deadline, f"exit codes {codes}"
            assert self._keeper is not None or None in codes, f"exit codes {codes}"
            time.sleep(0.05)

    def _serve(self) -> None:
        with suppress(SystemExit):  # its way of ending
            self._server.serve_forever()

    def _exit(self, rank: int) -> int | None:
        return self.processes[rank].exitcode

    def close(self) -> None:
        self._closing.set()
        if self._keeper is not None:
            self._keeper.join()
        for process in self.processes.values():
            process.kill()
            process.join()
        self._lighthouse.shutdown()
        self._server.stop_event.set()  # type: ignore[attr-defined]


@contextmanager
def replicas(*args: Any, **options: Any) -> Iterator[Replicas]:
    """Replicas that are gone at the end."""
    run = Replicas(*args, **options)
    try:
        yield run
    finally:
        run.close()


@dataclass(frozen=True)
class _Setup:
    """How one replica is to behave."""

    rank: int
    waits: Waits
    pause_s: float
    write_s: float


def _replica(setup: _Setup, job: Job, lighthouse: str, driver: Any, key: bytes) -> None:
    if setup.write_s:
        _write_slowly(setup.write_s)
    logging.disable()  # torchft tells of each lost peer at length
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHFT_LIGHTHOUSE": lighthouse,
    }
    _Server.register("driver")
    server = _Server(driver, key)
    server.connect()
    try:
        team = ReplicaTeam(World(rank=setup.rank, size=3), setup.waits)
        train(job, team, _Outside(server.driver(), setup.pause_s))  # type: ignore[attr-defined]
    except Exception:
        traceback.print_exc()
        raise


def _write_slowly(seconds: float) -> None:
    write = CheckpointFolder.write_copy

    def slow(self: CheckpointFolder, copied: Any) -> Checkpoint:
        if copied.validates:
            time.sleep(seconds)
        return write(self, copied)

    CheckpointFolder.write_copy = slow  # type: ignore[method-assign]
