"""The same run for 1, 2 and 3 workers, and for one that was stopped and resumed with others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.workers import train_with

RECIPE = """
model: {name: "not.used:here"}
seed: 3
phases:
  - {epochs: 2, image_px: 16, batch: 64, crop_area: [0.5, 1.0]}
  - {epochs: 1, image_px: 24, batch: 100, crop_area: [0.5, 1.0]}
schedule:
  lr: [{until: 30%, linear: [0.01, 0.1]}, {until: end, cosine: [0.1, 0.01]}]
  momentum: [{until: end, linear: [0.9, 0.8]}]
  weight_decay: 1.0e-4
loss: {label_smoothing: 0.1}
memory: {images_per_pass: 29}
input: {audit: true, window_blocks: 6}
log: {every_steps: 4}
"""


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipe_from_dict(yaml.safe_load(RECIPE))


@pytest.fixture(scope="module")
def alone(recipe: Recipe, drawn_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train_with(1, recipe, drawn_set, run_dir)
    return run_dir


def assert_same_run(run_dir: Path, alone: Path) -> None:
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (run_dir, alone))
    assert [row["step"] for row in ours] == list(range(len(theirs)))
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for key in ("lr", "momentum", "weight_decay", "batch", "image_px", "epoch"):
            assert row[key] == other[key]
    assert used_rows(run_dir) == used_rows(alone)
    last, other_last = (read_jsonl(d / "validations.jsonl")[-1] for d in (run_dir, alone))
    assert last["num_images"] == other_last["num_images"] == 103
    assert last["loss"] == pytest.approx(other_last["loss"], rel=1e-5)


def test_each_epoch_uses_each_image_once(alone: Path) -> None:
    epochs: dict[int, list[int]] = {}
    used = used_rows(alone)
    for row in read_jsonl(alone / "metrics.jsonl"):
        epochs.setdefault(row["epoch"], []).extend(used[row["step"]])
    assert len(epochs) == 3
    for rows in epochs.values():
        assert sorted(rows) == list(range(331))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers(
    workers: int, alone: Path, recipe: Recipe, drawn_set: Path, tmp_path: Path
) -> None:
    train_with(workers, recipe, drawn_set, tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)


def test_resumed_in_mid_epoch_with_other_workers(
    alone: Path, recipe: Recipe, drawn_set: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    saving = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"every_steps": 4})}
    )
    train_with(3, saving, drawn_set, run_dir, stop_after=5)
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == 8  # of 6 steps an epoch
    train_with(2, saving, drawn_set, run_dir)
    assert_same_run(run_dir, alone)
