"""A run seen from its driver: the run directory, the display, the target. No Ray.

Engines (``inline``, ``orchestrate.launch``) run the workers and tell a Session what they hear.
"""

from __future__ import annotations

import fcntl
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO

import torch

from raytrain.errors import RaytrainError
from raytrain.recipe.load import dump_recipe, load_recipe, recipe_differences
from raytrain.run.checkpoint import Checkpoint
from raytrain.run.format import goal
from raytrain.run.history import EVENTS, METRICS, RECIPE, read_history, read_jsonl
from raytrain.run.progress import Progress, closing
from raytrain.run.record import RunRecord, git_commit, package_versions
from raytrain.run.rows import (
    DataSource,
    Hardware,
    RunFacts,
    Status,
    StepRow,
    Summary,
    ValidationRow,
    first_at_target,
    meets,
)
from raytrain.train import Clock, Job, target_of

FINISHED: tuple[Status, ...] = ("target_reached", "target_missed", "completed")
_MAY_CHANGE = ("input.cache", "input.damaged", "input.decoders")  # how images are read, not which
MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run_dir: everything that the run left.
        summary: what summary.json holds.
        was_finished: whether an earlier command had finished the run, so that this one did
            nothing.
    """

    run_dir: Path
    summary: Summary
    was_finished: bool = False

    @property
    def exit_status(self) -> int:
        """0: what was asked happened; 3: finished below the target; 1: anything else."""
        return {"target_reached": 0, "completed": 0, "target_missed": 3}.get(self.summary.status, 1)


class Session:
    """One command's part of a run: from its start, or from where an earlier command left it.

    It holds the run directory for itself until ``run`` returns.

    Args:
        job: the run.
        hardware: what the workers run on.
        price_per_hour: of all of it, in USD, where known.

    Raises:
        RaytrainError: the directory holds a run of another recipe or other data, or is in use.
    """

    def __init__(self, job: Job, hardware: Hardware, price_per_hour: float | None) -> None:
        self.job = job
        self._began = time.perf_counter()
        self._startup_seconds: float | None = None
        self._target = target_of(job.recipe)
        self._facts = RunFacts(
            model=_name_of(job),
            data=DataSource(
                uri=job.shards.uri,
                fingerprint=job.shards.fingerprint,
                num_classes=len(job.shards.classes),
            ),
            total_steps=job.plan.num_steps,
            hardware=hardware,
            versions=package_versions(torch.version.cuda if hardware.gpus else None),
            target=self._target,
            validation_clock=job.recipe.validation.clock,
            git_commit=git_commit(Path.cwd()),
            price_per_hour=price_per_hour,
        )
        self._lock = _lock(job.run_dir)
        self._record = RunRecord(job.run_dir)
        self.recorded_steps = _recorded_steps(job.run_dir)
        self._progress = Progress(job.plan)
        self._interruption = Interruption(self._progress.say)
        self.earlier_seconds = self._record.last_seconds()
        self._clock: Clock | None = None
        self._world_size = 0
        self._steps_done = 0
        job.checkpoints.set_aside_after(self.recorded_steps, self.warn)
        before = _validations_before(job.run_dir)
        self._best = max((row.counted("top1") for row in before), default=-1.0)
        self.target_row = first_at_target(self._target, before)

    def run(self, engine: Callable[[], None]) -> Result:
        """Run the workers to their end, show the progress, and write the summary.

        The first Ctrl-C (or SIGTERM) asks the workers to stop after a checkpoint, the second
        stops at once.

        Args:
            engine: runs the workers; returns when they have ended.

        Raises:
            RaytrainError: the run failed or was interrupted; the summary says so too.
        """
        try:
            with self._progress, self._interruption:
                if not self.reached_target:
                    engine()
                if self.is_interrupted:
                    raise KeyboardInterrupt
                return self._finish()
        except KeyboardInterrupt as error:
            step, steps = self._steps_done, self.job.plan.num_steps
            reason = f"interrupted at step {step:,} of {steps:,}"
            self._fail("interrupted", reason)
            raise RaytrainError(
                f"{reason}; the same command goes on from the newest checkpoint"
            ) from error
        except Exception as error:
            self._fail("failed", str(error))
            raise
        finally:
            self._lock.close()

    @property
    def reached_target(self) -> bool:
        return self.target_row is not None

    @property
    def should_stop(self) -> bool:
        """Whether the workers should stop where they are."""
        return self.reached_target or self._interruption.asked

    @property
    def is_interrupted(self) -> bool:
        """Whether the user asked to stop before all was done."""
        complete = self.reached_target or self._steps_done == self.job.plan.num_steps
        return self._interruption.asked and not complete

    def begin(self, start: int, world_size: int, seconds: float) -> None:
        """The workers are about to make step ``start``: at first, or again after a fault.

        Args:
            start: steps done.
            world_size: number of workers.
            seconds: training clock now.
        """
        if self._clock is None:
            self._startup_seconds = time.perf_counter() - self._began
            self._record.recipe(dump_recipe(self.job.recipe))
            event = self._record.start(self._facts, step=start)
        else:
            lost = self._record.rewind(start)
            event = self._record.event(
                "recovery", step=start, seconds=seconds, world_size=world_size, rows_dropped=lost
            )
        self._progress.event(event)
        if self._world_size not in (0, world_size):
            self.event("resize", start, seconds, world_size=world_size)
        self._world_size, self._steps_done = world_size, start
        self._clock = Clock(seconds)

    def seconds(self) -> float:
        """The training clock."""
        return self._clock.seconds() if self._clock else self.earlier_seconds

    def metrics(self, rows: list[StepRow]) -> None:
        """Steps were made."""
        self._record.metrics(rows)
        self._progress.steps(rows)
        self._steps_done = rows[-1].step + 1

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint was written."""
        self.event("checkpoint", checkpoint.step, checkpoint.seconds)

    def validation(self, row: ValidationRow) -> None:
        """A checkpoint was validated: keep the best weights, and see whether it is at the target.

        The checkpoint stops being due only after its row is written down.
        """
        checkpoint = self.job.checkpoints.at(row.step)
        self._record.validation(row)
        self._progress.validation(row)
        if row.counted("top1") > self._best:
            self._best = row.counted("top1")
            checkpoint.export_model(self.job.run_dir / MODEL_FILE)
        checkpoint.validated()
        if self.target_row is None and meets(self._target, row):
            self.target_row = row
            self.event(
                "target", row.step, row.seconds, top1=row.counted("top1"), top5=row.counted("top5")
            )

    def event(self, kind: str, step: int, seconds: float, **detail: object) -> None:
        """Anything else that a reader of the run should know."""
        self._progress.event(self._record.event(kind, step=step, seconds=seconds, **detail))

    def warn(self, message: str) -> None:
        """Something that a user should read now."""
        self._progress.say(f"warning: {message}")

    def fault(self, reason: str) -> None:
        """Something failed, and the workers start again or give up."""
        if self._clock is not None:
            self.event("fault", self._steps_done, self.seconds(), reason=reason)

    def _finish(self) -> Result:
        epochs = self.job.plan.num_epochs
        if self.target_row is not None:
            reason = f"{goal(self._target)} at epoch {self.target_row.epoch:g} of {epochs}"
            return self._end("target_reached", reason)
        if self._target:
            reason = f"all {epochs} epochs ran without {goal(self._target)}"
            return self._end("target_missed", reason)
        return self._end("completed", f"all {epochs} epochs ran")

    def _fail(self, status: Status, reason: str) -> None:
        """The run ended early; leave a summary of what there is, if it had begun."""
        if self._clock is not None:
            with suppress(RaytrainError):  # a full disk, say: the reason is what a user must read
                self._end(status, reason)

    def _end(self, status: Status, reason: str) -> Result:
        summary = self._record.finish(
            status, reason, seconds=self.seconds(), startup_seconds=self._startup_seconds
        )
        return Result(self.job.run_dir, summary)


class Interruption:
    """Takes the first SIGINT or SIGTERM as a wish and the second as an order.

    Use it as a context. In another thread than the main one it does nothing: signals don't go
    there.

    Args:
        say: tells the user a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("stopping after a checkpoint; once more to stop at once")


def finished_before(job: Job) -> Result | None:
    """The result of a run that this directory already holds to its end; None where it doesn't.

    Raises:
        RaytrainError: the directory holds a run of another recipe or of other data.
    """
    run_dir = job.run_dir
    if not (run_dir / EVENTS).exists():
        return None
    changes = recipe_differences(load_recipe(run_dir / RECIPE), job.recipe)
    if changed := [c for c in changes if not c.startswith(_MAY_CHANGE)]:
        raise RaytrainError(
            f"{run_dir} holds a run of another recipe ({'; '.join(changed)}); "
            "undo the change or choose another --run-dir"
        )
    history = read_history(run_dir)
    facts = history.facts
    if facts is not None and facts.data.fingerprint != job.shards.fingerprint:
        raise RaytrainError(
            f"{run_dir} holds a run on other data ({facts.data.uri}, fingerprint "
            f"{facts.data.fingerprint[:12]}, not {job.shards.fingerprint[:12]}); "
            "give that ShardSet or choose another --run-dir"
        )
    if history.summary is not None and history.summary.status in FINISHED:
        return Result(run_dir, history.summary, was_finished=True)
    return None


def tell(result: Result) -> str:
    """The closing lines of a run for a person."""
    lines = closing(result.summary, result.run_dir)
    return f"this run was finished before; nothing to do\n{lines}" if result.was_finished else lines


def _validations_before(run_dir: Path) -> Sequence[ValidationRow]:
    return read_history(run_dir).validations if (run_dir / EVENTS).exists() else []


def _recorded_steps(run_dir: Path) -> int:
    rows = read_jsonl(run_dir / METRICS)
    return int(rows[-1]["step"]) + 1 if rows else 0


def _name_of(job: Job) -> str:
    maker = job.parts.model
    if maker is None:
        return job.recipe.model.name
    return f"{maker.__module__}:{getattr(maker, '__qualname__', type(maker).__name__)}"


def _lock(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise RaytrainError(
            f"cannot write {run_dir}: {error.strerror}; choose another --run-dir"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RaytrainError(
            f"{run_dir} is in use by another raytrain; wait for it or choose another --run-dir"
        ) from error
    return lock
