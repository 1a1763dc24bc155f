"""Ray's own autoscaler with its fake nodes: a run asks for nodes and uses them.

That they go again isn't seen here: fake nodes never count as idle (Ray 2.60, with no run at all).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.run.history import read_jsonl
from tests.hosts import PROGRAMS, answers
from tests.hosts.jobs import write_folder
from tests.sets import write_set

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "hosts" / "autoscaling.py"
PRIVATE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Ray's helper class runs `ray stop --force`, which ends every Ray that it sees."""
ENTER = "ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && exec "


@pytest.mark.skipif(not answers([*PRIVATE, "ip", "link"]), reason="needs root and namespaces")
def test_a_run_gets_nodes_and_uses_them(drawn_images: Path, tmp_path: Path) -> None:
    write_set(drawn_images, tmp_path / "set")
    write_folder(tmp_path / "work")
    command = f"{ENTER} {sys.executable} {SCRIPT} {tmp_path}"
    path = f"{PROGRAMS}:{os.environ['PATH']}"  # Ray's helper calls `ray`
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [*PRIVATE, "bash", "-c", command], stdout=out, stderr=out, check=False, timeout=1100,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": path},
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["before"] == 1
    assert seen["most"] == 4
    steps = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert {steps[0]["world_size"], max(row["world_size"] for row in steps)} == {1, 4}
