"""What a run directory holds, and how to read it back.

recipe.yaml         the resolved recipe
metrics.jsonl       one StepRow a line
validations.jsonl   one ValidationRow a line
events.jsonl        one EventRow a line
summary.json        a Summary, once the run has ended
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raytrain.errors import RaytrainError
from raytrain.run.rows import (
    EventRow,
    RunFacts,
    Status,
    StepRow,
    Summary,
    ValidationRow,
    first_at_target,
)

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
VALIDATIONS = "validations.jsonl"
EVENTS = "events.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class History:
    """Everything that a run directory tells about its run so far."""

    path: Path
    steps: Sequence[StepRow]
    validations: Sequence[ValidationRow]
    events: Sequence[EventRow]
    summary: Summary | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def facts(self) -> RunFacts | None:
        """Of the newest start; None where the run has not begun."""
        for event in reversed(self.events):
            if event.kind in ("start", "resume"):
                return _typed(_FACTS, event.detail, f"{self.path / EVENTS}: {event.kind}")
        return None

    @property
    def last_seconds(self) -> float:
        """Largest training clock found anywhere in the run; 0 before the first step."""
        rows: tuple[Sequence[StepRow | ValidationRow | EventRow], ...]
        rows = (self.steps, self.validations, self.events)
        return max((row.seconds for part in rows for row in part), default=0.0)

    @property
    def world_sizes(self) -> list[int]:
        """Number of workers, in order of change."""
        sizes: list[int] = []
        for row in self.steps:
            if sizes[-1:] != [row.world_size]:
                sizes.append(row.world_size)
        return sizes

    def count(self, kind: str) -> int:
        """How many events of this kind there are."""
        return sum(event.kind == kind for event in self.events)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / EVENTS).is_file()


def read_history(run_dir: Path) -> History:
    """Read a run directory, finished or not.

    Raises RaytrainError where it is none, or where a file is damaged (other than a torn last line,
    which is what a crash leaves).
    """
    if not is_run(run_dir):
        raise RaytrainError(
            f"{run_dir}: not a run directory (no {EVENTS} in it); "
            "give the folder that `raytrain train` printed"
        )
    summary = run_dir / SUMMARY
    return History(
        path=run_dir,
        steps=_read_rows(run_dir / METRICS, _STEP),
        validations=_read_rows(run_dir / VALIDATIONS, _VALIDATION),
        events=[
            _event(row, f"{run_dir / EVENTS}:{line}")
            for line, row in enumerate(read_jsonl(run_dir / EVENTS), 1)
        ],
        summary=_read_summary(summary) if summary.is_file() else None,
    )


def summarize(
    history: History,
    status: Status,
    reason: str,
    seconds: float,
    startup_seconds: float | None,
) -> Summary:
    """Put together what the rows of a run say about it; the run must have been started."""
    facts = history.facts
    if facts is None:
        raise RaytrainError(f"{history.path / EVENTS}: no start event, so nothing to sum up")
    last_step = history.steps[-1] if history.steps else None
    rows = history.validations
    at_target = first_at_target(facts.target, rows)
    price = facts.price_per_hour
    paid_seconds = seconds + (startup_seconds or 0.0)
    return Summary(
        status=status,
        reason=reason,
        model=facts.model,
        target=facts.target,
        top1=rows[-1].counted("top1") if rows else None,
        top5=rows[-1].counted("top5") if rows else None,
        best_top1=max((row.counted("top1") for row in rows), default=None),
        best_top5=max((row.counted("top5") for row in rows), default=None),
        seconds=seconds,
        seconds_to_target=at_target.seconds if at_target else None,
        startup_seconds=startup_seconds,
        images_per_s=(last_step.samples_seen / last_step.seconds) if last_step else None,
        steps=last_step.step + 1 if last_step else 0,
        epochs=max(rows[-1].epoch if rows else 0.0, last_step.epoch if last_step else 0),
        world_sizes=history.world_sizes,
        restarts=history.count("resume") + history.count("recovery"),
        faults=history.count("fault"),
        validation_clock=facts.validation_clock,
        data=facts.data,
        hardware=facts.hardware,
        versions=facts.versions,
        git_commit=facts.git_commit,
        price_per_hour=price,
        cost=price * paid_seconds / 3600 if price is not None else None,
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, in order; none where there is no file.

    A last line without its newline was cut by a crash and is left out; the row numbers of the
    others are their line numbers. Raises RaytrainError with file and line for any other damage.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RaytrainError(f"cannot read {path}: {error.strerror}") from error
    rows: list[dict[str, Any]] = []
    for line, content in enumerate(text.split("\n")[:-1], 1):
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            raise RaytrainError(
                f"{path}:{line}: damaged line ({error.msg}); delete this line to go on without it"
            ) from error
        if not isinstance(row, dict):
            raise RaytrainError(f"{path}:{line}: expected an object, found {content[:40]}")
        rows.append(row)
    return rows


Row = TypeVar("Row")

_STEP = TypeAdapter(StepRow)
_VALIDATION = TypeAdapter(ValidationRow)
_EVENT = TypeAdapter(EventRow)
_FACTS = TypeAdapter(RunFacts)
_SUMMARY = TypeAdapter(Summary)


def _read_rows(path: Path, adapter: TypeAdapter[Row]) -> list[Row]:
    rows = read_jsonl(path)
    return [_typed(adapter, row, f"{path}:{line}") for line, row in enumerate(rows, 1)]


def _typed(adapter: TypeAdapter[Row], values: Mapping[str, Any], where: str) -> Row:
    """Check values from a file against a type; keys of a newer raytrain are passed over."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RaytrainError(f"{where}: {key}: {first['msg']}") from error


def _event(row: Mapping[str, Any], where: str) -> EventRow:
    own = {key: row[key] for key in ("kind", "step", "seconds", "time") if key in row}
    detail = {key: value for key, value in row.items() if key not in own}
    return _typed(_EVENT, {**own, "detail": detail}, where)


def _read_summary(path: Path) -> Summary:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RaytrainError(
            f"{path}: cannot be read ({error}); delete it and resume the run to have it again"
        ) from error
    return _typed(_SUMMARY, values, str(path))
