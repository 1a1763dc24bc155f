"""The record recipes against what was published of them, epoch by epoch and step by step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raytrain.recipe.load import load_recipe
from raytrain.recipe.plan import Plan, Step
from raytrain.run.dawnbench import read_entry

IMAGES = 1_281_167
DAWNBENCH = Path(__file__).parents[2] / "shared" / "data" / "dawnbench"

ENTRIES = {
    "moxing-2018-10m28s": "huaweicloud_resnet50_modelarts_10m28",
    "moxing-2019-162s": "huaweicloud_resnet50_modelarts_16_machine_tensorflow18",
    "aiacc-16x8-v100-158s": "alibabacloud_resnet50_gn6e_16_machine_tensorflow",
    "aiacc-1x8-v100": "alibabacloud_resnet50_gn6e_1_machine_tensorflow",
    "fastai-16x8-v100-18min": "fastai_resnet50_p3_16_machine_pytorch",
}

# (epochs, image_px, batch) of each stage, by the entries and by FFCV's rn50_16_epochs
STAGES = {
    "moxing-2018-10m28s": [(21, 128, 28672), (21, 224, 28672), (2, 288, 16384)],
    "moxing-2019-162s": [(15, 96, 32768), (16, 128, 32768), (4, 224, 32768), (1, 288, 16384)],
    "aiacc-16x8-v100-158s": [(13, 96, 32768), (11, 128, 32768), (3, 224, 32768), (1, 288, 16384)],
    "aiacc-1x8-v100": [(12, 96, 2048), (6, 128, 2048), (2, 224, 2048), (1, 288, 1024)],
    "fastai-16x8-v100-18min": [
        *((6, 128, 8192), (10, 128, 16384)),
        *((3, 224, 8192), (18, 224, 24576), (3, 288, 16384)),
    ],
    "imagenet-resnet50": [(12, 160, 4096), (4, 192, 4096)],
}


def plan_of(name: str) -> Plan:
    return Plan(load_recipe(name), IMAGES)


def each_epoch(stages: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [tuple(values) for epochs, *values in stages for _ in range(epochs)]


def steps_of(plan: Plan) -> list[Step]:
    return [plan.step(s) for s in range(plan.num_steps)]


@pytest.mark.parametrize("name", STAGES)
def test_image_size_batch_and_steps_of_each_epoch(name: str) -> None:
    plan = plan_of(name)
    epochs = each_epoch(STAGES[name])
    steps: list[list[Step]] = [[] for _ in epochs]
    for step in steps_of(plan):
        steps[step.epoch].append(step)
    for epoch, (image_px, batch) in zip(steps, epochs, strict=True):
        assert {step.image_px for step in epoch} == {image_px}
        assert len(epoch) == math.ceil(IMAGES / batch)
        assert sum(step.count for step in epoch) == IMAGES
        assert batch - 1 - batch / len(epoch) <= min(step.count for step in epoch)
        assert max(step.count for step in epoch) <= batch
    assert plan.num_steps == sum(math.ceil(IMAGES / batch) for _, batch in epochs)


def linear_cosine(low: float, high: float, step: int, steps: int) -> float:
    """MoXing's schedule by its arguments: warmup 0.1, decay_end 1 - cooldown 0.08, in steps."""
    warmup, decay_end = 0.1 * steps, 0.92 * steps
    if step < warmup:
        return low + (high - low) * step / warmup
    t = min((step - warmup) / (decay_end - warmup), 1.0)
    return low + (high - low) * (1 - t) * (1 + math.cos(math.pi * t)) / 2


def triangle(low: float, high: float, epoch: float, peak: float, epochs: float) -> float:
    if epoch < peak:
        return low + (high - low) * epoch / peak
    return high + (low - high) * (epoch - peak) / (epochs - peak)


def fastai(epoch: float) -> float:
    """`sixteen_machines` of the entry's code, with its lr of 0.235 x 8."""
    lr = 0.235 * 8
    if epoch < 6:
        return lr + lr * epoch / 6
    rates = {16: 2 * lr, 19: lr, 31: 2 * lr / (10 / 1.5), 37: 2 * lr / (100 / 1.5)}
    rates |= {38: 2 * lr / 100, 50: 2 * lr / 1000}
    return next(rate for until, rate in rates.items() if epoch < until)


LEARNING_RATES: dict[str, Callable[[Step], float]] = {
    "moxing-2018-10m28s": lambda step: linear_cosine(0.05, 8.5, step.index, 2048),
    "moxing-2019-162s": lambda step: linear_cosine(0.2, 28.0, step.index, 1479),
    "aiacc-16x8-v100-158s": lambda step: triangle(0.2, 25.0, step.epoch_progress, 14, 28),
    "aiacc-1x8-v100": lambda step: triangle(0.0001, 1.2, step.epoch_progress, 5, 21),
    "fastai-16x8-v100-18min": lambda step: fastai(step.epoch_progress),
    "imagenet-resnet50": lambda step: (
        1.7 * triangle(1e-4, 1.0, step.epoch_progress, 2, 16)
        if step.epoch_progress < 2
        else 1.7 * triangle(0.0, 1.0, step.epoch_progress, 2, 16)
    ),
}
# (least, most) learning rate and momentum
RANGES = {
    "moxing-2018-10m28s": ((0.05, 8.5), (0.9, 0.98)),
    "moxing-2019-162s": ((0.2, 28.0), (0.9, 0.98)),
    "aiacc-16x8-v100-158s": ((0.2, 25.0), (0.9, 0.98)),
    "aiacc-1x8-v100": ((0.0001, 1.2), (0.9, 0.96)),
}


@pytest.mark.parametrize("name", STAGES)
def test_learning_rate_at_each_step(name: str) -> None:
    for step in steps_of(plan_of(name)):
        expected = LEARNING_RATES[name](step)
        assert step.lr == pytest.approx(expected, rel=2e-4, abs=1e-9), step


@pytest.mark.parametrize("name", STAGES)
def test_momentum_moves_against_the_learning_rate(name: str) -> None:
    steps = steps_of(plan_of(name))
    if name not in RANGES:
        assert {step.momentum for step in steps} == {0.9}
        return
    (low, high), (least, most) = RANGES[name]
    for step in steps:
        share = (step.lr - low) / (high - low)
        assert step.momentum == pytest.approx(most - share * (most - least), rel=1e-9)


def published(name: str) -> dict[str, Any]:
    path = DAWNBENCH / f"{ENTRIES[name]}.json"
    if not path.is_file():
        pytest.skip(f"no {path}: the published entries aren't here")
    misc: dict[str, Any] = json.loads(path.read_text())["misc"]
    return misc


@pytest.mark.parametrize("name", ENTRIES)
def test_the_entrys_own_json_says_the_same(name: str) -> None:
    misc, recipe = published(name), load_recipe(name)
    sizes = each_epoch([(s["epochs"], s["image_size"]) for s in misc["imageSize"]])
    batches = each_epoch([(s["epochs"], s["batch_size"]) for s in misc["batchSize"]])
    assert each_epoch(STAGES[name]) == [a + b for a, b in zip(sizes, batches, strict=True)]
    (decay,) = {step.weight_decay for step in steps_of(plan_of(name))}
    assert decay == misc.get("weight_decay", misc.get("weightDecay"))
    assert recipe.loss.label_smoothing == misc.get("smooth_label", 0.0)
    nesterov = recipe.optimizer.name == "nag" or recipe.optimizer.nesterov
    assert nesterov == misc.get("use_nesterov", False)
    uses_lars = misc.get("use_lars", "LARS" in misc["optimizer"])
    assert uses_lars == (recipe.optimizer.name == "lars")
    if name in RANGES:
        schedule, ((low, high), _) = misc["schedule"], RANGES[name]
        assert (low, high) == (schedule["min_lr"], schedule["max_lr"])
    floors = {s["image_size"]: s["min_scale"] for s in misc["imageSize"] if "min_scale" in s}
    for phase in recipe.phases:
        assert phase.crop_area == (floors.get(phase.image_px, phase.crop_area[0]), 1.0)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("moxing-2019-162s", ("max_momentum", "min_momentum")),
        ("aiacc-1x8-v100", ("max_momentum", "min_momentum")),
        ("aiacc-16x8-v100-158s", ("schedule.max_momentum", "schedule.min_momentum")),
    ],
)
def test_the_momentum_range_is_the_published_one(name: str, keys: tuple[str, str]) -> None:
    misc = published(name)
    values = [misc["schedule"][k[9:]] if k.startswith("schedule.") else misc[k] for k in keys]
    _, (least, most) = RANGES[name]
    assert values == [most, least]


def test_the_bounds_of_lars_are_the_published_ones() -> None:
    misc, optimizer = (
        published("aiacc-16x8-v100-158s"),
        load_recipe("aiacc-16x8-v100-158s").optimizer,
    )
    assert optimizer.eta == misc["etta"]
    assert optimizer.trust_ratio == (misc["min_trust_ratio"], misc["max_trust_ratio"])


def test_the_rates_of_fast_ais_code_are_those_that_its_accuracies_show() -> None:
    """Its JSON differs from its code; top-1 rises most where the rates of the code fall."""
    misc = published("fastai-16x8-v100-18min")
    listed = [row["learning_rate"] for row in misc["schedule"]]
    rates = [phase.values[0] for phase in load_recipe("fastai-16x8-v100-18min").schedule.lr.root]
    assert listed[0][0] == rates[0]
    assert listed[1][0] == rates[2]  # the second rate, 3.76, is missing
    assert listed[2][0] == pytest.approx(rates[3] / 1.5**2, rel=1e-6)
    assert listed[3][0] == pytest.approx(rates[4] / 1.5**2, rel=1e-6)
    path = DAWNBENCH / ENTRIES["fastai-16x8-v100-18min"]
    points = read_entry(path.with_suffix(".json"), path.with_suffix(".tsv")).points
    late = [(b.top1 - a.top1, round(a.epoch)) for a, b in pairwise(points) if a.epoch > 17]
    assert {epoch for _, epoch in sorted(late)[-2:]} == {19, 31}


def test_tensorflows_linear_cosine_decay_is_the_same_shape() -> None:
    """tf.train.linear_cosine_decay with num_periods 0.5, alpha 0 and beta = b / (a - b)."""
    piece = {"until": "end", "linear_cosine": [8.5, 0.05]}
    recipe = load_recipe("moxing-2018-10m28s", [f"schedule.lr=[{json.dumps(piece)}]"])
    rate, beta = 8.5 - 0.05, 0.05 / (8.5 - 0.05)
    curve = recipe.schedule.lr.resolve(44)
    for epoch in (0.0, 1.0, 11.0, 22.0, 33.5, 44.0):
        linear, cosine = (44 - epoch) / 44, 0.5 * (1 + math.cos(math.pi * epoch / 44))
        assert curve.at(epoch) == pytest.approx(rate * (linear * cosine + beta), rel=1e-12)
