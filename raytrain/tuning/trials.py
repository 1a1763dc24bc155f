"""The trials of a sweep, put together from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raytrain.run.rows import Shares
from raytrain.tuning.journal import Asked, Ended, Entry, Seen
from raytrain.tuning.options import Objective

Status = Literal["running", "stopped", "finished", "diverged", "failed"]
BROKEN: tuple[Status, ...] = ("diverged", "failed")


@dataclass
class Trial:
    """What is known of a trial.

    Attributes:
        number: from 0.
        values: what was drawn, by the names of the space.
        changes: what that makes of the recipe, by dotted paths.
        rows: its validations, in order.
        status: ``running`` also of one that the end of the sweep cut off.
        reason: why it ended; empty while it runs.
    """

    number: int
    values: Mapping[str, Any]
    changes: Mapping[str, Any]
    rows: list[Seen] = field(default_factory=list)
    status: Status = "running"
    reason: str = ""

    @property
    def samples(self) -> int:
        """Images trained on until the last validation, repeats counted."""
        return self.rows[-1].samples if self.rows else 0

    @property
    def seconds(self) -> float:
        """Training clock at the last validation."""
        return self.rows[-1].seconds if self.rows else 0.0

    @property
    def best_top1(self) -> float:
        """Best top-1 of its validations; 0 without one."""
        return max((row.top1 for row in self.rows), default=0.0)

    @property
    def is_broken(self) -> bool:
        return self.status in BROKEN

    def top1_at(self, samples: int) -> float | None:
        """Best top-1 until so many samples; None where the trial didn't come that far."""
        if self.samples < samples:
            return None
        return max(row.top1 for row in self.rows if row.samples <= samples)

    def seconds_to(self, target: Shares) -> float | None:
        """Training clock of the first validation at a target; None where it wasn't reached."""
        for row in self.rows:
            if target and all(getattr(row, key) >= share for key, share in target.items()):
                return row.seconds
        return None


@dataclass
class Trials:
    """All trials of a sweep, kept up by its journal's lines."""

    by_number: dict[int, Trial] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Trials:
        """Put together what a journal tells."""
        trials = cls()
        for entry in entries:
            trials.take(entry)
        return trials

    def take(self, entry: Entry) -> None:
        """Take in a line."""
        if isinstance(entry, Asked):
            self.by_number[entry.trial] = Trial(entry.trial, entry.values, entry.changes)
            return
        trial = self.by_number[entry.trial]
        if isinstance(entry, Ended):
            trial.status, trial.reason = entry.status, entry.reason
            return
        trial.rows.append(entry)
        if not entry.goes_on:
            trial.status = "stopped"
            trial.reason = f"behind at epoch {entry.epoch:g}"

    @property
    def all(self) -> list[Trial]:
        """In the order of their numbers."""
        return [self.by_number[number] for number in sorted(self.by_number)]

    @property
    def samples(self) -> int:
        """Images trained on by all trials together, repeats counted."""
        return sum(trial.samples for trial in self.by_number.values())


def ranked(trials: Sequence[Trial], objective: Objective, target: Shares) -> list[Trial]:
    """Trials from best to worst; those that failed or diverged come last.

    Args:
        trials: of one sweep.
        objective: ``accuracy``: by best top-1; ``seconds``: by time to the target, and those that
            missed it by top-1 after them.
        target: of the recipe.
    """

    def key(trial: Trial) -> tuple[bool, float, float, int]:
        seconds = trial.seconds_to(target) if objective == "seconds" else None
        late = float("inf") if seconds is None else seconds
        return (trial.is_broken or not trial.rows, late, -trial.best_top1, trial.number)

    return sorted(trials, key=key)
