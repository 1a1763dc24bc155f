"""The moving average of weights: its formula, its checkpoints, and what counts for the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raytrain.data.shards import ShardSet
from raytrain.inline import run_inline
from raytrain.learn.average import WeightAverage
from raytrain.learn.models import small_cnn
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.types import Ema, Recipe
from raytrain.run.history import read_jsonl
from raytrain.run.rows import ValidationRow, meets
from raytrain.train import Job
from tests.workers import train_with


def recipe_with(**sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"name": "small_cnn", "args": {"width": 4}},
        "phases": [
            {"epochs": 2, "image_px": 16, "batch": 64},
            {"epochs": 1, "image_px": 16, "batch": 100},
        ],
        "schedule": {"lr": 0.05},
        "ema": {"decay": 0.9, "every_steps": 2},
        "log": {"every_steps": 4},
    }
    return recipe_from_dict(values | sections)


def test_the_average_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    model = small_cnn(3, width=2)
    average = WeightAverage(model, Ema(decay=0.5, every_steps=3))
    expected = {k: v.double() for k, v in model.state_dict().items()}
    for steps in range(1, 20):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(torch.randn_like(tensor.float()).to(tensor.dtype))
        average.update(model, steps)
        if steps % 3 == 0:
            n = steps // 3
            keep = min(0.5, (1 + n) / (10 + n))
            for key, value in model.state_dict().items():
                whole = not value.is_floating_point()
                mixed = keep * expected[key] + (1 - keep) * value.double()
                expected[key] = value.double() if whole else mixed
    for key, value in average.model.state_dict().items():
        assert torch.allclose(value.double(), expected[key], rtol=1e-5, atol=1e-6), key


def test_without_it_nothing_is_kept_or_told(drawn_set: Path, tmp_path: Path) -> None:
    recipe = recipe_with(ema={}, checkpoint={"keep": 9})
    run_inline(Job(recipe, ShardSet.open(drawn_set), tmp_path), "cpu", None)
    assert list(tmp_path.glob("checkpoints/*/ema")) == []
    rows = read_jsonl(tmp_path / "validations.jsonl")
    assert [(row["ema_top1"], row["ema_top5"]) for row in rows] == [(None, None)] * 3


def test_both_are_validated_and_the_average_is_what_is_kept(
    drawn_set: Path, tmp_path: Path
) -> None:
    recipe = recipe_with(checkpoint={"keep": 9})
    result = run_inline(Job(recipe, ShardSet.open(drawn_set), tmp_path), "cpu", None)
    rows = read_jsonl(tmp_path / "validations.jsonl")
    assert all(0 <= row[key] <= 1 for row in rows for key in ("top1", "ema_top1", "ema_top5"))
    assert any(row["top1"] != row["ema_top1"] for row in rows)
    assert result.summary.top1 == rows[-1]["ema_top1"]
    best = max(rows, key=lambda row: row["ema_top1"])
    checkpoint = tmp_path / "checkpoints" / f"step-{best['step']:08d}"
    average = load_file(checkpoint / "ema/model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[key], average[key]) for key in average)
    raw = load_file(checkpoint / "model.safetensors")
    assert any(not torch.equal(raw[key], average[key]) for key in average)


def test_the_target_asks_for_the_averages_accuracy() -> None:
    def row(top1: float, ema_top1: float | None) -> ValidationRow:
        return ValidationRow(
            step=1,
            epoch=1.0,
            seconds=1.0,
            top1=top1,
            top5=0.9,
            loss=1.0,
            num_images=10,
            ema_top1=ema_top1,
            ema_top5=None if ema_top1 is None else 0.9,
        )

    assert meets({"top1": 0.7}, row(0.8, None))
    assert meets({"top1": 0.7, "top5": 0.9}, row(0.6, 0.7))
    assert not meets({"top1": 0.7}, row(0.8, 0.6))


def test_it_is_the_same_after_a_resume_with_other_workers(drawn_set: Path, tmp_path: Path) -> None:
    recipe = recipe_with(checkpoint={"every_steps": 4})
    alone, resumed = tmp_path / "alone", tmp_path / "resumed"
    train_with(1, recipe, drawn_set, alone)
    train_with(2, recipe, drawn_set, resumed, stop_after=5)
    train_with(1, recipe, drawn_set, resumed)
    ours, theirs = (newest_average(run_dir) for run_dir in (resumed, alone))
    for key, value in theirs.items():
        assert torch.allclose(ours[key], value, rtol=1e-4, atol=1e-6), key
    last, other_last = (read_jsonl(d / "validations.jsonl")[-1] for d in (resumed, alone))
    assert last["ema_top1"] == other_last["ema_top1"]


def newest_average(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(max(run_dir.glob("checkpoints/step-*")) / "ema/model.safetensors")


def test_the_average_shares_nothing_with_the_model() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, Ema(decay=0.9))
    assert not any(p.requires_grad for p in average.model.parameters())
    before = average.model.get_parameter("weight").clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(average.model.get_parameter("weight"), before)


@pytest.mark.parametrize("decay", [0, 1, -0.5])
def test_a_decay_is_a_share(decay: float) -> None:
    with pytest.raises(Exception, match=r"ema\.decay"):
        recipe_with(ema={"decay": decay})
