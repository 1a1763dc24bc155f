from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raytrain.data.reader import (
    Batch,
    TrainingImages,
    ValidationImages,
    View,
    read_with_threads,
)
from raytrain.data.shards import ShardSet
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan, share

RECIPE = {
    "model": {"name": "not.used:here"},
    "phases": [
        {"epochs": 1, "image_px": 16, "batch": 50},
        {"epochs": 1, "image_px": 24, "batch": 120},
    ],
    "schedule": {"lr": 0.1},
    "input": {"window_blocks": 5},
}


@pytest.fixture(scope="module")
def shards(drawn_set: Path) -> ShardSet:
    return ShardSet.open(drawn_set)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(recipe_from_dict(RECIPE), 331)


def test_units_cover_the_rest_of_the_run_in_order(shards: ShardSet, plan: Plan) -> None:
    images = TrainingImages(shards, plan, 0, 1)
    for start in (0, 3, plan.num_steps - 1, plan.num_steps):
        steps = [s for unit in images.units(start) for s in unit]
        assert steps == list(range(start, plan.num_steps))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_give_the_batches_in_order(shards: ShardSet, plan: Plan, threads: int) -> None:
    images = TrainingImages(shards, plan, 0, 1)
    units = [range(s, s + 1) for s in range(plan.num_steps)]
    batches = list(read_with_threads(images, units, threads))
    assert [batch.step for batch in batches] == list(range(plan.num_steps))
    for batch in batches:
        step = plan.step(batch.step)
        assert batch.pixels.shape == (step.count, step.image_px, step.image_px, 3)
        assert batch.pixels.dtype == np.uint8
        assert batch.pixels.std() > 10


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_shares_are_the_step_and_its_pixels(
    shards: ShardSet, plan: Plan, workers: int
) -> None:
    """Every worker's images are those that one worker alone would have seen, to the pixel."""
    alone = TrainingImages(shards, plan, 0, 1)
    for whole in alone.read([2, plan.num_steps - 1]):
        parts = [
            part
            for rank in range(workers)
            for part in TrainingImages(shards, plan, rank, workers).read([whole.step])
        ]
        for name in ("rows", "labels", "pixels"):
            together = np.concatenate([getattr(part, name) for part in parts])
            assert (together == getattr(whole, name)).all()


def test_labels_belong_to_their_rows(shards: ShardSet, plan: Plan) -> None:
    labels = np.concatenate(
        [
            shards.read_block("train", None, block).column("label").to_numpy()
            for block in shards.blocks("train")
        ]
    )
    for batch in TrainingImages(shards, plan, 0, 1).read([0, 8]):
        assert (labels[batch.rows] == batch.labels).all()


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 10, 103, 256])
def test_validation_images_come_once_whoever_shares_them(
    shards: ShardSet, workers: int, batch: int
) -> None:
    seen: list[Batch] = []
    for rank in range(workers):
        offset, size = share(103, rank, workers)
        images = ValidationImages(shards, View(24, 1.0), batch, range(offset, offset + size))
        seen += read_with_threads(images, images.units(), 2)
    assert sorted(np.concatenate([b.rows for b in seen]).tolist()) == list(range(103))
    assert max(len(b.rows) for b in seen) <= batch


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("batch", [4, 64])
def test_rectangles_are_batched_by_shape_and_do_not_depend_on_who_reads_them(
    shards: ShardSet, workers: int, batch: int
) -> None:
    seen: dict[int, np.ndarray] = {}
    for rank in range(workers):
        offset, size = share(103, rank, workers)
        view = View(24, 0.875, rectangular=True)
        images = ValidationImages(shards, view, batch, range(offset, offset + size))
        for found in read_with_threads(images, images.units(), 2):
            assert len(found.rows) <= batch
            seen |= dict(zip(found.rows.tolist(), found.pixels, strict=True))
    assert sorted(seen) == list(range(103))
    alone = ValidationImages(shards, View(24, 0.875, rectangular=True), 1000, range(103))
    shapes = set()
    for whole in alone.read([0]):
        shapes.add(whole.pixels.shape[1:3])
        assert min(whole.pixels.shape[1:3]) == 24
        for row, pixels in zip(whole.rows.tolist(), whole.pixels, strict=True):
            np.testing.assert_array_equal(pixels, seen[row])
    assert len(shapes) > 2, "the drawn images have several aspect ratios"
