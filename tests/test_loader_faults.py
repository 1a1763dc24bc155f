"""Faults that other loaders are known for, none of which may happen here. No Ray."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from raytrain.data.reader import (
    Batch,
    TrainingImages,
    ValidationImages,
    View,
    read_with_threads,
)
from raytrain.data.shards import ShardSet
from raytrain.learn.loss import build_loss
from raytrain.learn.precision import Normalizer, NumberFormat
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan, share
from raytrain.recipe.types import Loss, Precision
from raytrain.run.evaluate import Examiner, Score
from tests.sets import write_set

EPOCHS = 3
BATCH = 48  # 331 images make steps of 47 and 48


@pytest.fixture(scope="module")
def shards(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Three training shards of 150, 1 and 180 images: fewer than some workers here, and uneven."""
    out = tmp_path_factory.mktemp("sets") / "uneven"
    made = write_set(drawn_images, out, shard_images=(150, 1, 200))
    assert [shard.rows for shard in made.manifest.splits["train"].shards] == [150, 1, 180]
    return made


@pytest.fixture(scope="module")
def plan(shards: ShardSet) -> Plan:
    recipe = {
        "model": {"name": "not.used:here"},
        "phases": [{"epochs": EPOCHS, "image_px": 14, "batch": BATCH, "crop_area": [0.5, 1.0]}],
        "schedule": {"lr": 0.1},
        "input": {"window_blocks": 5},
    }
    return Plan(recipe_from_dict(recipe), shards.num_images("train"))


def read(
    shards: ShardSet, plan: Plan, rank: int = 0, workers: int = 1, start: int = 0
) -> list[Batch]:
    return list(TrainingImages(shards, plan, rank, workers).read(range(start, plan.num_steps)))


def rows_by_epoch(plan: Plan, batches: list[Batch]) -> list[list[int]]:
    epochs: list[list[int]] = [[] for _ in range(EPOCHS)]
    for batch in batches:
        epochs[plan.step(batch.step).epoch] += batch.rows.tolist()
    return epochs


def prints(batches: list[Batch]) -> list[tuple[int, dict[int, str]]]:
    """For each step, row -> hash of its pixels and label."""
    return [
        (
            batch.step,
            {
                int(row): hashlib.sha256(image.tobytes() + bytes([label])).hexdigest()
                for row, image, label in zip(batch.rows, batch.pixels, batch.labels, strict=True)
            },
        )
        for batch in batches
    ]


def test_later_epochs_have_images_too_each_once_in_another_order(
    shards: ShardSet, plan: Plan
) -> None:
    epochs = rows_by_epoch(plan, read(shards, plan))
    for rows in epochs:
        assert sorted(rows) == list(range(331))
    assert len({tuple(rows) for rows in epochs}) == EPOCHS


def test_the_last_batch_is_as_large_as_the_others(shards: ShardSet, plan: Plan) -> None:
    sizes = Counter(len(batch.rows) for batch in read(shards, plan))
    assert set(sizes) == {47, 48}
    assert sizes.total() == plan.num_steps == 7 * EPOCHS


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_more_workers_than_shards_see_disjoint_images_and_the_same_steps(
    shards: ShardSet, plan: Plan, workers: int
) -> None:
    shares = [prints(read(shards, plan, rank, workers)) for rank in range(workers)]
    assert {len(steps) for steps in shares} == {plan.num_steps}
    for step, alone in prints(read(shards, plan)):
        parts = [steps[step][1] for steps in shares]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert sum(map(len, parts)) == len(alone)
        assert {row: pixels for part in parts for row, pixels in part.items()} == alone


@pytest.mark.parametrize("start", [1, 5, 7, 11, 20])
def test_a_resumed_run_neither_repeats_nor_skips(shards: ShardSet, plan: Plan, start: int) -> None:
    """Stopped after `start` steps of 2 workers, gone on with by 3."""
    before = [prints(read(shards, plan, rank, 2))[:start] for rank in range(2)]
    after = [prints(read(shards, plan, rank, 3, start)) for rank in range(3)]
    steps: dict[int, dict[int, str]] = {}
    for steps_of_one in before + after:
        for step, part in steps_of_one:
            assert not steps.get(step, {}).keys() & part.keys()
            steps.setdefault(step, {}).update(part)
    assert sorted(steps.items()) == prints(read(shards, plan))


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [10, 256])
def test_103_validation_images_give_the_same_score(
    shards: ShardSet, workers: int, batch: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(14 * 14 * 3, len(shards.classes)))
    examiner = Examiner(
        build_loss(Loss()),
        NumberFormat(Precision(), "cpu"),
        Normalizer((0.5,) * 3, (0.25,) * 3, "cpu", channels_last=False),
        "cpu",
    )

    def score(rank: int, workers: int, batch: int) -> Score:
        offset, size = share(103, rank, workers)
        images = ValidationImages(shards, View(14, 0.875), batch, range(offset, offset + size))
        return examiner.score(model, read_with_threads(images, images.units(), 1))

    whole = score(0, 1, 103)
    scores = [score(rank, workers, batch) for rank in range(workers)]
    assert sum(score.images for score in scores) == whole.images == 103
    assert sum(score.top1 for score in scores) == whole.top1
    assert sum(score.top5 for score in scores) == whole.top5 == 103  # four classes
    assert sum(score.loss for score in scores) == pytest.approx(whole.loss, rel=1e-6)
    assert 0 < whole.top1 < 103


class Counted:
    """Training images that count how many units have been begun."""

    def __init__(self, images: TrainingImages) -> None:
        self._images = images
        self._lock = threading.Lock()
        self.begun = 0

    def read(self, steps: range) -> list[Batch]:
        with self._lock:
            self.begun += 1
        return list(self._images.read(steps))


def test_a_slow_worker_holds_no_more_than_its_few_units(shards: ShardSet, plan: Plan) -> None:
    images = Counted(TrainingImages(shards, plan))
    units = [range(s, s + 1) for s in range(plan.num_steps)]
    batches = read_with_threads(images, units, threads=2)  # type: ignore[arg-type]
    for taken in range(1, plan.num_steps + 1):
        next(batches)
        assert images.begun <= taken + 2
    assert next(batches, None) is None


def test_a_closed_reader_leaves_no_thread(shards: ShardSet, plan: Plan) -> None:
    images = TrainingImages(shards, plan)
    before = threading.active_count()
    batches = read_with_threads(images, images.units(0), threads=2)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert np.array_equal(next(images.read([0])).rows, images.rows(plan.step(0)))
