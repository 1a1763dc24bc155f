"""`ray job submit -- raytrain train`: stopped with a checkpoint, gone on with, its status right."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.hosts import PROGRAMS, ROOT, SHARED, Hosts, check, private_hosts, wait_for
from tests.hosts.jobs import Jobs, write_folder
from tests.sets import write_set

NOISE = re.compile(r"^\d{4}-\d\d-\d\d |\(\w+( pid=\d+)?\)|\x1b|INFO|Traceback")
TOLD_TO_ALL = "PYTHON worker processes have been started on node"
"""Ray's warning where there are more than 4 processes a core; it has no way to be without it."""


@pytest.fixture(scope="module")
def hosts(drawn_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """One host, on which onprem.yaml's own commands have started Ray."""
    content = yaml.safe_load((ROOT / "cluster" / "onprem.yaml").read_text(encoding="utf-8"))
    with private_hosts(tmp_path_factory.mktemp("hosts"), 1) as hosts:
        write_set(drawn_images, hosts.shared / "set")
        write_folder(hosts.shared / "work")
        check(hosts.on(0, f"ln -s {ROOT}/cluster; echo 'export PATH={PROGRAMS}:$PATH' >> .bashrc"))
        check(hosts.on(0, " && ".join(content["initialization_commands"])))
        check(hosts.on(0, "ray get-auth-token --generate"))
        for command in content["head_start_ray_commands"]:
            check(hosts.on(0, re.sub(r"--autoscaling-config=\S+", "--num-cpus=4", command)))
        yield hosts


@pytest.fixture(scope="module")
def jobs(hosts: Hosts) -> Jobs:
    """The host's job server, its user logged in there."""
    return Jobs(lambda command: hosts.on(0, shlex.join(command)), SHARED / "work")


def train(run: str, *more: str) -> list[str]:
    data = ["--data", f"{SHARED}/set", "--run-dir", f"{SHARED}/{run}", "--workers", "2"]
    return ["raytrain", "train", "mine.yaml", *data, "--set", "target.top1=1.0", *more]


def steps_of(kind: str, run_dir: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(run_dir / "events.jsonl") if row["kind"] == kind]


def test_stopped_and_gone_on_with_and_below_its_target(hosts: Hosts, jobs: Jobs) -> None:
    run_dir = hosts.shared / "run"
    jobs.submit("first", *train("run"))
    wait_for((run_dir / "metrics.jsonl").exists)
    jobs.stop("first")
    assert jobs.info("first")["status"] == "STOPPED"
    (stopped_at,) = steps_of("checkpoint", run_dir)
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == stopped_at < 36
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"

    (hosts.shared / "hurry").touch()
    jobs.submit("second", *train("run"))
    end = jobs.wait("second")
    assert (end["status"], end["driver_exit_code"]) == ("FAILED", 3)
    assert steps_of("resume", run_dir) == [stopped_at]
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == list(range(36))
    used = used_rows(run_dir)
    for epoch in range(6):
        assert sorted(row for step in range(6) for row in used[6 * epoch + step]) == list(
            range(331)
        )
    for job in ("first", "second"):
        lines = [line for line in jobs.log(job).splitlines() if TOLD_TO_ALL not in line]
        assert [line for line in lines if NOISE.search(line)] == []
        assert any(line.startswith("step ") for line in lines)


def test_a_mistake_is_one_line_and_a_failed_job(jobs: Jobs) -> None:
    jobs.submit("mistaken", *train("other", "--set", "phases.0.bach=64"))
    end = jobs.wait("mistaken")
    assert (end["status"], end["driver_exit_code"]) == ("FAILED", 1)
    assert re.fullmatch(r"error: .*bach.*\n", jobs.log("mistaken"))


def test_without_the_token_the_server_says_nothing(jobs: Jobs) -> None:
    assert jobs.ask("/api/jobs/", with_token=True)[0] == 200
    status, text = jobs.ask("/api/jobs/", with_token=False)
    assert status == 401
    assert "first" not in text
