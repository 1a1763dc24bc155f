"""A trial: a training run like any other, with a directory of its own, that waits to be told on.

One worker trains in the actor itself, so that the next trial finds torch imported and the data
open. Several workers are Ray Train's, and the actor is their driver.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ray import tune

from raytrain.errors import RaytrainError, describe_bug

if TYPE_CHECKING:
    from raytrain.data.shards import ShardSet
    from raytrain.orchestrate.cluster import Placement
    from raytrain.run.rows import ValidationRow
    from raytrain.train import Job


@dataclass(frozen=True)
class Common:
    """What all trials of a sweep share.

    Attributes:
        shards: the data.
        folder: whose folders ``007`` are the runs of the trials.
        placement: of a trial; None: one worker, in the actor.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: of torch and for decoding, for a worker in the actor.
        path: where the user's own modules are found.
    """

    shards: ShardSet
    folder: Path
    placement: Placement | None
    device: str
    threads: int
    path: list[str]

    def run_dir(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.folder / f"{number:03d}"


class TrialActor(tune.Trainable):
    """Ray Tune's way to runs, one after another in one process.

    A ``step`` lasts until the next validation, or to the end. Nothing is saved for Ray Tune: a
    run's own checkpoints are what it goes on from.
    """

    def setup(self, config: dict[str, Any], common: Common) -> None:  # type: ignore[override]
        self._common = common
        sys.path.extend(p for p in common.path if p not in sys.path)
        self._results = self._run(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._results.close()
        self._results = self._run(new_config)
        return True

    def step(self) -> dict[str, Any]:
        return next(self._results)

    def cleanup(self) -> None:
        self._results.close()

    def _run(self, config: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The results of a run; closing it stops the run."""
        from raytrain.train import Job  # noqa: PLC0415 (torch; the driver needn't have it)

        run_dir = self._common.run_dir(config["trial"])
        job = Job(config["recipe"], self._common.shards, run_dir)
        for row in told_before(job):
            if row["samples"] > config["samples"]:
                yield row
        run = _Run(job, self._common)
        try:
            yield from run.results()
        finally:
            run.stop()


class _Run:
    """A run in a thread of its own, which waits after each validation until it is told on.

    Args:
        job: what to train.
        common: where and with what.
    """

    def __init__(self, job: Job, common: Common) -> None:
        self._job = job
        self._common = common
        self._rows: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._answers: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._train, name="raytrain-trial", daemon=True)

    def results(self) -> Iterator[dict[str, Any]]:
        """A dict a validation, and one at the end that also has status and reason."""
        self._thread.start()
        row = self._rows.get()
        while "status" not in row:
            yield row
            self._answers.put(None)
            row = self._rows.get()
        self._thread.join()
        yield row

    def stop(self) -> None:
        """End the run where it waits, or at its next validation; returns when it has ended."""
        if self._thread.is_alive():
            self._answers.put("the sweep stopped it")
            self._thread.join()

    def _watch(self, row: ValidationRow) -> str | None:
        self._rows.put(as_result(self._job, row))
        return self._answers.get()

    def _train(self) -> None:
        from raytrain.run.meter import DIVERGED  # noqa: PLC0415 (torch)

        try:
            reason = self._trained()
            end = {"status": "finished", "reason": reason}
        except RaytrainError as error:
            status = "diverged" if DIVERGED in str(error) else "failed"
            end = {"status": status, "reason": str(error)}
        except Exception as error:
            end = {"status": "failed", "reason": describe_bug(error)}
        self._rows.put({**end, "done": True})

    def _trained(self) -> str:
        import torch  # noqa: PLC0415

        from raytrain.inline import run_inline  # noqa: PLC0415
        from raytrain.session import finished_before  # noqa: PLC0415

        finished = finished_before(self._job)
        if finished is not None:
            return finished.summary.reason
        if self._common.placement is None:
            torch.set_num_threads(self._common.threads)
            alone = run_inline(self._job, self._common.device, None, watch=self._watch)
            return alone.summary.reason
        from raytrain.orchestrate.launch import run_placed  # noqa: PLC0415

        return run_placed(self._job, self._common.placement, None, watch=self._watch).summary.reason


def as_result(job: Job, row: ValidationRow) -> dict[str, Any]:
    """A validation as the sweep is told of it."""
    return {
        "samples": job.plan.samples_before(row.step),
        "epoch": row.epoch,
        "top1": row.counted("top1"),
        "top5": row.counted("top5"),
        "loss": row.loss,
        "seconds": row.seconds,
    }


def told_before(job: Job) -> list[dict[str, Any]]:
    """The validations that an earlier command left in the run's record."""
    from raytrain.run.history import EVENTS, read_history  # noqa: PLC0415

    if not (job.run_dir / EVENTS).exists():
        return []
    return [as_result(job, row) for row in read_history(job.run_dir).validations]


def cores_of(concurrent: int) -> int:
    """Threads for each of several trials on one machine."""
    return max(1, (os.cpu_count() or 1) // concurrent)
