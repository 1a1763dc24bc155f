"""The Python way in: ``raytrain.fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from raytrain.session import Result, finished_before
from raytrain.train import Job, Parts

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

    Returns:
        The run's directory and summary. A target that was missed is a result, not an error.

    Raises:
        RaytrainError: what is wrong, where, and what to do, in one line.
    """
    asked = parse_workers(workers)
    if engine == "inline" and asked not in (None, (1, 1)):
        raise RaytrainError(f"--workers {workers}: the inline engine has one worker; leave it out")
    chosen = _recipe(recipe)
    shards = ShardSet.open(data, chosen.input)
    shards.check_files()
    if model is None:
        check_model(chosen.model)
    job = Job(chosen, shards, _run_dir(run_dir), Parts(model, loss, optimizer))
    if (finished := finished_before(job)) is not None:
        return finished
    if engine == "inline":
        return run_inline(job, device, price_per_hour)
    from raytrain.orchestrate.launch import Request, run_on_ray  # noqa: PLC0415 (starts Ray)

    return run_on_ray(job, Request(asked, device, price_per_hour, verbose))


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


def _run_dir(run_dir: str | Path | None) -> Path:
    if run_dir is None:
        run_dir = Path("runs") / datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    return Path(run_dir).expanduser().absolute()
