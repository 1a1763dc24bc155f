"""The single writer of a run directory."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from raytrain.errors import RaytrainError
from raytrain.run import dawnbench
from raytrain.run.history import (
    EVENTS,
    METRICS,
    RECIPE,
    SUMMARY,
    VALIDATIONS,
    read_history,
    summarize,
)
from raytrain.run.rows import EventRow, RunFacts, Status, StepRow, Summary, ValidationRow

PICTURE = "convergence.png"


class RunRecord:
    """Writes everything in a run directory but its checkpoints; one writer a run.

    Each call's rows are whole lines in the files when it returns. A file that cannot be written
    (no permission, full disk) raises RaytrainError with one line; but where somebody is told of
    it, the rows wait in memory and are tried again with the next ones, until the run's end.
    """

    def __init__(self, run_dir: Path, told: Callable[[str], None] | None = None) -> None:
        """Make the directory where it is missing, and mend the torn line that a crash left."""
        self.run_dir = run_dir
        self._told = told
        self._waiting: dict[str, str] = {}
        self._lock = threading.RLock()  # checkpoints are told of in a thread of their own
        with _writing(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / EVENTS).touch()
            for name in (METRICS, VALIDATIONS, EVENTS):
                drop_torn_line(run_dir / name)
        from raytrain.run.tensorboard import TensorBoard  # noqa: PLC0415 - slow, and workers need none

        self._tensorboard = TensorBoard(run_dir / "tensorboard", told)

    def recipe(self, text: str) -> None:
        """Write the resolved recipe as `recipe.yaml`."""
        self._replace(RECIPE, text)

    def start(self, facts: RunFacts, step: int = 0) -> EventRow:
        """Begin the run, or go on with it after `step` steps done.

        Rows of steps that will run again are dropped, and so is the summary of an earlier end.
        The event's `seconds` is where the training clock goes on.
        """
        history = read_history(self.run_dir)
        self.rewind(step)
        with _writing(self.run_dir):
            (self.run_dir / SUMMARY).unlink(missing_ok=True)
        kind = "start" if history.facts is None else "resume"
        return self.event(kind, step=step, seconds=history.last_seconds, **asdict(facts))

    def metrics(self, rows: Sequence[StepRow]) -> None:
        """Append training steps, in order."""
        if rows:
            self._append(METRICS, _lines(rows))
            self._tensorboard.steps(rows)

    def validation(self, row: ValidationRow) -> None:
        """Append a validation."""
        self._append(VALIDATIONS, _lines([row]))
        self._tensorboard.validation(row)

    def event(self, kind: str, *, step: int, seconds: float, **detail: Any) -> EventRow:
        """Append an event that happened after `step` steps done, at `seconds` on the clock.

        `detail` is what the kind has to tell, as JSON values: a resize `world_size`, a fault or
        recovery `reason`.
        """
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        row = EventRow(kind=kind, step=step, seconds=seconds, time=now, detail=detail)
        own = {"kind": kind, "step": step, "seconds": seconds, "time": now}
        self._append(EVENTS, json.dumps(plain(own | detail)) + "\n")
        return row

    def rewind(self, step: int) -> int:
        """Drop the rows of whatever comes after `step` steps done; returns how many.

        These are steps of index >= `step` and validations after them, which will run again. Take
        `last_seconds` before, so that the clock also counts the time that was lost.
        """
        self._write_waiting()
        history = read_history(self.run_dir)
        steps = [row for row in history.steps if row.step < step]
        validations = [row for row in history.validations if row.step <= step]
        dropped = len(history.steps) - len(steps) + len(history.validations) - len(validations)
        if dropped:
            self._replace(METRICS, _lines(steps))
            self._replace(VALIDATIONS, _lines(validations))
        self._tensorboard.restart(step)
        for row in validations:
            if row.step == step:  # TensorBoard forgets it too
                self._tensorboard.validation(row)
        return dropped

    def last_seconds(self) -> float:
        """Largest training clock in the files, from which a resumed run's clock goes on."""
        return read_history(self.run_dir).last_seconds

    def finish(
        self, status: Status, reason: str, *, seconds: float, startup_seconds: float | None = None
    ) -> Summary:
        """End the run: the `end` event, summary.json, DAWNBench's files and the picture.

        `seconds` is the training clock at the end, `startup_seconds` the time from the command to
        the first step. All else of the summary is read off the files. Needs a `start` before.
        """
        from raytrain.run.picture import draw_convergence  # noqa: PLC0415 - matplotlib is slow

        self._write_waiting()
        history = read_history(self.run_dir)
        steps = history.steps[-1].step + 1 if history.steps else 0
        self.event("end", step=steps, seconds=seconds, status=status, reason=reason)
        summary = summarize(history, status, reason, seconds, startup_seconds)
        history = replace(history, summary=summary)
        self._replace(SUMMARY, _indented(asdict(summary)))
        self._replace("dawnbench.json", _indented(dawnbench.entry_meta(history)))
        self._replace("dawnbench.tsv", dawnbench.entry_table(history))
        with _writing(self.run_dir / PICTURE):
            draw_convergence([history], self.run_dir / PICTURE)
        return summary

    @property
    def is_written(self) -> bool:
        """Whether all rows are in the files."""
        return not self._waiting

    def _append(self, name: str, lines: str) -> None:
        with self._lock:
            was_written = self.is_written
            self._waiting[name] = self._waiting.get(name, "") + lines
            try:
                self._write_waiting()
            except RaytrainError as error:
                if self._told is None:
                    raise
                if was_written:
                    self._told(f"warning: {error}; training goes on, what is to be written waits")

    def _write_waiting(self) -> None:
        with self._lock:
            for name, lines in list(self._waiting.items()):
                path = self.run_dir / name
                with _writing(path):
                    _append_whole(path, lines.encode())
                del self._waiting[name]

    def _replace(self, name: str, text: str) -> None:
        path = self.run_dir / name
        temporary = path.with_name(name + ".tmp")
        with _writing(path):
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)


def package_versions(cuda: str | None = None) -> dict[str, str]:
    """Versions of what decides a result; `cuda` as torch tells it, None on CPUs."""
    versions = {name: metadata.version(name) for name in ("raytrain", "ray", "torch")}
    versions["python"] = platform.python_version()
    return versions | ({"cuda": cuda} if cuda else {})


def git_commit(folder: Path) -> str | None:
    """Commit of the git checkout that `folder` is in, with `-dirty` after local changes.

    None outside of a checkout, without git, or before the first commit.
    """
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    answer = subprocess.run(  # noqa: S603 - a fixed command
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def cpu_model() -> str:
    """Model name of this machine's CPU, as its system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RaytrainError(
            f"cannot write {path}: {error.strerror}; "
            "make room or rights there, or give another --run-dir"
        ) from error


def drop_torn_line(path: Path) -> None:
    """Cut off what follows the last newline, so that the next line starts as a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        if not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def _append_whole(path: Path, content: bytes) -> None:
    """Append to a file all of it or nothing."""
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            if path.is_file():  # not a device
                file.truncate(before)
            raise


def _lines(rows: Sequence[StepRow | ValidationRow]) -> str:
    return "".join(json.dumps(plain(asdict(row))) + "\n" for row in rows)


def _indented(value: Mapping[str, Any]) -> str:
    return json.dumps(plain(value), indent=2) + "\n"


def plain(value: Any) -> Any:
    """A JSON value with NaN and infinities, which JSON lacks, as None."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
