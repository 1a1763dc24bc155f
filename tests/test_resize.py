"""Machines that leave with and without a word, and machines that join: each a new group of workers.

On a cluster of several raylets on this machine; the run is a command of its own, as a user's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain.orchestrate.groups import seconds_saved
from raytrain.orchestrate.ray_private import KNOWN_VERSIONS, draining_nodes, notices_are_seen
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.sets import write_set

RECIPE: dict[str, Any] = {
    "model": {"name": "tests.workers:plain_cnn"},
    "phases": [{"epochs": 2000, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]}],
    "schedule": {"lr": 0.01},
    "validation": {"every_epochs": 2000},
    "input": {"audit": True, "decoders": 1},
    "log": {"every_steps": 2},
    "checkpoint": {"every_steps": 20},
    "faults": {"max_restarts": 3, "wait_s": 60},
    "resize": {"min_gain": 0, "settle_s": 0.5, "rest_s": 0},
}
NOTICE_SECONDS = 1200
HAND_OVER_SECONDS = 400  # a group starts in 8 to 20 s on two cores, and much later on busy ones


class Machines:
    """A cluster of raylets whose head has no slot for a worker."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "_system_config": quick | {"health_check_initial_delay_ms": 0},
            },
        )
        self.address: str = self._cluster.address

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1)

    def lose(self, *machines: Any) -> None:
        for machine in machines:
            self._cluster.remove_node(machine, allow_graceful=False)

    def drain(self, machine: Any) -> None:
        """What a cloud's notice of a spot machine's end comes to."""
        command = [str(Path(sys.executable).with_name("ray")), "drain-node"]
        command += ["--address", self.address, "--node-id", machine.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        command += ["--deadline-remaining-seconds", str(NOTICE_SECONDS)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)

    def close(self) -> None:
        self._cluster.shutdown()


class Run:
    """A run under way on a cluster, and its files."""

    def __init__(self, machines: Machines, shards: Path, folder: Path, workers: str) -> None:
        self.folder = folder / "run"
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(RECIPE))
        command = [sys.executable, "-m", "raytrain", "train", str(recipe), "--data", str(shards)]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(self.folder), "--workers", workers],
            env=os.environ | {"RAY_ADDRESS": machines.address},
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / "metrics.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = read_jsonl(self.folder / "events.jsonl")
        return [event for event in found if event["kind"] == kind]

    def wait(self, until: Callable[[], bool], seconds: float) -> float:
        """Wait for something, no longer than that; gives how long it took."""
        began = time.monotonic()
        while not until():
            log = Path(self._log.name).read_text()
            assert self.process.poll() is None, log
            assert time.monotonic() - began < seconds, log
            time.sleep(0.1)
        return time.monotonic() - began

    def wait_for_workers(self, number: int, seconds: float = HAND_OVER_SECONDS) -> float:
        """Wait until so many workers have made ten steps."""

        def made() -> bool:
            return [row["world_size"] for row in self.rows[-10:]] == [number] * 10

        return self.wait(made, seconds)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HAND_OVER_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.close()


@pytest.fixture
def start(drawn_images: Path, machines: Machines, tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    write_set(drawn_images, tmp_path / "set")
    runs: list[Run] = []

    def begin(workers: str) -> Run:
        runs.append(Run(machines, tmp_path / "set", tmp_path, workers))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def assert_exactly_once(run: Run) -> None:
    """Every epoch that is complete used every image once, and no step is missing."""
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(len(rows)))
    used, counts = used_rows(run.folder), Counter(row["epoch"] for row in rows)
    complete = [epoch for epoch, steps in counts.items() if steps == 6]
    assert len(complete) > 3
    for epoch in complete:
        of_epoch = [r for row in rows if row["epoch"] == epoch for r in used[row["step"]]]
        assert sorted(of_epoch) == list(range(331))


@pytest.mark.slow
def test_machines_leave_and_join(machines: Machines, start: Callable[[str], Run]) -> None:
    """A notice, a new machine, a sudden end; the steps before the first two are all kept."""
    machines.add()
    leaving = machines.add()
    run = start("1:2")
    run.wait_for_workers(2, 2 * HAND_OVER_SECONDS)

    machines.drain(leaving)
    assert run.wait_for_workers(1) < NOTICE_SECONDS / 2  # not waited for
    joining = machines.add()
    run.wait_for_workers(2)
    assert run.events("fault") == []
    handed_over = run.events("hand_over")
    assert "is about to leave the cluster" in handed_over[0]["reason"]
    assert "room for 2 workers saves about" in handed_over[1]["reason"]
    assert [event["rows_dropped"] for event in run.events("recovery")] == [0, 0]

    machines.lose(joining)
    run.wait_for_workers(1, 2 * HAND_OVER_SECONDS)
    assert len(run.events("fault")) == 1
    assert run.events("recovery")[2]["rows_dropped"] < 20 + 2 * RECIPE["log"]["every_steps"]
    assert [event["world_size"] for event in run.events("resize")] == [1, 2, 1]

    run.stop()
    assert run.process.returncode == 1
    assert run.events("end")[0]["status"] == "interrupted"
    last = len(run.rows)
    assert (run.folder / "checkpoints" / f"step-{last:08d}").is_dir()
    assert_exactly_once(run)


@pytest.mark.slow
def test_two_machines_at_once_and_none_left(
    machines: Machines, start: Callable[[str], Run]
) -> None:
    """The run waits for a machine, goes on with it, and gives up in a line where none comes."""
    both = [machines.add(), machines.add()]
    run = start("1:2")
    run.wait_for_workers(2, 2 * HAND_OVER_SECONDS)
    machines.lose(*both)
    run.wait(lambda: len(run.events("fault")) == 1, HAND_OVER_SECONDS)
    last = machines.add()
    run.wait_for_workers(1, 2 * HAND_OVER_SECONDS)
    machines.lose(last)
    run.process.wait(RECIPE["faults"]["wait_s"] + 2 * HAND_OVER_SECONDS)
    assert run.process.returncode == 1
    reason = run.events("end")[0]["reason"]
    assert "no group of at least 1 workers has started for 60 s" in reason
    assert_exactly_once(run)


def test_more_workers_must_be_worth_the_restart() -> None:
    assert seconds_saved(100.0, 2, 4) == pytest.approx(50.0)
    assert seconds_saved(100.0, 4, 5) == pytest.approx(20.0)
    assert seconds_saved(None, 1, 8) == 0


@pytest.mark.usefixtures("ray_local")
def test_ray_still_tells_which_machines_leave() -> None:
    """Of a version that was never tried, whoever raises the bound in KNOWN_VERSIONS has to look."""
    import ray

    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    assert KNOWN_VERSIONS[0] <= version <= KNOWN_VERSIONS[1]
    assert notices_are_seen()
    assert draining_nodes() == {}
