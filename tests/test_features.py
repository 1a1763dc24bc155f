"""BlurPool, mixup and zero-initialized residual blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from raytrain.data.reader import TrainingImages, read_with_threads
from raytrain.data.shards import ShardSet
from raytrain.learn.blur import blur, blur_before_strides
from raytrain.learn.mixup import Mixup
from raytrain.learn.models import build_model, small_resnet
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Model, Recipe
from raytrain.run.history import read_jsonl
from raytrain.train import Job, build_job_model
from raytrain.world import World
from tests.workers import train_with


def recipe_with(**sections: Any) -> Recipe:
    values: dict[str, Any] = {
        "model": {"name": "small_resnet", "args": {"width": 16}},
        "phases": [
            {"epochs": 1, "image_px": 16, "batch": 48},
            {"epochs": 1, "image_px": 24, "batch": 64},
        ],
        "schedule": {"lr": 0.05},
        "log": {"every_steps": 4},
    }
    return recipe_from_dict(values | sections)


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (1, 5, 1, 4)])
def test_blur_is_the_binomial_filter(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    line = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    kernel = torch.outer(line, line).expand(shape[1], 1, 3, 3)
    assert torch.allclose(blur(x), functional.conv2d(x, kernel, padding=1, groups=shape[1]))


def test_a_strided_convolution_of_the_blurred_is_the_blurred_convolution() -> None:
    """Zhang's order (convolve at full size, blur, take every second) inside the border."""
    x, kernel = (torch.randn(s, dtype=torch.float64) for s in ((1, 4, 16, 16), (6, 4, 3, 3)))
    ours = functional.conv2d(blur(x), kernel, stride=2, padding=1)
    zhangs = blur(functional.conv2d(x, kernel, padding=1))[:, :, ::2, ::2]
    assert torch.allclose(ours[:, :, 2:-2, 2:-2], zhangs[:, :, 2:-2, 2:-2])


def test_blurpool_finds_the_strided_convolutions_and_keeps_the_names() -> None:
    torch.manual_seed(0)
    model = build_model(Model(name="resnet18"), 7)
    x, names = torch.randn(2, 3, 64, 64), list(model.state_dict())
    sharp = model.eval()(x)
    assert blur_before_strides(model) == 6  # in 3 stages: a block's first and its shortcut
    assert list(model.state_dict()) == names
    assert not torch.allclose(model(x), sharp)


def test_a_recipe_turns_blurpool_on(drawn_set: Path, tmp_path: Path) -> None:
    shards, x = ShardSet.open(drawn_set), torch.randn(2, 3, 24, 24)

    def output(**model: Any) -> torch.Tensor:
        torch.manual_seed(0)
        recipe = recipe_with(model={"name": "small_resnet", "args": {"width": 16}, **model})
        result: torch.Tensor = build_job_model(Job(recipe, shards, tmp_path))(x)
        return result

    assert torch.equal(output(), output(blurpool=False))
    assert not torch.allclose(output(), output(blurpool=True))


def test_zero_init_makes_each_block_the_identity() -> None:
    model = small_resnet(4, width=8, zero_init_residual=True)
    blocks = [m for m in model.modules() if type(m).__name__ == "_Residual"]
    assert len(blocks) == 3
    for block, channels in zip(blocks, (8, 16, 32), strict=True):
        x = torch.rand(2, channels, 4, 4)
        assert torch.equal(block(x), x)


@pytest.mark.parametrize("name", ["resnet18", "small_resnet"])
def test_zero_init_is_an_argument_of_the_model(name: str) -> None:
    plain = build_model(Model(name=name), 4)
    zeroed = build_model(Model(name=name, args={"zero_init_residual": True}), 4)

    def zero_gains(model: nn.Module) -> int:
        norms = (m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        return sum(not norm.weight.any() for norm in norms)

    assert zero_gains(plain) == 0
    assert zero_gains(zeroed) == (8 if name == "resnet18" else 3)


def mixed_step(plan: Plan, shards: ShardSet, s: int, workers: int) -> tuple[torch.Tensor, ...]:
    """A step's pixels and class shares as its workers make them, put together."""
    step = plan.step(s)
    parts = []
    for rank in range(workers):
        images = TrainingImages(shards, plan, rank, workers)
        (batch,) = read_with_threads(images, [range(s, s + 1)], 1)
        pixels, labels = torch.from_numpy(batch.pixels), torch.from_numpy(batch.labels)
        mixup = Mixup(plan, len(shards.classes))
        parts.append(mixup(pixels, labels, step, World(rank=rank, size=workers)))
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


@pytest.mark.parametrize("s", [0, 5, 8])
def test_mixed_images_dont_depend_on_the_number_of_workers(drawn_set: Path, s: int) -> None:
    shards = ShardSet.open(drawn_set)
    plan = Plan(recipe_with(augment={"mixup": 0.4}), shards.num_images("train"))
    pixels, shares = mixed_step(plan, shards, s, 1)
    assert len(pixels) == plan.step(s).count
    for workers in (2, 3, 5):
        other_pixels, other_shares = mixed_step(plan, shards, s, workers)
        assert torch.equal(other_pixels, pixels)
        assert torch.equal(other_shares, shares)


def test_each_image_is_mixed_with_its_neighbour() -> None:
    plan = Plan(recipe_with(augment={"mixup": 1.0}), 47)  # 1 step of 47 images an epoch
    step = plan.step(0)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (47, 4, 4, 3), dtype=torch.uint8, generator=generator)
    labels = torch.arange(47) % 5
    mixed, shares = Mixup(plan, 47)(pixels, torch.arange(47), step, World())
    assert torch.allclose(shares.sum(1), torch.ones(47))
    for i in range(46):
        own, other = shares[i, i].item(), shares[i, i ^ 1].item()
        assert 0.5 <= own <= 1
        assert own + other == pytest.approx(1, rel=1e-6)
        expected = own * pixels[i].double() + other * pixels[i ^ 1].double()
        assert (mixed[i].double() - expected).abs().max() <= 0.5 + 1e-3
    assert torch.equal(mixed[46], pixels[46])  # without a neighbour
    assert len({round(shares[i, i].item(), 6) for i in range(0, 46, 2)}) == 23
    again = Mixup(plan, 5)(pixels, labels, plan.step(1), World())[1]
    assert not torch.equal(again, Mixup(plan, 5)(pixels, labels, step, World())[1])


def test_shares_of_a_step_cover_it_in_whole_pairs() -> None:
    for mixup in (0.0, 0.2):
        plan = Plan(recipe_with(augment={"mixup": mixup}), 47 * 3)
        step = plan.step(1)
        for workers in range(1, plan.min_count + 1):
            shares = [plan.share_of(step, rank, workers) for rank in range(workers)]
            assert all(size > 0 for _, size in shares)
            assert [offset for offset, _ in shares] == [
                0,
                *np.cumsum([size for _, size in shares])[:-1],
            ]
            assert sum(size for _, size in shares) == step.count
            assert mixup == 0 or all(offset % 2 == 0 for offset, _ in shares)


def test_training_with_mixup_is_the_same_for_two_workers(drawn_set: Path, tmp_path: Path) -> None:
    recipe = recipe_with(augment={"mixup": 0.4}, loss={"label_smoothing": 0.1})
    train_with(1, recipe, drawn_set, tmp_path / "one")
    train_with(2, recipe, drawn_set, tmp_path / "two")
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-5)
    assert [row["top1"] for row in two] == [row["top1"] for row in one]
