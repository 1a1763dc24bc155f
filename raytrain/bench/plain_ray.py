"""The rival of ``raytrain bench elastic``: Ray Train with elastic workers, as its manual has it.

``ScalingConfig(num_workers=(1, N))``, Ray's defaults, a checkpoint an epoch, and a bare step. Which
images come in an epoch it takes from the same plan, so nothing is compared but what faults cost. It
leaves rows like those of a run's metrics.jsonl and events.jsonl.

    python -m raytrain.bench.plain_ray RECIPE SET RUN_DIR WORKERS
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raytrain.bench.bare import BareStep
from raytrain.data.reader import TrainingImages, read_with_threads
from raytrain.data.shards import ShardSet
from raytrain.recipe.load import load_recipe
from raytrain.run.history import EVENTS, METRICS
from raytrain.train import Job
from raytrain.world import World

_STATE = "state.pt"


def train_plain(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.extend(p for p in config["path"] if p not in sys.path)
    context = ray.train.get_context()
    world = World(rank=context.get_world_rank(), size=context.get_world_size())
    run_dir = Path(config["run_dir"])
    now = {"seconds": time.time(), "time": datetime.now(UTC).isoformat()}
    _append(run_dir / EVENTS, {"kind": "worker", "rank": world.rank, "pid": os.getpid(), **now})
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.size))
    recipe = load_recipe(config["recipe"])
    job = Job(recipe, ShardSet.open(config["data"]), run_dir)
    step = BareStep(job, world)
    start = _load(step)
    images = TrainingImages(job.shards, job.plan, world.rank, world.size)
    for batch in read_with_threads(images, images.units(start, most_images=1), threads=1):
        step(batch)
        if world.is_first:
            row = {"step": batch.step, "seconds": time.time(), "world_size": world.size}
            _append(run_dir / METRICS, row)
        last = batch.step + 1 == job.plan.num_steps
        if last or job.plan.step(batch.step + 1).epoch > job.plan.step(batch.step).epoch:
            _save(step, batch.step + 1, world)


def _load(step: BareStep) -> int:
    """Go on from the newest checkpoint; gives the step to begin with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, _STATE), weights_only=True)
    step.model.load_state_dict(state["model"])
    step.optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(step: BareStep, done: int, world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if world.is_first:
            state = {"model": step.model.state_dict(), "optimizer": step.optimizer.state_dict()}
            torch.save(state | {"step": done}, Path(folder, _STATE))
            checkpoint = Checkpoint(folder)
        ray.train.report({"step": done}, checkpoint)


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main(recipe: str, data: str, run_dir: str, workers: str) -> None:
    """Train on the cluster of ``RAY_ADDRESS``."""
    ray.init(address=os.environ["RAY_ADDRESS"])
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    path = [p for p in sys.path if Path(p).is_dir()] + [str(Path.cwd())]
    trainer = TorchTrainer(
        train_plain,
        train_loop_config={"recipe": recipe, "data": data, "run_dir": run_dir, "path": path},
        scaling_config=ScalingConfig(
            num_workers=(1, int(workers)),  # type: ignore[arg-type] # its types lack the tuple
            resources_per_worker={"CPU": 1},
        ),
        run_config=RunConfig(
            name="plain",
            storage_path=str(Path(run_dir, "ray").resolve()),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
