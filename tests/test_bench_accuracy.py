"""`raytrain bench accuracy`: who is compared, how runs are paired, and what is kept of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from raytrain.bench.accuracy import (
    OURS,
    AccuracyReport,
    Run,
    ablated,
    bench_accuracy,
    contenders,
    sign_flip_p,
)
from raytrain.bench.rivals import RIVALS, Settings, train_rival
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.recipe.load import load_recipe, recipe_differences, recipe_from_dict
from raytrain.recipe.types import Recipe

SMALL = {
    "model": {"name": "small_cnn", "args": {"width": 8}},
    "phases": [
        {"epochs": 2, "image_px": 16, "batch": 32},
        {"epochs": 1, "image_px": 24, "batch": 64},
    ],
    "schedule": {"lr": 0.1, "momentum": [{"until": "end", "linear": [0.95, 0.8]}]},
    "validation": {"crop_ratio": 1.0},
    "target": {"top1": 0.99},
}


@pytest.fixture
def recipe() -> Recipe:
    return recipe_from_dict(SMALL)


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("progressive-resizing", ["phases[0].image_px: 16 -> 24"]),
        ("batch-schedule", ["phases[1].batch: 64 -> 32"]),
        ("rectangular-validation", []),
        ("ema", []),
        ("label-smoothing", []),
    ],
)
def test_an_ablation_turns_one_thing_off(recipe: Recipe, feature: str, changes: list[str]) -> None:
    assert recipe_differences(recipe, ablated(recipe, feature)) == changes


def test_dynamic_momentum_is_replaced_by_a_constant(recipe: Recipe) -> None:
    (change,) = recipe_differences(recipe, ablated(recipe, "dynamic-momentum"))
    assert change.startswith("schedule.momentum")
    assert change.endswith("0.9")


def test_ablations_that_change_nothing_are_named_and_not_run(recipe: Recipe) -> None:
    found, same = contenders(recipe, ["plain:epochs=7:lr=0.2", "timm", "ablations"])
    assert [c.name for c in found] == [
        OURS,
        "plain:epochs=7:lr=0.2",
        "timm",
        "without progressive-resizing",
        "without dynamic-momentum",
        "without batch-schedule",
    ]
    assert same == ["rectangular-validation", "ema", "label-smoothing"]


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("keras", "--against keras: no such rival; known: plain, timm, ablations, without-"),
        ("without-luck", "--against without-luck: no such rival"),
        ("plain:epoch=3", "--against: epoch=3: unknown key; known here: epochs, px, batch"),
        ("plain:lr=fast", "--against: lr=fast: 'fast' is no number"),
    ],
)
def test_a_wrong_rival_is_one_line(recipe: Recipe, against: str, message: str) -> None:
    with pytest.raises(RaytrainError) as caught:
        contenders(recipe, [against])
    assert message in str(caught.value)


def test_a_recipe_without_a_target_is_refused() -> None:
    with pytest.raises(RaytrainError, match=r"no target\.top1"):
        contenders(load_recipe("imagenet-resnet50", ["target={}"]), ["plain"])


def test_sign_flips_are_counted_exactly() -> None:
    assert sign_flip_p([1.0] * 5) == pytest.approx(2 / 32)
    assert sign_flip_p([-2.0, -1.0, -3.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([1.0, -1.0]) == 1.0
    # sums of +-3 +-2 +-1: 6 4 2 0 and their negatives; at least as far as 4 are 4 of 8
    assert sign_flip_p([3.0, 2.0, -1.0]) == pytest.approx(4 / 8)


def run(contender: str, seed: int, seconds: float, reached: bool = True) -> Run:
    return Run(contender, seed, seconds, reached, 3.0, 0.8, seconds, 1.0)


def test_the_table_pairs_runs_by_seed_and_marks_missed_targets() -> None:
    runs = [run(OURS, 0, 10), run("plain", 1, 60), run(OURS, 1, 20), run("plain", 0, 20)]
    runs += [run("slow", seed, 100.0, reached=False) for seed in (0, 1)]
    report = AccuracyReport("2026-01-01", {"cpu": "x"}, {}, "set", 0.75, ("ema",), tuple(runs))
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(report.table())
    lines = console.export_text().splitlines()
    plain = next(line for line in lines if "plain" in line)
    assert "2.50" in plain  # the median of 20/10 and 60/20
    assert "0.500" in plain
    slow = next(line for line in lines if "slow" in line)
    assert "0/2" in slow
    assert ">= 100.0" in slow
    assert any("changes nothing in this recipe: ema" in line for line in lines)


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_learns_the_drawn_shapes(drawn_set: Path, recipe: Recipe, name: str) -> None:
    settings = Settings.of(recipe, ["epochs=6", "px=24", "batch=16", "lr=0.1", "crop=0.6"])
    rows = list(train_rival(name, recipe, ShardSet.open(drawn_set), settings, seed=0))
    assert [row["epoch"] for row in rows][: len(rows)] == list(range(1, len(rows) + 1))
    assert rows[-1]["top1"] > 0.5  # a quarter by guessing
    assert rows[-1]["loss"] < rows[0]["loss"]
    again = train_rival(name, recipe, ShardSet.open(drawn_set), settings, seed=0)
    assert next(again)["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)


def test_runs_are_made_in_turn_and_their_logs_kept(
    drawn_set: Path, recipe: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = bench_accuracy(recipe, str(drawn_set), ["plain:epochs=1"], 1, out)
    ours, plain = report.of(OURS), report.of("plain:epochs=1")
    assert (len(ours), len(plain)) == (1, 1)
    rows = (out / "raytrain" / "seed-0" / "run" / "validations.jsonl").read_text().splitlines()
    assert ours[0].seconds == json.loads(rows[-1])["seconds"]
    assert (ours[0].epochs, plain[0].epochs) == (3, 1)
    assert min(ours[0].cpu_seconds, plain[0].cpu_seconds) > 0
    assert json.loads((out / "report.json").read_text())["target"] == 0.99
    assert (out / "plain-epochs=1" / "seed-0" / "recipe.yaml").exists()
    assert not list(out.rglob("checkpoints"))
    with pytest.raises(RaytrainError, match="isn't empty"):
        bench_accuracy(recipe, str(drawn_set), [], 1, out)


def test_a_training_that_fails_names_its_log(
    drawn_set: Path, recipe: Recipe, tmp_path: Path
) -> None:
    broken = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name": "no:such"})}
    )
    with pytest.raises(RaytrainError, match=r"raytrain, seed 0, failed; see .*log\.txt"):
        bench_accuracy(broken, str(drawn_set), [], 1, tmp_path / "out")
    assert "can't import no" in (tmp_path / "out/raytrain/seed-0/log.txt").read_text()
