"""What a sweep decides: who runs with which values, who goes on. Every decision is journaled.

Ray Tune's search and scheduler hooks ask the conductor. It is a function of the journal: read in
again after a kill, the same lines leave it in the same state, so a resumed sweep decides as the
one that wasn't killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from raytrain.errors import RaytrainError
from raytrain.orchestrate.sweep.search import Search
from raytrain.orchestrate.sweep.space import Sample
from raytrain.recipe.types import Recipe
from raytrain.run.format import percent
from raytrain.tuning.journal import Asked, Ended, EndStatus, Entry, Journal, Seen, read_journal
from raytrain.tuning.rungs import Rungs
from raytrain.tuning.trials import Trial, Trials


class Halving(Protocol):
    """Says who goes on."""

    def goes_on(self, number: int, samples: int, top1: float) -> bool:
        """Whether a trial goes on after so many samples with this best top-1."""


class Asha:
    """Ray Tune's asynchronous successive halving (https://arxiv.org/abs/1810.05934).

    Args:
        rungs: where trials are compared.
    """

    def __init__(self, rungs: Rungs) -> None:
        self._scheduler = AsyncHyperBandScheduler(
            time_attr="samples",
            metric="top1",
            mode="max",
            max_t=rungs.most_samples,
            grace_period=rungs.grace_epochs * rungs.num_images,
            reduction_factor=rungs.factor,
            stop_last_trials=False,  # a trial ends by itself
        )
        self._most_samples = rungs.most_samples
        self._trials: dict[int, Any] = {}

    def goes_on(self, number: int, samples: int, top1: float) -> bool:
        if samples >= self._most_samples:
            return True  # it has ended, whole; there is nothing to cut off
        controller: Any = None  # which the scheduler doesn't use; of a trial it uses the id
        if number not in self._trials:
            self._trials[number] = SimpleNamespace(trial_id=str(number))
            self._scheduler.on_trial_add(controller, self._trials[number])
        result = {"samples": samples, "top1": top1}
        decision = self._scheduler.on_trial_result(controller, self._trials[number], result)
        return bool(decision != TrialScheduler.STOP)


class Everyone:
    """Every trial goes on to its end."""

    def goes_on(self, number: int, samples: int, top1: float) -> bool:  # noqa: ARG002
        return True


class Conductor:
    """Decides, and keeps the journal.

    Args:
        number_of_trials: how many there will be.
        search: chooses their values.
        halving: says who goes on.
        journal: of this sweep; what is in it is taken up.
        say: told of each decision that a user would want to see.

    Raises:
        RaytrainError: the journal doesn't follow from the space and the options.
    """

    def __init__(
        self,
        number_of_trials: int,
        search: Search,
        halving: Halving,
        journal: Journal,
        say: Callable[[str], None],
    ) -> None:
        self.trials = Trials()
        self.recipes: dict[int, Recipe] = {}
        self._number_of_trials = number_of_trials
        self._search = search
        self._halving = halving
        self._journal = journal
        self._say = say
        for entry in read_journal(journal.path):
            self._again(entry)
        self._waiting = [t.number for t in self.trials.all if t.status == "running"]

    @property
    def remaining(self) -> int:
        """How many trials ``next_trial`` will still give."""
        return len(self._waiting) + self._number_of_trials - len(self.trials.by_number)

    def next_trial(self) -> Trial | None:
        """A trial to run: one that was cut off, or a new one; None when all have been given."""
        if self._waiting:
            return self.trials.by_number[self._waiting.pop(0)]
        number = len(self.trials.by_number)
        if number >= self._number_of_trials:
            return None
        sample = self._search.sample(number)
        self._write(Asked(trial=number, values=sample.values, changes=sample.changes, at=_now()))
        self.recipes[number] = sample.recipe
        return self.trials.by_number[number]

    def seen(self, number: int, row: dict[str, Any]) -> bool:
        """A trial was validated; gives whether it goes on.

        Args:
            number: of the trial.
            row: samples, epoch, top1, top5, loss, seconds.
        """
        goes_on = self._goes_on(number, row["samples"], row["top1"])
        self._write(Seen(trial=number, goes_on=goes_on, **row))
        if not goes_on:
            self._tell(number)
        return goes_on

    def ended(self, number: int, status: EndStatus, reason: str) -> None:
        """A trial came to its end by itself."""
        self._write(Ended(trial=number, status=status, reason=reason, at=_now()))
        self._tell(number)

    def _goes_on(self, number: int, samples: int, top1: float) -> bool:
        best = max(top1, self.trials.by_number[number].best_top1)
        return self._halving.goes_on(number, samples, best)

    def _write(self, entry: Entry) -> None:
        self._journal.write(entry)
        self._take(entry)

    def _take(self, entry: Entry) -> None:
        self.trials.take(entry)
        self._search.told(entry)

    def _again(self, entry: Entry) -> None:
        """Take a line of the journal in, and see that it would be decided so again."""
        if isinstance(entry, Asked):
            sample = self._search.sample(entry.trial)
            if not _same(sample, entry):
                raise RaytrainError(
                    f"{self._journal.path}: trial {entry.trial} was drawn as {dict(entry.values)}, "
                    f"and the space now gives {dict(sample.values)}; undo the change to the space, "
                    "or start a new sweep"
                )
            self.recipes[entry.trial] = sample.recipe
        elif isinstance(entry, Seen):
            self._goes_on(entry.trial, entry.samples, entry.top1)
        self._take(entry)

    def _tell(self, number: int) -> None:
        trial = self.trials.by_number[number]
        self._say(
            f"trial {number}: {trial.status} after {trial.samples:,} images, "
            f"best top-1 {percent(trial.best_top1)}: {trial.reason}"
        )


class Decisions(FIFOScheduler):
    """Ray Tune's way to the conductor's decisions."""

    def __init__(self, conductor: Conductor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._conductor = conductor

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:  # noqa: ARG002
        goes_on = self._conductor.seen(trial.config["trial"], row_of(result))
        return TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:  # noqa: ARG002
        if "status" in result:  # else it was stopped, by a decision or by the sweep's end
            number = trial.config["trial"]
            self._conductor.ended(number, result["status"], result["reason"])

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:  # noqa: ARG002
        reason = "its process died; memory enough? Ray's log tells more"
        self._conductor.ended(trial.config["trial"], "failed", reason)


_ROW = ("samples", "epoch", "top1", "top5", "loss", "seconds")


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """What a trial told of a validation, without what Ray Tune adds."""
    return {key: result[key] for key in _ROW}


def _same(sample: Sample, entry: Asked) -> bool:
    return sample.values == entry.values and sample.changes == entry.changes


def _now() -> float:
    return time.time()
