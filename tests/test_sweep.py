"""Sweeps on a real Ray: trials in reused actors, faults, a kill and a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain.api import Sweep, fit, sweep
from raytrain.bench.sweep import as_json, bench_sweep, tables
from raytrain.errors import RaytrainError
from raytrain.recipe.load import dump_recipe, load_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.history import read_jsonl
from raytrain.tuning.journal import JOURNAL

pytestmark = pytest.mark.usefixtures("ray_local")

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

LR = """
from ray import tune
def space(draw):
    return {"schedule.lr": draw("lr", tune.loguniform(0.01, 0.3))}
"""
FAULTS = """
from ray import tune
def space(draw):
    fault = draw("fault", tune.choice(["none", "nan", "crash", "death"]))
    values = {"schedule.lr": 1e12 if fault == "nan" else 0.1}
    if fault in ("crash", "death"):
        values["model.name"] = f"tests.workers:{fault}"
    return values
"""


def small_recipe(epochs: int = 4, model: str = "tests.workers:plain_cnn") -> Recipe:
    return recipe_from_dict(
        {
            "model": {"name": model},
            "phases": [{"epochs": epochs, "image_px": 16, "batch": 64}],
            "schedule": {"lr": 0.1},
            "log": {"every_steps": 2},
        }
    )


def run(folder: Path, drawn_set: Path, space: str = LR, **options: Any) -> Sweep:
    path = folder / "my_space.py"
    path.write_text(space)
    asked: dict[str, Any] = {"samples": 4, "factor": 2, "retrain": 0, "concurrent": 1, **options}
    recipe = asked.pop("recipe", small_recipe())
    return sweep(recipe, drawn_set, path, out=folder / "sweep", **asked)


@pytest.fixture(scope="module")
def whole(ray_local: None, drawn_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep that nothing disturbed, one trial at a time."""
    return run(tmp_path_factory.mktemp("whole"), drawn_set, samples=6, retrain=1)


def test_trials_are_runs_and_the_best_recipe_trains_to_what_was_found(
    whole: Sweep, drawn_set: Path, tmp_path: Path
) -> None:
    report = whole.report
    assert {t.status for t in report.trials} == {"finished", "stopped"}
    assert report.compute_share < 1
    assert report.best is not None
    own = json.loads((whole.folder / f"trials/{report.best.number:03d}/summary.json").read_text())
    assert own["best_top1"] == report.best.best_top1
    stopped = next(t for t in report.trials if t.status == "stopped")
    theirs = json.loads((whole.folder / f"trials/{stopped.number:03d}/summary.json").read_text())
    assert theirs["status"] == "stopped"
    assert theirs["epochs"] * 331 == stopped.samples  # it ended at the rung, not a step later
    again = fit(whole.best_recipe, drawn_set, run_dir=tmp_path / "again", engine="inline")
    assert again.summary.best_top1 == pytest.approx(report.best.best_top1, abs=0.03)
    assert len(report.retrained) == 1
    seed = load_recipe(whole.folder / "retrained/000/recipe.yaml").seed
    assert seed != load_recipe(whole.best_recipe).seed


def test_one_process_runs_one_trial_after_another(whole: Sweep) -> None:
    asked = [row["at"] for row in read_jsonl(whole.folder / JOURNAL) if row["kind"] == "asked"]
    assert asked == sorted(asked)
    assert not (whole.folder / ".ray_tune").exists()


def test_a_sweep_killed_in_the_middle_promotes_the_same_trials(
    whole: Sweep, drawn_set: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_space.py").write_text(LR)
    small_yaml = tmp_path / "small.yaml"
    small_yaml.write_text(dump_recipe(small_recipe()))
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "raytrain", "sweep"]
    begin = [*command, str(small_yaml), "--space", str(tmp_path / "my_space.py"), "--data"]
    begin += [str(drawn_set), "--samples", "6", "--factor", "2", "--retrain", "0"]
    begin += ["--concurrent", "1", "--out", str(folder)]
    killed = subprocess.Popen(begin, env=ENV, start_new_session=True)
    while len(read_jsonl(folder / JOURNAL)) < 6:
        assert killed.poll() is None
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    again = subprocess.run([*command, "--resume", str(folder)], env=ENV, check=False)
    assert again.returncode == 0
    assert decisions(folder) == decisions(whole.folder)


def decisions(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("kind", "trial", "samples", "top1", "goes_on", "status", "values")
    return [tuple(str(row.get(k)) for k in keys) for row in read_jsonl(folder / JOURNAL)]


def test_faults_of_trials_rank_last_with_their_cause(drawn_set: Path, tmp_path: Path) -> None:
    report = run(tmp_path, drawn_set, FAULTS, samples=10, seed=1).report
    by_fault = {t.values["fault"]: t for t in report.trials}
    assert set(by_fault) == {"none", "nan", "crash", "death"}  # what seed 1 draws
    assert by_fault["nan"].status == "diverged"
    assert "diverged" in by_fault["nan"].reason
    assert by_fault["crash"].status == "failed"
    assert "ZeroDivisionError" in by_fault["crash"].reason
    assert by_fault["death"].status == "failed"
    assert "its process died" in by_fault["death"].reason
    order = [t.is_broken for t in report.ranked]
    assert order == sorted(order)
    assert report.best is not None
    assert report.best.values["fault"] == "none"


def test_where_every_trial_fails_so_does_the_sweep(drawn_set: Path, tmp_path: Path) -> None:
    space = 'def space(draw):\n    return {"schedule.lr": 1e12}\n'
    with pytest.raises(RaytrainError, match=r"no trial of 2 came to a result: trial 0: .*diverged"):
        run(tmp_path, drawn_set, space, samples=2)
    assert (tmp_path / "sweep/sweep.json").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"workers_per_trial": 9}, "needs 9 CPUs.* the cluster has 8"),
        (
            {"workers_per_trial": 3, "concurrent": 3},
            "need 9 CPUs, and the cluster has 8; ask for at most 2",
        ),
        ({"objective": "seconds"}, "no target"),
        ({"grace_epochs": 5}, "--grace-epochs 5: a trial has 4 epochs"),
    ],
)
def test_what_can_never_run_is_told_with_the_numbers(
    drawn_set: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RaytrainError, match=told):
        run(tmp_path, drawn_set, **options)


def test_several_workers_a_trial(drawn_set: Path, tmp_path: Path) -> None:
    report = run(
        tmp_path, drawn_set, samples=1, workers_per_trial=2, recipe=small_recipe(epochs=2)
    ).report
    assert report.trials[0].status == "finished"
    rows = read_jsonl(tmp_path / "sweep/trials/000/metrics.jsonl")
    assert {row["world_size"] for row in rows} == {2}


def test_the_time_budget_ends_a_sweep(drawn_set: Path, tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match="before the time budget ended"):
        run(tmp_path, drawn_set, time_budget=0.0)


def test_both_sweeps_and_trainings_by_hand_are_compared(drawn_set: Path, tmp_path: Path) -> None:
    path = tmp_path / "my_space.py"
    path.write_text(LR)
    (one,) = bench_sweep(
        small_recipe(), drawn_set, [path], tmp_path / "bench", samples=3, by_hand=1, factor=2
    )
    assert one.full.report.compute_share == 1
    assert one.compute_ratio == one.asha.report.compute_share
    first = [[t.values for t in each.report.trials] for each in (one.asha, one.full)]
    assert first[0] == first[1]
    assert set(one.between) == {1, 2}
    assert min(one.between.values()) > 0
    assert set(one.hand) == {1}
    assert json.loads(as_json([one], "raytrain bench sweep"))["comparisons"][0]["samples"] == 3
    assert tables([one]).row_count == 1
