"""A run seen from its driver: the run directory, the display, the target. No Ray.

Engines (``inline``, ``orchestrate.launch``) run the workers and tell a Session what they hear.
"""

from __future__ import annotations

import fcntl
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TextIO

import torch

from raytrain.errors import RaytrainError, describe_bug
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
from raytrain.run.startup import StartUp
from raytrain.train import Clock, Job, target_of

FINISHED: tuple[Status, ...] = ("target_reached", "target_missed", "completed")
_MAY_CHANGE = ("input.cache", "input.damaged", "input.decoders")  # how images are read, not which
_OWN = (".lock", ".ray_train", RECIPE, METRICS, "checkpoints", "tensorboard", "audit", "error.txt")
MODEL_FILE = "model.safetensors"

Watch = Callable[[ValidationRow], str | None]
"""Hears each validation once it is in the record; gives a reason to stop the run, or None."""


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
        startup: what the command has done so far.
        watch: hears each validation, and may stop the run.

    Raises:
        RaytrainError: the directory holds a run of another recipe or other data, or is in use.
    """

    def __init__(
        self,
        job: Job,
        hardware: Hardware,
        price_per_hour: float | None,
        startup: StartUp | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.job = job
        self._watch = watch
        self._stopped: str | None = None
        self._startup = startup or StartUp()
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
        self._progress = Progress(job.plan)
        self._record = RunRecord(job.run_dir, self._progress.say)
        self.recorded_steps = _recorded_steps(job.run_dir)
        self._interruption = Interruption(self._progress.say)
        self.earlier_seconds = self._record.last_seconds()
        self._clock: Clock | None = None
        self._begun_at: float | None = None
        self._exchange: dict[str, float] | None = None
        self._world_size = 0
        self._steps_done = 0
        self._group_size = 0
        self._checkpoints: set[int] = set()  # that were told, after so many steps
        self._validated: list[Checkpoint] = []  # which are marked as due still
        job.checkpoints.set_aside_after(self.recorded_steps, self.say)
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
        except RaytrainError as error:
            self._fail("failed", str(error))
            raise
        except Exception as error:
            self._fail("failed", describe_bug(error))
            trace = self.job.run_dir / "error.txt"
            with suppress(OSError):  # the error itself matters more
                trace.write_text(traceback.format_exc())
                error.add_note(str(trace))
            raise
        finally:
            self._lock.close()

    @property
    def reached_target(self) -> bool:
        return self.target_row is not None

    @property
    def world_size(self) -> int:
        """Workers of the group that runs, with those that are being replaced; 0 before it."""
        return self._group_size

    @property
    def startup_seconds(self) -> float:
        """From the command to the first step; 0 before it."""
        return self._startup_seconds or 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated time to the last step; None before there is something to go by."""
        return self._progress.seconds_left()

    @property
    def should_stop(self) -> bool:
        """Whether the workers should stop where they are."""
        return self.reached_target or self._interruption.asked or self._stopped is not None

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
            self._startup.ended("meeting")
            self._startup_seconds = self._startup.seconds
            self._record.recipe(dump_recipe(self.job.recipe))
            event = self._record.start(self._facts, step=start)
            self._begun_at = seconds
        else:
            lost = self._record.rewind(start)
            event = self._record.event(
                "recovery", step=start, seconds=seconds, world_size=world_size, rows_dropped=lost
            )
        self._progress.event(event)
        if self._world_size not in (0, world_size):
            self.event("resize", start, seconds, world_size=world_size)
        if self._exchange is not None:
            self.event("exchange", start, seconds, world_size=world_size, **self._exchange)
            self._exchange = None
        self._world_size, self._steps_done = world_size, start
        self._group_size = world_size
        self._checkpoints = {step for step in self._checkpoints if step <= start}
        self._clock = Clock(seconds)

    def worker(self, rank: int, pid: int, machine: str) -> None:
        """A worker's process has started, to train at once or to join."""
        self.event("worker", self._steps_done, self.seconds(), rank=rank, pid=pid, machine=machine)

    def regroup(self, start: int, world_size: int, seconds: float) -> None:
        """Other workers than before are about to make step ``start``, without a restart.

        Args:
            start: steps done. Fewer than were told, where the weights that they led to were lost.
            world_size: number of workers.
            seconds: training clock now.
        """
        if start < self._steps_done:
            lost = self._record.rewind(start)
            self._steps_done = start
            self._checkpoints = {step for step in self._checkpoints if step <= start}
            self.event("recovery", start, seconds, world_size=world_size, rows_dropped=lost)
        if world_size != self._world_size:
            self.event("resize", start, seconds, world_size=world_size)
        self._world_size = world_size
        self._group_size = max(self._group_size, world_size)

    def worker_is_up(self, age: float) -> None:
        """A worker of the first group begins its work, so many seconds after its process began."""
        if self._clock is None:
            self._startup.ended_as_two("controller", "workers", age)

    def exchange(self, megabytes: int, seconds: float, workers: int) -> None:
        """A group of workers has timed an all-reduce, and is about to begin."""
        milliseconds = round(1e3 * seconds, 2)
        self._exchange = {"megabytes": megabytes, "milliseconds": milliseconds}
        self.say(
            f"pre-flight: an all-reduce of {megabytes} MB over {workers} workers takes "
            f"{milliseconds:.1f} ms"
        )

    def _tell_startup(self, first: StepRow, seconds: float) -> None:
        """Of the first step and the `seconds` up to its end, on the training clock."""
        waited = min(first.data_wait_s, seconds)
        self._startup.parts |= {"first images": waited, "first step": seconds - waited}
        self.event("startup", first.step, first.seconds, parts=dict(self._startup.parts))
        self.say(str(self._startup))

    def seconds(self) -> float:
        """The training clock."""
        return self._clock.seconds() if self._clock else self.earlier_seconds

    def metrics(self, rows: list[StepRow]) -> None:
        """Steps were made; those that were told before come first, and are known."""
        new = [row for row in rows if row.step >= self._steps_done]
        if not new:
            return
        self._record.metrics(new)
        if self._begun_at is not None:
            self._tell_startup(new[0], new[0].seconds - self._begun_at)
            self._begun_at = None
        self._progress.steps(new)
        self._steps_done = new[-1].step + 1

    def checkpoint(self, checkpoint: Checkpoint) -> bool:
        """A checkpoint was written; gives whether that is news."""
        if checkpoint.step in self._checkpoints:
            return False
        self._checkpoints.add(checkpoint.step)
        self.event("checkpoint", checkpoint.step, checkpoint.seconds)
        return True

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """A checkpoint could not be written; training goes on."""
        self.event("checkpoint_failed", step, self.seconds(), reason=reason)

    def validation(self, row: ValidationRow) -> None:
        """A checkpoint was validated: keep the best weights, and see whether it is at the target.

        The checkpoint stops being due only after its row is written down. In line, there may be
        none: the storage didn't take it, and the user knows.
        """
        self._record.validation(row)
        self._progress.validation(row)
        if self.job.checkpoints.has(row.step):
            self._keep_best(row, self.job.checkpoints.at(row.step))
        if self.target_row is None and meets(self._target, row):
            self.target_row = row
            self.event(
                "target", row.step, row.seconds, top1=row.counted("top1"), top5=row.counted("top5")
            )
        if self._watch is not None and self._stopped is None:
            self._stopped = self._watch(row)

    def _keep_best(self, row: ValidationRow, checkpoint: Checkpoint) -> None:
        try:
            if row.counted("top1") > self._best:
                checkpoint.export_model(self.job.run_dir / MODEL_FILE)
                self._best = row.counted("top1")
            self._validated.append(checkpoint)
            while self._validated and self._record.is_written:
                self._validated[-1].validated()
                self._validated.pop()
        except OSError as error:
            self.say(f"warning: can't write {MODEL_FILE} of step {row.step}: {error.strerror}")

    def event(self, kind: str, step: int, seconds: float, **detail: object) -> None:
        """Anything else that a reader of the run should know."""
        self._progress.event(self._record.event(kind, step=step, seconds=seconds, **detail))

    def say(self, message: str) -> None:
        """A line for the user."""
        self._progress.say(message)

    def hand_over(self, reason: str) -> None:
        """The workers are to stop after a checkpoint, and others to go on."""
        self.event("hand_over", self._steps_done, self.seconds(), reason=reason)

    def standing_by(self, workers: int) -> None:
        """So many workers wait to go on when those that train are lost."""
        self.event("standing_by", self._steps_done, self.seconds(), workers=workers)

    def restarted(self, parts: dict[str, float]) -> None:
        """Other workers have made their first steps.

        Args:
            parts: seconds until the workers before were gone (`opened_s`), the last new one was
                there and knew the others (`entered_s`), the checkpoint was found (`begun_s`), and
                the first steps were made (`stepped_s`).
        """
        self.event("restarted", self._steps_done, self.seconds(), **parts)

    def fault(self, reason: str) -> None:
        """Something failed, and the workers start again or give up."""
        if self._clock is not None:
            self.event("fault", self._steps_done, self.seconds(), reason=reason)

    def _finish(self) -> Result:
        epochs = self.job.plan.num_epochs
        if self.target_row is not None:
            reason = f"{goal(self._target)} at epoch {self.target_row.epoch:g} of {epochs}"
            return self._end("target_reached", reason)
        if self._stopped is not None:
            return self._end("stopped", self._stopped)
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
    there = run_dir.glob("*") if run_dir.is_dir() else iter(())
    strangers = [path.name for path in there if path.name not in _OWN]
    if strangers and not (run_dir / EVENTS).exists():
        raise RaytrainError(
            f"--run-dir {run_dir}: holds {strangers[0]} and is no run; choose a new or empty folder"
        )
    return hold_folder(run_dir, "--run-dir")


def hold_folder(folder: Path, option: str) -> TextIO:
    """Make a folder where it is missing, and keep other commands off it until the file is closed.

    Args:
        folder: to hold.
        option: of the command line, which gave it.

    Raises:
        RaytrainError: it can't be written, or another command holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise RaytrainError(
            f"cannot write {folder}: {error.strerror}; choose another {option}"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RaytrainError(
            f"{folder} is in use by another raytrain; wait for it or choose another {option}"
        ) from error
    return lock
