"""A cluster of fake nodes that Ray's autoscaler starts and stops, and a run on it.

Only for a process namespace of its own: `ray stop --force` runs in here.

    python autoscaling.py FOLDER        # with `set` and `work`; leaves `run` and `seen.json`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import AutoscalingCluster

from raytrain.run.history import read_jsonl

HEAD = "ray.head.default"
_LISTS = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


class FakeCluster(AutoscalingCluster):
    """With the configuration that Ray's wheel lacks."""

    def _generate_config(
        self, head_resources: Any, worker_node_types: Any, autoscaler_v2: bool = False, **more: Any
    ) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "fake",
            "max_workers": 3,
            "upscaling_speed": 3.0,
            "idle_timeout_minutes": 0.2,
            "provider": {
                "type": "fake_multinode",
                "disable_node_updaters": True,  # nodes are processes: nothing to reach by SSH
                "disable_launch_config_check": True,
            },
            "auth": {},
            "file_mounts": {},
            **{key: [] for key in _LISTS},
            "head_node_type": HEAD,
            "available_node_types": worker_node_types | {HEAD: head},
        }


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def main(folder: Path) -> None:
    """The run on one node that may become four."""
    worker = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3}
    cluster = FakeCluster({"CPU": 1}, {"worker": worker})
    cluster.start()
    ray.init(address="auto", log_to_driver=False)
    seen = {"before": alive(), "most": 0}
    train = [sys.executable, "-m", "raytrain", "train", "mine.yaml", "--data", str(folder / "set")]
    train += ["--workers", "1:4", "--run-dir", str(folder / "run"), "--set", "phases.0.epochs=999"]
    train += ["--set", "validation.every_epochs=999", "--set", "checkpoint.every_steps=10"]
    train += ["--set", "resize.min_gain=0", "--set", "resize.rest_s=1"]
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:6379"}
    with subprocess.Popen(train, cwd=folder / "work", env=environment) as run:
        while run.poll() is None:
            seen["most"] = max(seen["most"], alive())
            rows = read_jsonl(folder / "run" / "metrics.jsonl")
            if rows and rows[-1]["world_size"] == 4:
                run.send_signal(signal.SIGTERM)
                break
            time.sleep(1)
    (folder / "seen.json").write_text(json.dumps(seen))
    print(f"run ended with {run.returncode}; {seen}")
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
