"""The training loop on several processes without Ray, and models without batch statistics."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from raytrain.data.reader import Batch, TrainingImages, read_with_threads
from raytrain.data.shards import ShardSet
from raytrain.parallel.team import FixedTeam
from raytrain.recipe.types import Recipe
from raytrain.run.checkpoint import Checkpoint, Snapshot
from raytrain.run.history import read_jsonl
from raytrain.run.record import RunRecord
from raytrain.run.rows import StepRow, ValidationRow
from raytrain.train import Job, Parts, train
from raytrain.world import World


def plain_cnn(num_classes: int) -> nn.Sequential:
    """A model whose output for an image depends on that image alone.

    It is smooth, so that rounding stays rounding: where a sum in another order moves a value over
    the edge of a ReLU, the gradient jumps, and losses differ by 1e-3 some hundred steps later.
    """
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


class Pause(nn.Module):
    """Makes each training pass take 20 ms longer."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(0.02)
        return x


def slow_cnn(num_classes: int) -> nn.Module:
    """``plain_cnn`` with the same weights, at a pace at which much can happen in some epochs."""
    return nn.Sequential(*plain_cnn(num_classes), Pause())


def eight_outputs(num_classes: int) -> nn.Module:
    """A model with another number of outputs than there are classes."""
    return plain_cnn(num_classes and 8)


def heavy_cnn(num_classes: int) -> nn.Module:
    """A model of 8 MB that is quick to compute."""
    wide = 250_000
    return nn.Sequential(plain_cnn(4), nn.Linear(4, wide, bias=False), nn.Linear(wide, num_classes))


def with_a_bug(num_classes: int) -> nn.Module:
    """A model whose making fails."""
    widths: dict[str, int] = {}
    return nn.Linear(num_classes, widths["outputs"])


def crash(num_classes: int) -> nn.Module:
    """A model whose making divides by zero."""
    return nn.Linear(3, num_classes // 0)


def death(num_classes: int) -> nn.Module:
    """A model whose making kills the process, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return nn.Linear(3, num_classes)


@dataclass
class Told:
    """An Outside that only listens."""

    stop_after: int | None = None
    recorded: int = 0
    threads: int = 1
    rows: list[StepRow] = field(default_factory=list)
    validations: list[ValidationRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    started_at: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        return read_with_threads(images, images.units(start), 1)

    def recorded_steps(self) -> int:
        return self.recorded

    def begin(self, start: int, world_size: int) -> float:
        self.started_at.append(start)
        return 0.0

    def metrics(self, rows: list[StepRow]) -> bool:
        self.rows += rows
        return self.stop_after is not None and rows[-1].step + 1 >= self.stop_after

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.path.exists()

    def keep(self, snapshot: Snapshot) -> None:
        self.kept.append(snapshot.step)

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self.warnings.append(f"step {step}: {reason}")

    def validation(self, row: ValidationRow) -> bool:
        self.validations.append(row)
        return False

    def say(self, message: str) -> None:
        self.warnings.append(message)


PLAIN = Parts(model=plain_cnn)


def train_with(
    workers: int,
    recipe: Recipe,
    shards: Path,
    run_dir: Path,
    stop_after: int | None = None,
    parts: Parts = PLAIN,
) -> None:
    """Run the loop on processes of this machine that share gradients with Gloo.

    Rank 0's rows are appended to metrics.jsonl and validations.jsonl of ``run_dir``.
    """
    store = run_dir.parent / f"{run_dir.name}-store-{os.urandom(4).hex()}"
    run_dir.mkdir(parents=True, exist_ok=True)
    job = Job(recipe, ShardSet.open(shards), run_dir, parts)
    if workers == 1:
        _worker(0, 1, job, stop_after, store)  # in this process: nothing to wait for
    else:
        spawn(_worker, args=(workers, job, stop_after, store), nprocs=workers)


def _worker(rank: int, workers: int, job: Job, stop_after: int | None, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if workers > 1:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=workers)
    told = Told(stop_after, recorded=len(read_jsonl(job.run_dir / "metrics.jsonl")))
    try:
        train(job, FixedTeam(World(rank=rank, size=workers)), told)
    except Exception:
        traceback.print_exc()
        raise
    if rank == 0:
        record = RunRecord(job.run_dir)
        record.metrics(told.rows)
        for row in told.validations:
            record.validation(row)
    if workers > 1:
        dist.destroy_process_group()
