"""Faults of many kinds in one run, in both modes, under Ray on a cluster of several raylets.

No image is lost or repeated, and the losses are those of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
KILLS = 30
PHASE = {"epochs": EPOCHS, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]}
RECIPE: dict[str, Any] = {
    "model": {"name": "tests.workers:slow_cnn"},
    "phases": [PHASE],
    "schedule": {"lr": [{"until": "end", "linear": [0.05, 0.01]}]},
    "validation": {"every_epochs": EPOCHS},
    "input": {"audit": True, "decoders": 1, "window_blocks": 6},
    "log": {"every_steps": 2},
    "checkpoint": {"every_steps": 20},
    "faults": {"max_restarts": 100, "hang_s": 3.0, "wait_s": 300},
    "resize": {"min_gain": 0, "settle_s": 0.5, "rest_s": 0},
}
MANY_EPOCHS: dict[str, Any] = {
    "phases": [PHASE | {"epochs": 2000}],  # it is stopped before
    "schedule": {"lr": 0.005},  # at 0.05 such a long run has spikes, which blow up what is rounded
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

    def wait(self, until: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not until():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def finish(self, seconds: float = 1800) -> None:
        assert self.process.wait(seconds) == 0, self.log.read_text()

    def sizes(self) -> list[int]:
        return [row["world_size"] for row in read_jsonl(self.folder / "metrics.jsonl")[-5:]]


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


def undisturbed(shards: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """A run of one worker, of the model without its pauses."""
    model = {"model": {"name": "tests.workers:plain_cnn"}}
    train_with(1, recipe_from_dict(RECIPE | changes | model), shards, folder / "alone")
    return folder / "alone"


def assert_same(run_dir: Path, other: Path, epochs: int) -> None:
    """Every step once, with the loss of the other run; every image once an epoch."""
    ours, theirs = (read_jsonl(d / "metrics.jsonl")[: epochs * STEPS] for d in (run_dir, other))
    assert [row["step"] for row in ours] == list(range(epochs * STEPS))
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    used, expected_rows = used_rows(run_dir), used_rows(other)
    for first in range(0, epochs * STEPS, STEPS):
        rows = sorted(row for step in range(first, first + STEPS) for row in used[step])
        assert rows == list(range(IMAGES)), f"epoch {first // STEPS}"
    assert all(used[step] == expected_rows[step] for step in range(epochs * STEPS))


@pytest.mark.parametrize("mode", ["restart", "step"])
def test_exact_under_fire(mode: str, shards: Path, tmp_path: Path) -> None:
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
    assert_same(run_dir, undisturbed(shards, tmp_path, {}), EPOCHS)
    sizes = {row["world_size"] for row in read_jsonl(run_dir / "metrics.jsonl")}
    assert {2, 3} <= sizes
    events = read_jsonl(run_dir / "events.jsonl")
    dropped = sum(event["rows_dropped"] for event in events if event["kind"] == "recovery")
    assert (dropped > 0) == (mode == "restart"), "steps were made and made again"


def test_thirty_kills(shards: Path, tmp_path: Path) -> None:
    """Each as soon as all workers share some steps again, at a random moment."""
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(RECIPE | MANY_EPOCHS))
    rng = random.Random(5)
    with (
        machines(3, head_slots=1) as cluster,
        started(cluster, recipe, shards, run_dir, "--workers", "3", "--elastic", "step") as run,
    ):
        for _ in range(KILLS):
            run.wait(lambda: run.sizes() == [3] * 5)
            time.sleep(rng.uniform(0, 0.3))
            with FaultMaker([Fault(at_step=1, do="kill", worker=rng.randrange(3))], run_dir) as one:
                run.wait(lambda one=one: len(one.applied) == 1)  # type: ignore[misc]
            run.wait(lambda: 3 not in run.sizes())
        run.wait(lambda: run.sizes() == [3] * 5)
    epochs = len(read_jsonl(run_dir / "metrics.jsonl")) // STEPS
    assert_same(run_dir, undisturbed(shards, tmp_path, MANY_EPOCHS), epochs)
