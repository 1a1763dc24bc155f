"""How values are chosen. The n-th sample is a function of the seed and of what was told before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from ray.tune.search.sample import Categorical, Domain

from raytrain.errors import RaytrainError
from raytrain.orchestrate.sweep.space import MOST_TRIES, Ask, InfeasibleError, Sample, Space
from raytrain.tuning.journal import Ended, Entry, Seen

if TYPE_CHECKING:
    import optuna


class Search(Protocol):
    """Chooses samples, and hears how they do."""

    def sample(self, number: int) -> Sample:
        """The sample of a trial; asked for in the order of the numbers."""

    def told(self, entry: Entry) -> None:
        """A trial was validated or has ended."""


class RandomSearch:
    """Independent samples: each is a function of the seed and its number alone.

    Args:
        space: what to draw from.
        seed: of all samples.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def sample(self, number: int) -> Sample:
        return self._space.feasible(lambda attempt: self._ask(number, attempt))

    def told(self, entry: Entry) -> None:
        """Nothing to learn from."""

    def _ask(self, number: int, attempt: int) -> Ask:
        random = np.random.RandomState([self._seed, number, attempt])  # what Ray's domains take
        return lambda _name, domain: domain.sample(random_state=random)


class TpeSearch:
    """Optuna's tree of Parzen estimators, over whatever values a sample asks for.

    Bergstra et al. 2011, Algorithms for Hyper-Parameter Optimization. A trial that was stopped
    counts with what it had at its last rung.

    Args:
        space: what to draw from.
        seed: of the sampler.

    Raises:
        RaytrainError: Optuna isn't installed.
    """

    def __init__(self, space: Space, seed: int) -> None:
        try:
            import optuna  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise RaytrainError(
                "--search tpe needs Optuna: pip install 'raytrain[tune]'"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._states = optuna.trial.TrialState
        self._space = space
        self._study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed)
        )
        self._trials: dict[int, optuna.Trial] = {}
        self._best: dict[int, float] = {}

    def sample(self, number: int) -> Sample:
        why: Exception | None = None
        for _ in range(MOST_TRIES):
            trial = self._study.ask()
            try:
                sample = self._space.sample(lambda name, domain: _suggest(trial, name, domain))  # noqa: B023 (called at once)
            except (InfeasibleError, RaytrainError) as error:
                self._study.tell(trial, state=self._states.FAIL)
                why = error
                continue
            self._trials[number] = trial
            return sample
        raise RaytrainError(f"{self._space.name}: none of {MOST_TRIES} samples can run: {why}")

    def told(self, entry: Entry) -> None:
        if isinstance(entry, Seen):
            self._best[entry.trial] = max(entry.top1, self._best.get(entry.trial, 0.0))
            self._trials[entry.trial].report(self._best[entry.trial], entry.samples)
            if not entry.goes_on:
                self._study.tell(self._trials[entry.trial], state=self._states.PRUNED)
        elif isinstance(entry, Ended):
            self._end(entry)

    def _end(self, entry: Ended) -> None:
        trial = self._trials[entry.trial]
        if entry.status == "finished":
            self._study.tell(trial, self._best[entry.trial])
        else:
            self._study.tell(trial, 0.0)  # so that the search keeps away from there


def _suggest(trial: optuna.Trial, name: str, domain: Domain) -> Any:
    if isinstance(domain, Categorical):  # by position: Optuna's own choices are scalars only
        position = trial.suggest_categorical(name, list(range(len(domain.categories))))
        return domain.categories[position]
    from optuna.distributions import FloatDistribution, IntDistribution  # noqa: PLC0415
    from ray.tune.search.optuna import OptunaSearch  # noqa: PLC0415

    try:
        known = OptunaSearch.convert_search_space({"value": domain})["value"]
    except ValueError as error:
        raise RaytrainError(f"{name}: --search tpe can't draw from {domain}: {error}") from error
    if isinstance(known, IntDistribution):
        return trial.suggest_int(name, known.low, known.high, step=known.step, log=known.log)
    if isinstance(known, FloatDistribution):
        return trial.suggest_float(name, known.low, known.high, step=known.step, log=known.log)
    raise RaytrainError(f"{name}: --search tpe can't draw from {domain}; use --search random")
