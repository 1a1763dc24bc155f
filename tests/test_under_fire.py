"""Faults of many kinds in one run, in both modes, under Ray on a cluster of several raylets.

No image is lost or repeated, and the losses are those of an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain.orchestrate.faults import Fault, FaultMaker
from raytrain.recipe.load import recipe_from_dict
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.sets import write_set
from tests.workers import train_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EPOCHS, STEPS, IMAGES = 220, 6, 331
RECIPE: dict[str, Any] = {
    "model": {"name": "tests.workers:slow_cnn"},
    "phases": [{"epochs": EPOCHS, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]}],
    "schedule": {"lr": [{"until": "end", "linear": [0.05, 0.01]}]},
    "validation": {"every_epochs": EPOCHS},
    "input": {"audit": True, "decoders": 1, "window_blocks": 6},
    "log": {"every_steps": 2},
    "checkpoint": {"every_steps": 20},
    "faults": {"max_restarts": 100, "hang_s": 3.0, "wait_s": 300},
    "resize": {"min_gain": 0, "settle_s": 0.5, "rest_s": 0},
}
OF_WORKERS = [
    Fault(at_step=40, do="kill", worker=1),
    Fault(at_step=140, do="hang", worker=0),
    Fault(at_step=240, do="slow", worker=1, for_s=2.0),
    Fault(at_step=360, do="kill", worker=0),
]
OF_MACHINES = [
    Fault(at_step=460, do="drain", node=0, for_s=600),
    Fault(at_step=560, do="add"),
    Fault(at_step=740, do="remove_node", node=1),
    Fault(at_step=860, do="add"),
]


@dataclass(frozen=True)
class Run:
    """A run that is a command of its own, as a user's."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path

    def finish(self, seconds: float = 1800) -> None:
        assert self.process.wait(seconds) == 0, self.log.read_text()


@contextmanager
def machines(number: int, head_slots: int) -> Iterator[Any]:
    """A cluster of raylets with a slot for a worker each."""
    from ray.cluster_utils import Cluster

    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": head_slots, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    try:
        for _ in range(number):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def started(cluster: Any, recipe: Path, data: Path, run_dir: Path, *options: str) -> Iterator[Run]:
    """``raytrain train`` on the cluster, ended as a user would if it hasn't by itself."""
    command = [sys.executable, "-m", "raytrain", "train", str(recipe), "--data", str(data)]
    log = run_dir.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *options],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=out,
            stderr=out,
        )
    try:
        yield Run(run_dir, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


@pytest.fixture(scope="module")
def shards(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fire") / "set"
    write_set(drawn_images, out)
    return out


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train_with(1, recipe_from_dict(RECIPE), shards, run_dir)
    return run_dir


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    """Every step once, with the loss of the undisturbed run; every image once an epoch."""
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (run_dir, undisturbed))
    assert [row["step"] for row in ours] == list(range(EPOCHS * STEPS))
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
    used = used_rows(run_dir)
    for first in range(0, EPOCHS * STEPS, STEPS):
        rows = sorted(row for step in range(first, first + STEPS) for row in used[step])
        assert rows == list(range(IMAGES)), f"epoch {first // STEPS}"
    assert used == used_rows(undisturbed)


@pytest.mark.parametrize("mode", ["restart", "step"])
def test_exact_under_fire(mode: str, shards: Path, undisturbed: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    run_dir = tmp_path / "run"
    options = ["--workers", "1:3", "--elastic", mode]
    schedule = [*OF_WORKERS, *OF_MACHINES]
    with (
        machines(3, head_slots=int(mode == "step")) as cluster,
        started(cluster, recipe, shards, run_dir, *options) as run,
        FaultMaker(schedule, run_dir, cluster) as faults,
    ):
        run.finish()
        assert sorted(f.fault.at_step or 0 for f in faults.applied) == [
            fault.at_step for fault in schedule
        ]
    assert_same(run_dir, undisturbed)
    sizes = {row["world_size"] for row in read_jsonl(run_dir / "metrics.jsonl")}
    assert {2, 3} <= sizes
    kinds = [event["kind"] for event in read_jsonl(run_dir / "events.jsonl")]
    assert ("recovery" in kinds) == (mode == "restart"), "a checkpoint was gone back to"
