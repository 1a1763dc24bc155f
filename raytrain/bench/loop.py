"""``raytrain bench loop``: our training loop beside one that a person would write in torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypedDict

import torch
import torch.distributed as dist
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from raytrain.bench.bare import BareStep
from raytrain.bench.measure import Spread, ratios, this_machine, versions_of
from raytrain.data.reader import Batch, TrainingImages
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.parallel.team import FixedTeam
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.checkpoint import Checkpoint, Snapshot
from raytrain.run.rows import StepRow, ValidationRow
from raytrain.train import Job, train
from raytrain.world import World

_LOG_STEPS = 10  # both loops look at their loss as often: a look waits for the device
_BATCHES = 8  # different ones, used in turn


@dataclass(frozen=True)
class LoopOptions:
    """What to measure.

    Attributes:
        workers: numbers of workers, each measured by itself.
        phase: number of the recipe's phase whose batch and image size are used.
        steps: measured steps of a turn, rounded up to tens; ten more come before them.
        repeats: turns of each loop.
    """

    workers: tuple[int, ...] = (1, 2)
    phase: int = 0
    steps: int = 50
    repeats: int = 5

    @property
    def turn_steps(self) -> int:
        """Steps of a turn: ten that aren't measured, and whole tens that are."""
        return _LOG_STEPS * (1 - -self.steps // _LOG_STEPS)


@dataclass(frozen=True)
class LoopSpeed:
    """Steps a second of both loops on one number of workers.

    Attributes:
        workers: how many.
        ours: of ``raytrain.train.train``.
        bare: of ``bare_loop``.
        share: ours over the bare loop's, turn by turn.
    """

    workers: int
    ours: Spread
    bare: Spread
    share: Spread


@dataclass(frozen=True)
class LoopReport:
    """What was measured, on what."""

    machine: dict[str, str | int | float]
    versions: dict[str, str]
    model: str
    batch: int
    image_px: int
    speeds: tuple[LoopSpeed, ...]

    def as_json(self) -> str:
        """All numbers; speeds are in steps a second."""
        return json.dumps(asdict(self), indent=1)

    def table(self) -> Table:
        """For a person."""
        title = f"steps/s: {self.model}, {self.batch} images of {self.image_px} px a step"
        table = Table(title=title)
        for heading in ("workers", "", "median", "least", "most"):
            table.add_column(heading, justify="left" if heading == "" else "right")
        for speed in self.speeds:
            for name, spread in (
                ("raytrain", speed.ours),
                ("bare torch", speed.bare),
                ("raytrain / bare", speed.share),
            ):
                cells = (f"{value:.3f}" for value in (spread.median, spread.low, spread.high))
                table.add_row(str(speed.workers), name, *cells)
        return table


def bench_loop(recipe: Recipe, shards: ShardSet, options: LoopOptions) -> LoopReport:
    """Measure both loops in turn, in the same processes, on the same batches in memory.

    Ours does all it does in a run but validate: reads ahead in a thread, follows the plan's curves,
    counts loss and accuracy and tells them every ten steps.

    Raises:
        RaytrainError: the recipe's optimizer has no equal in a bare loop.
    """
    recipe = _one_phase(recipe, shards, options)
    (phase,) = recipe.phases
    return LoopReport(
        machine=this_machine(),
        versions=versions_of(("raytrain", "torch")),
        model=recipe.model.name,
        batch=phase.batch,
        image_px=phase.image_px,
        speeds=tuple(_speed(recipe, shards, n, options) for n in options.workers),
    )


def _one_phase(recipe: Recipe, shards: ShardSet, options: LoopOptions) -> Recipe:
    """The recipe with as many steps of one phase as a turn takes, and nothing in between."""
    if recipe.optimizer.name not in ("sgd", "nag") or recipe.augment.mixup or recipe.compile:
        raise RaytrainError(
            "bench loop: the bare loop has torch's SGD and neither mixup nor torch.compile; "
            "add --set optimizer.name=nag --set augment.mixup=0 --set compile=false"
        )
    if not 0 <= options.phase < len(recipe.phases):
        raise RaytrainError(
            f"--phase {options.phase}: the recipe has 0 to {len(recipe.phases) - 1}"
        )
    data = recipe.model_dump(mode="json")
    phase = data["phases"][options.phase]
    steps_per_epoch = -(-shards.num_images("train") // phase["batch"])
    epochs = 1 + (options.turn_steps + _LOG_STEPS) // steps_per_epoch  # ours stops a ten later
    data["phases"] = [{**phase, "epochs": epochs}]
    data["schedule"] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    data["validation"]["every_epochs"] = epochs
    data["log"]["every_steps"] = _LOG_STEPS
    data |= {"target": {}, "checkpoint": {}, "memory": {}, "ema": {}}
    data["optimizer"] = {"name": recipe.optimizer.name}
    return recipe_from_dict(data)


def _speed(recipe: Recipe, shards: ShardSet, workers: int, options: LoopOptions) -> LoopSpeed:
    with TemporaryDirectory(prefix="raytrain-bench-") as scratch:
        args = (workers, recipe, shards, options, Path(scratch))
        spawn(_measure, args=args, nprocs=workers)
        turns: _Turns = json.loads(Path(scratch, "turns.json").read_text())
    return LoopSpeed(
        workers,
        Spread.of(turns["ours"]),
        Spread.of(turns["bare"]),
        ratios(turns["ours"], turns["bare"]),
    )


class _Turns(TypedDict):
    ours: list[float]
    bare: list[float]


def _measure(
    rank: int, workers: int, recipe: Recipe, shards: ShardSet, options: LoopOptions, scratch: Path
) -> None:
    """One worker of both loops; rank 0 leaves the speeds in a file."""
    world = World(rank=rank, size=workers, device=f"cuda:{rank}" if _has_gpus(workers) else "cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    with ExitStack() as cleanup:
        if workers > 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if _has_gpus(workers) else "gloo"
            store = f"file://{scratch / 'store'}"
            dist.init_process_group(backend, store, rank=rank, world_size=workers)
            cleanup.callback(dist.destroy_process_group)
        job = Job(recipe, shards, scratch)
        images = TrainingImages(shards, job.plan, rank, workers)
        batches = list(images.read(range(min(_BATCHES, job.plan.num_steps))))
        turns: _Turns = {"ours": [], "bare": []}
        steps = options.turn_steps
        for turn in range(options.repeats):
            turns["bare"].append(bare_loop(job, world, batches, steps))
            watch = _Stopwatch(batches, steps)
            run_dir = scratch / f"turn-{turn}"
            run_dir.mkdir(exist_ok=True)
            train(Job(recipe, shards, run_dir), FixedTeam(world), watch)
            turns["ours"].append(watch.steps_per_s if world.is_first else 0.0)
    if world.is_first:
        (scratch / "turns.json").write_text(json.dumps(turns))


def _has_gpus(workers: int) -> bool:
    return torch.cuda.device_count() >= workers


def bare_loop(job: Job, world: World, batches: Sequence[Batch], steps: int) -> float:
    """The model of a recipe in plain torch (``BareStep``), with a look at the loss every ten steps.

    Returns:
        Steps a second after the first ten.
    """
    step = BareStep(job, world)
    began = time.perf_counter()
    for i in range(steps):
        loss = step(batches[i % len(batches)])
        if (i + 1) % _LOG_STEPS == 0:
            loss.item()
        if i + 1 == _LOG_STEPS:
            began = time.perf_counter()
    return (steps - _LOG_STEPS) / (time.perf_counter() - began)


class _Stopwatch:
    """An engine that feeds the loop from memory, takes the time and stops it in its last ten."""

    threads = 1

    def __init__(self, batches: Sequence[Batch], steps: int) -> None:
        self._held = batches
        self._steps = steps
        self._times: list[float] = []

    @property
    def steps_per_s(self) -> float:
        """From the first look at the loss to the last."""
        looks = self._times[: self._steps // _LOG_STEPS]
        return (len(looks) - 1) * _LOG_STEPS / (looks[-1] - looks[0])

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        for s in range(start, images.plan.num_steps):
            batch = self._held[s % len(self._held)]
            yield Batch(s, batch.pixels, batch.labels, batch.rows)

    def recorded_steps(self) -> int:
        return 0

    def begin(self, start: int, world_size: int) -> float:  # noqa: ARG002 (the protocol's)
        return 0.0

    def metrics(self, rows: list[StepRow]) -> bool:
        self._times.append(time.perf_counter())
        return rows[-1].step + 1 >= self._steps

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Written after the last look."""

    def keep(self, snapshot: Snapshot) -> None:
        """Nothing is lost here."""

    def checkpoint_failed(self, step: int, reason: str) -> None:
        raise RaytrainError(f"bench loop: the checkpoint after step {step}: {reason}")

    def validation(self, row: ValidationRow) -> bool:  # noqa: ARG002 (the protocol's)
        """Made after the last look."""
        return True

    def say(self, message: str) -> None:
        """Nobody listens."""
