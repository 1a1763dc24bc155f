"""Three hosts on a network of their own: `ray up`, a job on two of them, a cable that is pulled.

The cluster file is cluster/onprem.yaml, but for what a test can't have: packages come from this
environment instead of the index, and CPUs are given out so that each worker is on its own host.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.hosts import (
    PROGRAMS,
    ROOT,
    SHARED,
    Hosts,
    Phases,
    answers,
    check,
    private_hosts,
    wait_for,
)
from tests.hosts.jobs import Jobs, write_folder
from tests.sets import write_set

pytestmark = pytest.mark.timeout(3600)  # four minutes on two cores, and on a busy machine far more

FILE = SHARED / "cluster.yaml"
EPOCHS, STEPS_AN_EPOCH, IMAGES = 60, 6, 331


@dataclass(frozen=True)
class Cluster:
    hosts: Hosts
    jobs: Jobs
    phases: Phases

    def nodes(self) -> int:
        """How many nodes live."""
        status, text = self.jobs.ask("/nodes?view=summary")
        assert status == 200, text
        raylets = [node.get("raylet", {}) for node in json.loads(text)["data"]["summary"]]
        return sum(raylet.get("state") == "ALIVE" for raylet in raylets)


def cluster_file(hosts: Hosts) -> dict[str, Any]:
    """cluster/onprem.yaml for the hosts."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "onprem.yaml").read_text())
    content["auth"]["ssh_private_key"] = str(hosts.key)
    mounts = {to: path for to, path in content["file_mounts"].items() if not to.endswith(".whl")}
    content["file_mounts"] = mounts | {"/home/raytrain/cluster": str(ROOT / "cluster")}
    # this machine's memory is everybody's, so how much of it is taken says nothing of the test
    exports = f"export PATH={PROGRAMS}:$PATH RAY_memory_monitor_refresh_ms=0"
    mountpoint, *_ = content["setup_commands"]
    content["setup_commands"] = [mountpoint, f"echo '{exports}' >> ~/.bashrc"]
    content["head_start_ray_commands"][-1] += " --num-cpus=0"
    content["worker_start_ray_commands"][-1] += " --num-cpus=1"
    return content


@pytest.fixture(scope="module")
def phases(request: pytest.FixtureRequest) -> Iterator[Phases]:
    """What the tests of this file took, in a log file and on the terminal."""
    phases = Phases(ROOT / "runs" / "real-hosts.log")
    yield phases
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{phases.file}:\n{phases.text()}")


@pytest.fixture(scope="module")
def cluster(
    drawn_images: Path, tmp_path_factory: pytest.TempPathFactory, phases: Phases
) -> Iterator[Cluster]:
    with private_hosts(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        phases.end("packages where missing, hosts with SSH")
        write_set(drawn_images, hosts.shared / "set")
        write_folder(hosts.shared / "work")
        (hosts.shared / "cluster.yaml").write_text(yaml.safe_dump(cluster_file(hosts)))
        check(hosts.at_desk("ray", "get-auth-token", "--generate"))
        up = ["env", "RAY_UP_enable_autoscaler_v2=0", "ray", "up", "--yes", str(FILE)]
        check(hosts.at_desk(*up))
        phases.end("ray up")
        jobs = Jobs(lambda command: hosts.at_desk(*command), SHARED / "work")
        cluster = Cluster(hosts, jobs, phases)
        forward = hosts.at_desk("ray", "dashboard", FILE)
        with subprocess.Popen(forward, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as it:
            try:
                wait_for(cluster.jobs.can_be_asked)
                wait_for(lambda: cluster.nodes() == 3)
                phases.end("all nodes there")
                yield cluster
            finally:
                it.kill()


def test_who_has_no_token_is_refused(cluster: Cluster) -> None:
    assert cluster.jobs.ask("/api/jobs/")[0] == 200
    assert cluster.jobs.ask("/api/jobs/", with_token=False)[0] == 401
    status = ["ray", "status", "--address", "10.77.0.2:6379"]
    assert answers(cluster.hosts.at_desk(*status))
    assert not answers(cluster.hosts.at_desk("env", "RAY_AUTH_MODE=disabled", *status))
    cluster.phases.end("asked with and without the token")


def test_a_pulled_cable(cluster: Cluster) -> None:
    """The run goes on with the other host, takes this one back, and misses or repeats nothing."""
    hosts, jobs, phases = cluster.hosts, cluster.jobs, cluster.phases
    run_dir = hosts.shared / "run"
    train = ["raytrain", "train", "mine.yaml", "--data", f"{SHARED}/set", "--workers", "1:2"]
    train += ["--run-dir", f"{SHARED}/run", "--set", f"phases.0.epochs={EPOCHS}"]
    train += ["--set", "validation.every_epochs=30", "--set", "checkpoint.every_steps=10"]
    # grown again whatever that costs, and at once: it is a short run for so slow a start
    train += ["--set", "resize.min_gain=0", "--set", "resize.rest_s=1"]
    jobs.submit("run", *train)
    wait_for(lambda: len(read_jsonl(run_dir / "metrics.jsonl")) >= 15)  # one checkpoint, at 10
    phases.end("job submitted, 15 steps on two hosts")

    hosts.cut(2)
    wait_for(lambda: sizes(run_dir) == [1])
    phases.end("cable pulled; on with one host")

    hosts.mend(2)
    wait_for(lambda: sizes(run_dir) == [1, 2])
    phases.end("cable in again; on with both")

    (hosts.shared / "hurry").touch()
    end = jobs.wait("run")
    assert (end["status"], end["driver_exit_code"]) == ("SUCCEEDED", 0), jobs.log("run")
    assert_whole(run_dir)
    phases.end("rest of the run")
    for what, recovery in zip(("cut", "return"), events(run_dir, "recovery"), strict=True):
        phases.note(f"lost at the {what}: {lost(run_dir, recovery)}")


def test_down_ends_the_head(cluster: Cluster) -> None:
    check(cluster.hosts.at_desk("ray", "down", "--yes", FILE))
    wait_for(lambda: not answers(cluster.hosts.on(0, "pgrep raylet || pgrep gcs_server")))
    cluster.phases.end("ray down")


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == kind]


def lost(run_dir: Path, recovery: dict[str, Any]) -> str:
    """What a recovery cost those who were there."""
    steps, start = read_jsonl(run_dir / "metrics.jsonl"), recovery["step"]
    pause = steps[start]["seconds"] - steps[start - 1]["seconds"]
    again = recovery["rows_dropped"]
    return f"{again} logged steps made again; {pause:.1f} s from step {start - 1} to the next"


def sizes(run_dir: Path) -> list[int]:
    """What the run's number of workers changed to."""
    return [row["world_size"] for row in events(run_dir, "resize")]


def assert_whole(run_dir: Path) -> None:
    steps = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(EPOCHS * STEPS_AN_EPOCH))
    assert {row["world_size"] for row in steps} == {1, 2}
    used = used_rows(run_dir)
    for first in range(0, EPOCHS * STEPS_AN_EPOCH, STEPS_AN_EPOCH):
        rows = sorted(row for step in range(first, first + STEPS_AN_EPOCH) for row in used[step])
        assert rows == list(range(IMAGES)), f"epoch {first // STEPS_AN_EPOCH}"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["faults"]) == ("completed", 1)
