"""A sweep from its settings to its report."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import Placement, ensure_ray, place
from raytrain.orchestrate.preflight import preflight
from raytrain.orchestrate.sweep.conductor import Asha, Conductor, Decisions, Everyone
from raytrain.orchestrate.sweep.search import RandomSearch, Search, TpeSearch
from raytrain.orchestrate.sweep.space import Sample, Setting, Space
from raytrain.orchestrate.sweep.trial import Common, TrialActor, cores_of
from raytrain.recipe.load import change_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.session import Interruption, hold_folder
from raytrain.train import Job, target_of
from raytrain.tuning.journal import JOURNAL, Entry, Journal
from raytrain.tuning.options import Settings
from raytrain.tuning.report import SweepReport, write_report
from raytrain.tuning.rungs import Rungs

_CHECKED_SAMPLES = 200  # drawn beside those that will run, to see that a space holds no trap
TRIALS, RETRAINED = "trials", "retrained"


@dataclass(frozen=True)
class Room:
    """What of the cluster a sweep takes.

    Attributes:
        placement: of a trial with several workers; None: one worker, in the trial's own actor.
        concurrent: trials at a time.
        resources: that Ray Tune keeps for the actor of each trial.
        use_gpu: whether trials train on GPUs.
    """

    placement: Placement | None
    concurrent: int
    resources: dict[str, float]
    use_gpu: bool


def run_sweep(
    folder: Path, settings: Settings, time_budget: float | None = None, verbose: bool = False
) -> SweepReport:
    """Run a sweep, or go on with the one that the folder holds.

    Args:
        folder: where everything goes.
        settings: what to do; what the folder holds must have come from the same.
        time_budget: seconds after which no more is trained; None: no limit.
        verbose: show Ray's own log.

    Raises:
        RaytrainError: what can't work, before the first trial; all trials failed; interrupted.
    """
    settings.options.check()
    with contextlib.closing(hold_folder(folder, "--out")):
        return _Sweep(folder, settings, verbose).run(time_budget)


class _Sweep:
    def __init__(self, folder: Path, settings: Settings, verbose: bool) -> None:
        self._folder = folder
        self._settings = settings
        self._options = settings.options
        base = recipe_from_dict(settings.recipe)
        self._shards = ShardSet.open(settings.data, base.input)
        if self._shards.fingerprint != settings.fingerprint:
            raise RaytrainError(
                f"{settings.data} has changed since this sweep began (fingerprint "
                f"{self._shards.fingerprint[:12]}, not {settings.fingerprint[:12]}); begin anew"
            )
        self._shards.check_files()
        images = self._shards.num_images("train")
        options = self._options
        self._rungs = Rungs(images, base.num_epochs, options.grace_epochs, options.factor)
        self._base = self._rungs.validated(_for_objective(base, settings))
        paths = [Path(path) for path in settings.spaces]
        self._space = Space(paths, Setting(self._base, images, options.workers_per_trial))
        self._check_space()
        print(f"sweep {folder}: starting on {os.environ.get('RAY_ADDRESS', 'this machine')}")
        self._room = find_room(settings, verbose)
        job = Job(self._base, self._shards, folder)
        preflight(job, self._room.use_gpu, verbose)

    def run(self, time_budget: float | None) -> SweepReport:
        settings, options = self._settings, self._options
        settings.write(self._folder)
        search: Search
        search = (TpeSearch if options.search == "tpe" else RandomSearch)(self._space, options.seed)
        halving = Asha(self._rungs) if options.scheduler == "asha" else Everyone()
        with Interruption(print) as interruption:
            end = _End(interruption, time_budget)
            journal = Journal(self._folder / JOURNAL)
            conductor = Conductor(options.samples, search, halving, journal, print)
            self._conduct(conductor, TRIALS, end)
            report = self._report(conductor, end)
            best = report.best
            if best is not None and options.retrain and not end.reason:
                again = self._retrain(conductor.recipes[best.number], end)
                report = self._report(conductor, end, again)
        if interruption.asked:
            raise RaytrainError(
                f"interrupted; `raytrain sweep --resume {self._folder}` goes on from there"
            )
        if report.best is None:
            if not report.broken:
                raise RaytrainError("no trial came to a result before the time budget ended")
            first = report.broken[0]
            raise RaytrainError(
                f"no trial of {len(report.trials)} came to a result: trial {first.number}: "
                f"{first.reason}"
            )
        return report

    def _check_space(self) -> None:
        draws = RandomSearch(self._space, self._options.seed)
        for number in range(max(_CHECKED_SAMPLES, self._options.samples)):
            draws.sample(number)

    def _retrain(self, recipe: Recipe, end: _End) -> Conductor:
        """Train the best recipe with new seeds: its accuracy without the luck of the draw."""
        seeds = range(recipe.seed + 1, recipe.seed + 1 + self._options.retrain)
        search = _Fixed([{"seed": seed} for seed in seeds], recipe)
        journal = Journal(self._folder / f"{RETRAINED}.jsonl")
        print(f"training the best recipe again with {self._options.retrain} new seeds")
        conductor = Conductor(self._options.retrain, search, Everyone(), journal, print)
        self._conduct(conductor, RETRAINED, end)
        return conductor

    def _report(
        self, conductor: Conductor, end: _End, again: Conductor | None = None
    ) -> SweepReport:
        report = SweepReport(
            settings=self._settings,
            rungs=self._rungs,
            trials=conductor.trials.all,
            retrained=again.trials.all if again else [],
            target=target_of(self._base),
            ended_by=end.reason,
        )
        best = report.best
        write_report(report, conductor.recipes[best.number] if best else None, self._folder)
        return report

    def _conduct(self, conductor: Conductor, name: str, end: _End) -> None:
        if not conductor.remaining:
            return
        common = Common(
            shards=self._shards,
            folder=self._folder / name,
            placement=self._room.placement,
            device=self._settings.device,
            threads=cores_of(self._room.concurrent),
            path=[p for p in sys.path if Path(p).is_dir()] + [str(Path.cwd())],
        )
        storage = self._folder / ".ray_tune"
        trainable = tune.with_parameters(TrialActor, common=common)
        with _quiet_tune():
            try:
                tune.Tuner(
                    tune.with_resources(trainable, self._room.resources),
                    tune_config=tune.TuneConfig(
                        num_samples=conductor.remaining,
                        search_alg=_Suggestions(conductor),
                        scheduler=Decisions(conductor),
                        max_concurrent_trials=self._room.concurrent,
                        reuse_actors=True,
                        trial_name_creator=_name,
                        trial_dirname_creator=_name,
                    ),
                    run_config=tune.RunConfig(
                        name=f"{time.time_ns()}",
                        storage_path=str(storage),
                        stop=end,
                        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                        verbose=0,
                    ),
                ).fit()
            finally:
                shutil.rmtree(storage, ignore_errors=True)
        end.note()


def find_room(settings: Settings, verbose: bool) -> Room:
    """Add up what trials need and the cluster has, before anything starts; Ray is there then.

    Raises:
        RaytrainError: a trial, or so many at a time, can never run; with the numbers.
    """
    options = settings.options
    workers = options.workers_per_trial
    ensure_ray(verbose, workers * (options.concurrent or 1))
    total = ray.cluster_resources()
    gpus = round(total.get("GPU", 0))
    use_gpu = settings.device != "cpu" and gpus > 0
    room, unit = (gpus, "GPU") if use_gpu else (round(total.get("CPU", 0)), "CPU")
    if workers > room:
        raise RaytrainError(
            f"--workers-per-trial {workers}: a trial needs {workers} {unit}s, one for each worker, "
            f"and the cluster has {room}; ask for at most {room}"
        )
    most = room // workers
    if options.concurrent is not None and options.concurrent > most:
        raise RaytrainError(
            f"--concurrent {options.concurrent}: so many trials of {workers} workers need "
            f"{options.concurrent * workers} {unit}s, and the cluster has {room}; ask for at most "
            f"{most}"
        )
    concurrent = min(options.concurrent or most, options.samples)
    if workers == 1:
        resources: dict[str, float] = {"CPU": 0, "GPU": 1} if use_gpu else {"CPU": 1}
        return Room(None, concurrent, resources, use_gpu)
    # Ray Train's workers take the slots. The actor that drives them takes none, but Ray Tune wants
    # to keep something for it: a megabyte, of which there is always one
    placement = replace(place((workers, workers), settings.device, False), beside=False)
    return Room(placement, concurrent, {"CPU": 0, "memory": 1e6}, use_gpu)


class _Suggestions(tune.search.Searcher):
    """Ray Tune's way to the conductor's trials."""

    def __init__(self, conductor: Conductor) -> None:
        super().__init__()
        self._conductor = conductor

    def suggest(self, trial_id: str) -> dict[str, Any] | None:  # noqa: ARG002
        trial = self._conductor.next_trial()
        if trial is None:
            return tune.search.Searcher.FINISHED  # type: ignore[return-value]
        recipe = self._conductor.recipes[trial.number]
        return {"trial": trial.number, "recipe": recipe, "samples": trial.samples}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """The conductor hears of it from the scheduler, in order with all else."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the journal is what a sweep goes on from."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing; see ``save``."""


class _Fixed:
    """A search over a list of changes to a recipe, one a trial."""

    def __init__(self, changes: list[dict[str, Any]], recipe: Recipe) -> None:
        self._samples = [Sample(c, c, change_recipe(recipe, c, "retrain")) for c in changes]

    def sample(self, number: int) -> Sample:
        return self._samples[number]

    def told(self, entry: Entry) -> None:
        """Nothing to learn from."""


class _End(tune.Stopper):
    """Ends a sweep when the user or the time budget wants it.

    Attributes:
        reason: ``interrupted``, ``time budget``, or empty where all trials ran.
    """

    def __init__(self, interruption: Interruption, time_budget: float | None) -> None:
        self._interruption = interruption
        self._deadline = None if time_budget is None else time.monotonic() + time_budget
        self.reason = ""

    def __getstate__(self) -> dict[str, Any]:
        """Nearly nothing: Ray Tune keeps its stopper on disk, where nobody reads it."""
        return {"reason": self.reason}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:  # noqa: ARG002
        return False

    def stop_all(self) -> bool:
        self.note()
        return bool(self.reason)

    def note(self) -> None:
        """See whether it is time."""
        if self._interruption.asked:
            self.reason = "interrupted"
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = "time budget"


def _for_objective(recipe: Recipe, settings: Settings) -> Recipe:
    if settings.options.objective == "accuracy":  # a target would end trials at different times
        return change_recipe(recipe, {"target": {}}, "sweep")
    if not target_of(recipe):
        raise RaytrainError(
            "--objective seconds: the recipe has no target to take the time to; add --set "
            "target.top1=0.9, say"
        )
    return recipe


def _name(trial: Any) -> str:
    return f"trial-{trial.config['trial']:03d}"


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Without Ray Tune's own files and tables and its own hand on Ctrl-C."""
    wanted = {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "RAY_AIR_NEW_OUTPUT": "0",  # which tells of its folder, gone at the end, at verbose=0 too
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
