"""Number formats, the loss scale and its collapse, clipping, tf32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.inline import run_inline
from raytrain.learn.precision import NumberFormat, allow_tf32
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Precision, Recipe
from raytrain.run.checkpoint import CheckpointFolder
from raytrain.run.history import read_jsonl
from raytrain.run.meter import Meter, tally
from raytrain.train import Job
from raytrain.world import World
from tests.workers import train_with


def recipe_with(**sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"name": "small_cnn", "args": {"width": 4}},
        "phases": [{"epochs": 2, "image_px": 16, "batch": 64}],
        "schedule": {"lr": 0.05},
        "log": {"every_steps": 4},
    }
    return recipe_from_dict(values | sections)


def test_a_step_that_overflows_is_left_out_and_the_scale_goes_down() -> None:
    number_format = NumberFormat(Precision(dtype="fp16", loss_scale=2.0**10), "cpu")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for factor in (1.0, float("inf"), 1.0):
        number_format.scaler.scale((weight * factor).sum()).backward()
        scales.append(number_format.scale().item())
        number_format.step(optimizer)
    assert scales == [1024.0, 1024.0, 512.0]
    assert torch.equal(weight.detach(), torch.full((2,), -1.0))  # two steps, not three


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_clipping_bounds_the_norm_of_all_gradients_together(dtype: str) -> None:
    number_format = NumberFormat(Precision.model_validate({"dtype": dtype}), "cpu")
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for given, taken in ((3.0, 2.0), (0.5, 0.5)):
        before = [w.detach().clone() for w in weights]
        unit = 7**-0.5 * given
        loss = unit * torch.stack([w.sum() for w in weights]).sum()
        number_format.scaler.scale(loss).backward()
        number_format.step(optimizer, clip_norm=2.0)
        moved = torch.cat([(w - b).flatten() for w, b in zip(weights, before, strict=True)])
        assert moved.norm().item() == pytest.approx(taken, rel=1e-5)


def test_clipping_is_the_same_for_every_number_of_workers(drawn_set: Path, tmp_path: Path) -> None:
    clipped = recipe_with(optimizer={"clip_norm": 0.05})
    train_with(1, recipe_with(), drawn_set, tmp_path / "free")
    train_with(1, clipped, drawn_set, tmp_path / "alone")
    train_with(2, clipped, drawn_set, tmp_path / "two")
    free, alone, two = (losses(tmp_path / name) for name in ("free", "alone", "two"))
    assert two == pytest.approx(alone, rel=1e-5)
    assert alone[-1] - free[-1] > 0.01


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl")]


def test_the_loss_scale_is_in_metrics_and_checkpoint(drawn_set: Path, tmp_path: Path) -> None:
    """It begins too high for this model, and comes down in the first steps."""
    recipe = recipe_with(precision={"dtype": "fp16", "loss_scale": 2.0**26})
    run_inline(Job(recipe, ShardSet.open(drawn_set), tmp_path), "cpu", None)
    scales = [row["loss_scale"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert scales[0] == 2.0**26
    assert scales[-1] < scales[0]
    newest = CheckpointFolder(tmp_path / "checkpoints", 2).newest(pytest.fail)
    assert newest is not None
    saved = newest.load_training()["scaler"]
    resumed = NumberFormat(recipe.precision, "cpu")
    resumed.scaler.load_state_dict(saved)
    assert resumed.scaler.get_scale() == saved["scale"] <= scales[-1]


class Steps:
    """A meter that is told of made-up steps."""

    def __init__(self, **sections: Any) -> None:
        phases = [
            {"epochs": 1, "image_px": 16, "batch": 4},
            {"epochs": 1, "image_px": 16, "batch": 4},
        ]
        self.plan = Plan(recipe_with(phases=phases, **sections), 160)
        self.meter = Meter(self.plan, 0.0)

    def tell(self, scales: list[float], losses: list[float] | None = None, start: int = 0) -> None:
        for i, scale in enumerate(scales):
            loss = torch.tensor(losses[i] if losses else 1.0)
            sums = (loss, torch.tensor(1))
            told = tally(sums, 0.0, torch.tensor(scale), 1.0 + i, False, World())
            self.meter.add(self.plan.step(start + i), 1, told)
        self.meter.rows(lambda tallies: tallies)


FP16 = {"dtype": "fp16", "loss_scale": 1024.0}


def test_twenty_steps_in_a_row_left_out_end_the_run() -> None:
    steps = Steps(precision=FP16)
    falling = [2.0 ** (16 - i) for i in range(21)]
    steps.tell(falling[:10], start=38)  # also when they are told in two parts
    with pytest.raises(RaytrainError) as told:
        steps.tell(falling[10:], start=48)
    says = str(told.value)
    assert "20 steps in a row were left out before step 58 (epoch 1, phases[1], lr 0.05" in says
    assert "precision.dtype=bf16" in says
    assert "\n" not in says


def test_steps_left_out_now_and_then_do_no_harm() -> None:
    steps = Steps(precision=FP16)
    steps.tell([2.0 ** (16 - i // 2) for i in range(40)])


def test_a_collapsed_loss_scale_ends_the_run() -> None:
    steps = Steps(precision=FP16)
    with pytest.raises(
        RaytrainError, match=r"loss scale fell to 3.05176e-05 at step 2 .*phases\[0\]"
    ):
        steps.tell([2.0**-13, 2.0**-14, 2.0**-15])


@pytest.mark.parametrize(("dtype", "hint"), [("fp32", False), ("fp16", True)])
def test_a_loss_that_isnt_finite_ends_the_run(dtype: str, hint: bool) -> None:
    steps = Steps(precision={"dtype": dtype})
    with pytest.raises(
        RaytrainError, match=r"the loss is nan at step 1 \(epoch 0, phases\[0\]"
    ) as told:
        steps.tell([1.0, 1.0], [1.0, float("nan")])
    assert ("bf16" in str(told.value)) == hint


def test_tf32_is_set_and_unset() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for allowed in (True, False):
            allow_tf32(allowed)
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            assert torch.backends.cudnn.allow_tf32 is allowed
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_a_loss_scale_belongs_to_fp16() -> None:
    with pytest.raises(RaytrainError, match="precision: loss_scale is a setting of dtype fp16"):
        recipe_with(precision={"dtype": "bf16", "loss_scale": 8.0})
