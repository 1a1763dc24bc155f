"""A disk that is really full: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytrain.run.history import read_jsonl
from tests.sets import write_set

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk: needs root")

RECIPE: dict[str, Any] = {
    "model": {"name": "tests.workers:heavy_cnn"},
    "phases": [{"epochs": 20, "image_px": 16, "batch": 64}],
    "schedule": {"lr": 0.001},
    "validation": {"every_epochs": 20},
    "log": {"every_steps": 1},
    "checkpoint": {"every_steps": 2, "keep": 1, "max_failures": None},
}
# A checkpoint takes 17 MB. Beside the ballast one has room and a second one hasn't.
RUN_ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=64m tmpfs "$DISK"
head -c 40000000 /dev/zero > "$DISK/ballast"
"$@" &
until grep -q checkpoint_failed "$DISK/run/events.jsonl" 2>/dev/null; do
    kill -0 $! || break
    sleep 0.05
done
ls -A "$DISK/run/checkpoints" > "$OUT/left"
rm "$DISK/ballast"
wait $! && status=0 || status=$?
cp -r "$DISK/run" "$OUT/run"
exit $status
"""


@pytest.mark.timeout(280)
def test_training_goes_on_while_the_disk_is_full(drawn_images: Path, tmp_path: Path) -> None:
    write_set(drawn_images, tmp_path / "set")
    disk, recipe = tmp_path / "disk", tmp_path / "recipe.yaml"
    disk.mkdir()
    recipe.write_text(yaml.safe_dump(RECIPE))
    train = [sys.executable, "-m", "raytrain", "train", str(recipe), "--engine", "inline"]
    train += ["--data", str(tmp_path / "set"), "--run-dir", str(disk / "run")]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", RUN_ON_A_SMALL_DISK, "bash", *train],
        env=os.environ | {"DISK": str(disk), "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    events = read_jsonl(run / "events.jsonl")
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert any("No space left on device" in event["reason"] for event in failed)
    assert "checkpoint failed at step" in done.stdout
    whole = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert whole[0] == 2
    assert whole[-1] == 120
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == list(range(120))
    assert len((tmp_path / "left").read_text().split()) <= 2  # one whole, at most one under way
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000120"]
