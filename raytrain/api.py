"""The Python way in: ``raytrain.fit`` and ``raytrain.sweep``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from torch import nn

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.inline import run_inline
from raytrain.learn.loss import LossFunction
from raytrain.learn.models import check_model
from raytrain.learn.optim import OptimizerMaker
from raytrain.recipe.load import load_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.startup import StartUp
from raytrain.session import Result, finished_before
from raytrain.train import Job, Parts
from raytrain.tuning.options import SETTINGS, Settings, SweepOptions
from raytrain.tuning.report import SweepReport

Engine = Literal["ray", "inline"]
Workers = int | str | None


def fit(  # noqa: PLR0913 (the keywords of the command line, each with a default)
    recipe: Recipe | Mapping[str, Any] | str | Path,
    data: str | Path,
    *,
    model: Callable[[int], nn.Module] | None = None,
    loss: LossFunction | None = None,
    optimizer: OptimizerMaker | None = None,
    workers: Workers = None,
    run_dir: str | Path | None = None,
    engine: Engine = "ray",
    device: str = "auto",
    price_per_hour: float | None = None,
    verbose: bool = False,
    startup: StartUp | None = None,
) -> Result:
    """Train an image classifier; the same call alone, on a laptop's cores or on a cluster.

    A run directory that holds an unfinished run of the same recipe and data is gone on with, from
    its newest checkpoint, with any number of workers.

    Args:
        recipe: a YAML file, the name of one that comes with raytrain, a mapping of its content,
            or a Recipe (``load_recipe(name, ["phases.0.batch=64"])`` changes one).
        data: a ShardSet made by ``raytrain prepare``: a local folder or an ``s3://`` address.
        model: called with the number of classes, returns an nn.Module; instead of the recipe's.
        loss: called with logits (n, classes) and labels (n,), returns one number an image or
            their mean; instead of the recipe's.
        optimizer: called with parameter groups, returns a torch optimizer; instead of the
            recipe's. The plan writes its lr, momentum and weight decay at every step.
        workers: a number, or ``"MIN:MAX"`` for a number that may change with the cluster; by
            default one a GPU, or one a machine where there are none.
        run_dir: where the run's files go; by default a new folder in ``runs``.
        engine: ``ray``, or ``inline`` for one worker in this process without Ray.
        device: ``auto``, ``cpu`` or ``cuda``.
        price_per_hour: of all the hardware, in USD; the summary then has the cost.
        verbose: show Ray's own log and the prints of worker processes.
        startup: what the caller has done so far, for the run's account of its start-up.

    Returns:
        The run's directory and summary. A target that was missed is a result, not an error.

    Raises:
        RaytrainError: what is wrong, where, and what to do, in one line.
    """
    startup = startup or StartUp()
    asked = parse_workers(workers)
    if engine == "inline" and asked not in (None, (1, 1)):
        raise RaytrainError(f"--workers {workers}: the inline engine has one worker; leave it out")
    job = _job(_recipe(recipe), data, Parts(model, loss, optimizer), run_dir)
    if (finished := finished_before(job)) is not None:
        return finished
    startup.ended("data and model")
    if engine == "inline":
        return run_inline(job, device, price_per_hour, startup)
    from raytrain.orchestrate.launch import Request, run_on_ray  # noqa: PLC0415 (starts Ray)

    return run_on_ray(job, Request(asked, device, price_per_hour, verbose), startup)


def _job(recipe: Recipe, data: str | Path, parts: Parts, run_dir: str | Path | None) -> Job:
    shards = ShardSet.open(data, recipe.input)
    shards.check_files()
    if parts.model is None:
        check_model(recipe.model)
    return Job(recipe, shards, _run_dir(run_dir, ""), parts)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended.

    Attributes:
        folder: with sweep.json, best.yaml, the pictures, and a run directory for each trial.
        report: what sweep.json tells; ``report.table()`` shows the trials.
    """

    folder: Path
    report: SweepReport

    @property
    def best_recipe(self) -> Path:
        """The best recipe, which ``fit`` takes."""
        return self.folder / "best.yaml"


def sweep(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    data: str | Path,
    space: str | Path | Sequence[str | Path],
    *,
    out: str | Path | None = None,
    time_budget: float | None = None,
    device: str = "auto",
    verbose: bool = False,
    **options: Any,
) -> Sweep:
    """Search a space of recipes for the best one.

    Args:
        recipe: what the samples change, as for ``fit``.
        data: a ShardSet made by ``raytrain prepare``.
        space: a file with a function ``space(draw)``, or several that are drawn together.
        out: where everything goes; by default a new folder in ``runs``.
        time_budget: seconds after which no more is trained; None: no limit.
        device: ``auto``, ``cpu`` or ``cuda``.
        verbose: show Ray's own log.
        **options: fields of ``SweepOptions``, such as ``samples=24``.

    Raises:
        RaytrainError: what can't work, before the first trial; or no trial came to a result.
    """
    chosen = _recipe(recipe)
    check_model(chosen.model)
    spaces = [space] if isinstance(space, str | Path) else space
    folder = _run_dir(out, "sweep-")
    if (folder / SETTINGS).exists():
        raise RaytrainError(
            f"{folder} holds a sweep; `raytrain sweep --resume {folder}` goes on with it, or "
            "choose another --out"
        )
    shards = ShardSet.open(data, chosen.input)
    settings = Settings(
        recipe=chosen.model_dump(mode="json"),
        spaces=tuple(str(Path(path).expanduser().absolute()) for path in spaces),
        data=shards.uri,
        fingerprint=shards.fingerprint,
        device=device,
        options=SweepOptions(**options),
    )
    return _sweep(folder, settings, time_budget, verbose)


def use_cluster(address: str) -> None:
    """Let what follows in this process run on a Ray cluster.

    Args:
        address: such as ``10.0.0.1:6379``, or ``auto`` on one of its machines; empty changes
            nothing: the cluster of the Ray job that this is in, or else a Ray of its own.
    """
    if address:
        os.environ["RAY_ADDRESS"] = address


def resume_sweep(
    folder: str | Path, *, time_budget: float | None = None, verbose: bool = False
) -> Sweep:
    """Go on with a sweep that was cut off; what it does is in its folder.

    Args:
        folder: of the sweep.
        time_budget: seconds for this call; None: no limit.
        verbose: show Ray's own log.

    Raises:
        RaytrainError: the folder holds no sweep, or the data or the space has changed.
    """
    path = Path(folder).expanduser().absolute()
    return _sweep(path, Settings.read(path), time_budget, verbose)


def _sweep(folder: Path, settings: Settings, time_budget: float | None, verbose: bool) -> Sweep:
    from raytrain.orchestrate.sweep.run import run_sweep  # noqa: PLC0415 (starts Ray)

    return Sweep(folder, run_sweep(folder, settings, time_budget, verbose))


def parse_workers(workers: Workers) -> tuple[int, int] | None:
    """``3`` -> (3, 3), ``"2:8"`` -> (2, 8), None -> None.

    Raises:
        RaytrainError: it is neither.
    """
    if workers is None:
        return None
    fewest, colon, most = str(workers).partition(":")
    try:
        ends = int(fewest), int(most if colon else fewest)
    except ValueError:
        ends = (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise RaytrainError(
            f"--workers {workers}: give a number of at least 1, or MIN:MAX such as 2:8"
        )
    return ends


def _recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return recipe_from_dict(recipe)
    return load_recipe(recipe)


def _run_dir(run_dir: str | Path | None, prefix: str) -> Path:
    if run_dir is None:
        run_dir = Path("runs") / datetime.now().astimezone().strftime(f"{prefix}%Y-%m-%d-%H%M%S")
    return Path(run_dir).expanduser().absolute()
