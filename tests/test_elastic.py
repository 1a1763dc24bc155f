"""Elastic steps: whatever is lost, each image is used once an epoch and the losses are the same.

Replicas run as processes of this machine without Ray; test_elastic_ray.py has Ray.
"""

from __future__ import annotations

import random
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain.orchestrate.faults import Fault, FaultMaker, raises_when_told
from raytrain.recipe.load import load_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from raytrain.train import Parts, build_job_model, score_checkpoint
from tests.replicas import Replicas, replicas
from tests.sets import write_set
from tests.workers import plain_cnn, train_with

RECIPE = """
model: {name: "not.used:here"}
seed: 3
phases:
  - {epochs: 22, image_px: 16, batch: 64, crop_area: [0.5, 1.0]}
  - {epochs: 6, image_px: 24, batch: 100, crop_area: [0.5, 1.0]}
schedule:
  lr: [{until: 30%, linear: [0.02, 0.1]}, {until: end, cosine: [0.1, 0.02]}]
  momentum: [{until: end, linear: [0.9, 0.8]}]
  weight_decay: 1.0e-4
loss: {label_smoothing: 0.1}
validation: {every_epochs: 14}
input: {audit: true, window_blocks: 6}
log: {every_steps: 3}
checkpoint: {every_steps: 7}
"""
TINY_IMAGENET = Path(__file__).parents[2] / "shared" / "data" / "tiny-imagenet-10.tar"
NUM_STEPS = 22 * 6 + 6 * 4


@pytest.fixture(scope="module")
def shards(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("elastic") / "set"
    write_set(drawn_images, out)
    return out


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return recipe_from_dict(yaml.safe_load(RECIPE))


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train_with(1, recipe, shards, run_dir)
    return run_dir


def assert_same(run_dir: Path, undisturbed: Path, epochs: int = 28) -> None:
    """Rows once and in order, losses of the undisturbed run, every image once an epoch."""
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (run_dir, undisturbed))
    assert [row["step"] for row in ours] == list(range(len(theirs)))
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["top1"] == pytest.approx(other["top1"], abs=1.01 / other["batch"])
    assert max(row["images_per_s"] for row in ours) < 1e6, "by one clock"
    used = used_rows(run_dir)
    assert list(used) == list(range(len(theirs)))
    for epoch in range(epochs):
        of_epoch = [r for row in ours if row["epoch"] == epoch for r in used[row["step"]]]
        assert sorted(of_epoch) == list(range(331))
    assert used == used_rows(undisturbed)


def kinds(run_dir: Path) -> list[str]:
    return [event["kind"] for event in read_jsonl(run_dir / "events.jsonl")]


@pytest.mark.slow
def test_faults_of_all_kinds_in_one_run(
    recipe: Recipe, shards: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Kills of the first and another, a hang for good, a short one, a slow one, an exception."""
    run_dir = tmp_path / "run"
    schedule = [
        Fault(at_step=9, do="kill", worker=1),
        Fault(at_step=30, do="kill", worker=0),
        Fault(at_step=51, do="exception", worker=2),
        Fault(at_step=69, do="slow", worker=1, for_s=1.0),
        Fault(at_step=90, do="hang", worker=2, for_s=2.5),
        Fault(at_step=111, do="kill", worker=0),
        Fault(at_step=111, do="kill", worker=1),
    ]
    parts = Parts(model=raises_when_told(plain_cnn, run_dir))
    with replicas(recipe, shards, run_dir, parts, pause_s=0.03, hang_s=1.5) as run:
        run.start(0, 1, 2)
        run.replace_lost()
        with FaultMaker(schedule, run_dir, pid_of=run.pid) as faults:
            run.finish()
        assert [applied.fault for applied in faults.applied] == schedule
        assert run.lost == 5
    assert_same(run_dir, undisturbed)
    assert "resize" in kinds(run_dir)
    sizes = {row["world_size"] for row in read_jsonl(run_dir / "metrics.jsonl")}
    assert {2, 3} <= sizes <= {1, 2, 3}
    steps = {e["step"] for e in read_jsonl(run_dir / "events.jsonl") if e["kind"] == "checkpoint"}
    assert {84, NUM_STEPS} <= steps  # those that are to be validated


def random_kills(run: Replicas, number: int) -> None:
    """Kill random workers, each as soon as the one before is back, in random moments of a step."""
    rng = random.Random(11)
    for _ in range(number):
        run.wait_for(run.driver.steps + 1, workers=3)
        time.sleep(rng.uniform(0, 0.2))
        run.kill(rng.randrange(3))


def test_five_random_kills(recipe: Recipe, shards: Path, undisturbed: Path, tmp_path: Path) -> None:
    with replicas(recipe, shards, tmp_path / "run", pause_s=0.03) as run:
        run.start(0, 1, 2)
        run.replace_lost()
        random_kills(run, 5)
        run.finish()
    assert_same(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_random_kills(shards: Path, tmp_path: Path) -> None:
    phases = [{"epochs": 160, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]}]
    long = recipe_from_dict(yaml.safe_load(RECIPE) | {"phases": phases})
    train_with(1, long, shards, tmp_path / "undisturbed")
    with replicas(long, shards, tmp_path / "run", pause_s=0.03) as run:
        run.start(0, 1, 2)
        run.replace_lost()
        random_kills(run, 30)
        run.finish(timeout=600)
        assert run.lost == 30
    assert_same(tmp_path / "run", tmp_path / "undisturbed", epochs=160)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TINY_IMAGENET.exists(), reason="needs ../shared/data/tiny-imagenet-10.tar")
def test_batch_norm_comes_to_the_same_accuracy(tmp_path: Path) -> None:
    """Statistics of a step that is made again see its images twice: 3 seeds, five kills or none."""
    with tarfile.open(TINY_IMAGENET) as tar:
        tar.extractall(tmp_path, filter="data")
    write_set(tmp_path / "tiny-imagenet-10", tmp_path / "set", (500,), (32, 48, None), 64)
    top1: dict[int, list[float]] = {0: [], 5: []}
    for seed in range(3):
        changes = [f"seed={seed}", "target={}", "checkpoint.every_steps=79", "log.every_steps=3"]
        recipe = load_recipe("tiny-imagenet-10", changes)
        for kills, reached in top1.items():
            run_dir = tmp_path / f"{seed}-{kills}"
            with replicas(recipe, tmp_path / "set", run_dir, parts=Parts()) as run:
                run.start(0, 1)
                run.replace_lost()
                for number in range(1, kills + 1):
                    run.wait_for(number * run.job.plan.num_steps // (kills + 1), workers=2)
                    run.kill(number % 2)
                run.finish(timeout=600)
                assert run.lost == kills
                last = run.job.checkpoints.newest(print)
            assert last is not None
            model = build_job_model(run.job)
            score = score_checkpoint(run.job, last, model, "cpu", 2).raw
            reached.append(score.top1 / score.images)
    print(f"top-1 undisturbed {top1[0]}, with five kills {top1[5]}")
    assert statistics.mean(top1[5]) == pytest.approx(statistics.mean(top1[0]), abs=0.01)


def test_all_lost_at_once_go_on_from_the_checkpoint(
    recipe: Recipe, shards: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with replicas(recipe, shards, run_dir, pause_s=0.01) as run:
        run.start(0, 1)
        run.wait_for(40)
        for rank in (0, 1):
            run.kill(rank)
        run.start(0, 1)
        run.finish()
    assert_same(run_dir, undisturbed)
    assert "recovery" in kinds(run_dir)


def test_a_checkpoint_that_its_writer_could_not_end(
    recipe: Recipe, shards: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first worker dies as it writes what is to be validated: another one writes it."""
    run_dir = tmp_path / "run"
    with replicas(recipe, shards, run_dir, pause_s=0.03) as run:
        run.slow_writer(0, seconds=3.0)
        run.start(0, 1, 2)
        run.wait_for(84)
        run.kill(0)
        run.start(0)
        run.finish()
    assert_same(run_dir, undisturbed)
    steps = [e["step"] for e in read_jsonl(run_dir / "events.jsonl") if e["kind"] == "checkpoint"]
    assert steps.count(84) == 1
    assert any(run_dir.glob("checkpoints/step-00000084/validation-due"))


def test_a_schedule_says_what_is_wrong(tmp_path: Path) -> None:
    from raytrain.errors import RaytrainError
    from raytrain.orchestrate.faults import random_schedule, read_schedule

    file = tmp_path / "faults.yaml"
    wrong: dict[str, Any] = {
        "[{at_step: 3, do: kil, worker: 1}]": r"faults.yaml: \[0\].do: .*'kill'",
        "[{at_step: 3, do: add}, {at_step: 3, do: add, wrker: 1}]": r"\[1\].wrker: Extra",
        "[{at_step: 3, at_s: 1, do: add}]": "give at_step or at_s",
        "[{at_step: 3, do: kill}]": "worker is for kill, hang",
        "[{at_step: 3, do: slow, worker: 1}]": "slow needs for_s",
        "[{at_step: '3', do: add}]": r"\[0\].at_step: .*integer",
        "{at_step: 3}": "must be a list",
        "[": "can't be read",
    }
    for text, says in wrong.items():
        file.write_text(text)
        with pytest.raises(RaytrainError, match=says) as told:
            read_schedule(file)
        assert "\n" not in str(told.value)
    file.write_text("[{at_step: 3, do: hang, worker: 0}, {at_s: 1.5, do: add}]")
    hang, add = read_schedule(file)
    assert (hang.do, hang.at_step, hang.worker, hang.for_s) == ("hang", 3, 0, None)
    assert (add.do, add.at_s) == ("add", 1.5)
    drawn = random_schedule(1, 50, 60.0, ("kill", "hang"), 3)
    assert drawn == random_schedule(1, 50, 60.0, ("kill", "hang"), 3)
    assert drawn != random_schedule(2, 50, 60.0, ("kill", "hang"), 3)
    assert {(f.do, f.worker) for f in drawn} == {(k, w) for k in ("kill", "hang") for w in range(3)}
    assert 20 < (drawn[-1].at_s or 0) < 100
