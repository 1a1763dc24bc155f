"""The engine on Ray: the same numbers as without it, and runs that outlive their workers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import raytrain
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.sets import flip_bit
from tests.workers import plain_cnn

pytestmark = pytest.mark.usefixtures("ray_local")

RECIPE: dict[str, Any] = {
    "model": {"name": "not.used:here"},
    "phases": [
        {"epochs": 3, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]},
        {"epochs": 1, "image_px": 24, "batch": 100, "crop_area": [0.5, 1.0]},
    ],
    "schedule": {"lr": [{"until": "end", "linear": [0.05, 0.01]}]},
    "input": {"audit": True, "window_blocks": 6},
    "log": {"every_steps": 3},
    "checkpoint": {"every_steps": 4},
}


class DiesOnce(nn.Module):
    """A model that kills its process in one forward pass, unless another has done so before.

    Args:
        num_classes: of the model.
        marker: file that the one who does it leaves.
        forwards: the pass in which that is, from 1.
        training: whether of training or of validation.
        awaited: words in a file, without which the pass waits.
    """

    def __init__(
        self,
        num_classes: int,
        marker: Path,
        forwards: int,
        training: bool,
        awaited: tuple[str, Path] | None = None,
    ) -> None:
        super().__init__()
        self.body = plain_cnn(num_classes)
        self._marker, self._left, self._in_training = marker, forwards, training
        self._awaited = awaited

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self._in_training:
            self._left -= 1
            if self._left == 0 and not self._marker.exists():
                self._wait()
                if self._is_first():
                    os.kill(os.getpid(), signal.SIGKILL)
        out: Tensor = self.body(x)
        return out

    def _wait(self) -> None:
        while self._awaited is not None and self._awaited[0] not in self._awaited[1].read_text():
            time.sleep(0.1)

    def _is_first(self) -> bool:
        try:
            self._marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.fixture(scope="module")
def undisturbed(drawn_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    raytrain.fit(RECIPE, drawn_set, model=plain_cnn, engine="inline", run_dir=run_dir)
    return run_dir


def assert_same(run_dir: Path, undisturbed: Path) -> None:
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (run_dir, undisturbed))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert used_rows(run_dir) == used_rows(undisturbed)
    ours, theirs = (read_jsonl(d / "validations.jsonl") for d in (run_dir, undisturbed))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [6, 12, 18, 22]
    for row, other in zip(ours, theirs, strict=True):
        assert row["num_images"] == 103
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["top1"] == pytest.approx(other["top1"], abs=1.01 / 103)  # one near tie


def test_two_workers_are_one_run(undisturbed: Path, drawn_set: Path, tmp_path: Path) -> None:
    result = raytrain.fit(RECIPE, drawn_set, model=plain_cnn, workers=2, run_dir=tmp_path / "run")
    assert result.exit_status == 0
    assert result.summary.world_sizes == [2]
    assert_same(tmp_path / "run", undisturbed)
    assert not list((tmp_path / "run" / "checkpoints").glob("*/validation-due"))


def test_a_worker_that_is_killed(undisturbed: Path, drawn_set: Path, tmp_path: Path) -> None:
    """SIGKILL in the second epoch: the group starts again from the step of its checkpoint."""
    marker = tmp_path / "died"

    def dies_in_training(num_classes: int) -> nn.Module:
        return DiesOnce(num_classes, marker, forwards=11, training=True)

    run_dir = tmp_path / "run"
    raytrain.fit(RECIPE, drawn_set, model=dies_in_training, workers=2, run_dir=run_dir)
    assert marker.exists()
    assert_same(run_dir, undisturbed)
    events = [(e["kind"], e["step"]) for e in read_jsonl(run_dir / "events.jsonl")]
    assert [kind for kind, _ in events if kind in ("fault", "recovery")] == ["fault", "recovery"]
    assert dict(events)["recovery"] in (4, 6, 8)
    assert json.loads((run_dir / "summary.json").read_text())["faults"] == 1


def test_others_stand_by_when_a_worker_is_killed(
    undisturbed: Path, drawn_set: Path, tmp_path: Path
) -> None:
    """They go on from the state in memory, which is newer than the last checkpoint."""
    run_dir = tmp_path / "run"
    awaited = ("standing_by", run_dir / "events.jsonl")

    def dies_when_others_stand_by(num_classes: int) -> nn.Module:
        return DiesOnce(num_classes, tmp_path / "died", 11, training=True, awaited=awaited)

    recipe = RECIPE | {"faults": {"standby": True}, "checkpoint": {"memory_steps": 2}}
    model = dies_when_others_stand_by
    raytrain.fit(recipe, drawn_set, model=model, workers=2, run_dir=run_dir)
    assert_same(run_dir, undisturbed)
    events = read_jsonl(run_dir / "events.jsonl")
    kinds = [event["kind"] for event in events]
    assert next(e["step"] for e in events if e["kind"] == "recovery") in (8, 10)
    assert kinds.count("fault") == kinds.count("recovery") == 1
    assert kinds.index("standing_by") < kinds.index("fault") < kinds.index("recovery")
    assert kinds.count("worker") == 4


def test_a_validation_that_is_killed(undisturbed: Path, drawn_set: Path, tmp_path: Path) -> None:
    """SIGKILL of the validating process: its work is done again, nothing is dropped."""
    marker = tmp_path / "died"

    def dies_in_validation(num_classes: int) -> nn.Module:
        return DiesOnce(num_classes, marker, forwards=2, training=False)

    run_dir = tmp_path / "run"
    raytrain.fit(RECIPE, drawn_set, model=dies_in_validation, workers="1:2", run_dir=run_dir)
    assert marker.exists()
    assert_same(run_dir, undisturbed)


def test_a_users_own_parts_and_a_bug_in_one(drawn_set: Path, tmp_path: Path) -> None:
    def adagrad(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(groups)

    def wrong(logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, labels.max() + 100]

    with pytest.raises(raytrain.RaytrainError, match=r"worker 0: IndexError") as told:
        raytrain.fit(
            RECIPE,
            drawn_set,
            model=plain_cnn,
            loss=wrong,
            optimizer=adagrad,
            workers=1,
            run_dir=tmp_path / "run",
        )
    assert "\n" not in str(told.value)


def test_everything_killed_and_resumed_with_other_workers(drawn_set: Path, tmp_path: Path) -> None:
    """SIGKILL of the driver and so of its Ray; the same command with 3 workers goes on."""
    run_dir, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    changed = RECIPE | {"model": {"name": "small_cnn"}, "checkpoint": {"every_steps": 4}}
    changed["phases"] = [{"epochs": 12, "image_px": 24, "batch": 64}]
    recipe.write_text(yaml.safe_dump(changed))
    command = [sys.executable, "-m", "raytrain", "train", str(recipe), "--data", str(drawn_set)]
    command += ["--run-dir", str(run_dir), "--workers"]
    first = subprocess.Popen([*command, "2"], stdout=subprocess.DEVNULL)
    try:
        while len(read_jsonl(run_dir / "metrics.jsonl")) < 10:
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    subprocess.run([*command, "3"], check=True, stdout=subprocess.DEVNULL)
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(12 * 6))
    assert {row["world_size"] for row in rows} == {2, 3}
    used = used_rows(run_dir)
    for epoch in range(12):
        of_epoch = [r for row in rows if row["epoch"] == epoch for r in used[row["step"]]]
        assert sorted(of_epoch) == list(range(331))
    steps = [row["step"] for row in read_jsonl(run_dir / "validations.jsonl")]
    assert steps == [6 * (epoch + 1) for epoch in range(12)]


def test_what_reading_warns_of_reaches_the_user(
    drawn_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged block, met by a task of Ray Data's and read from another size."""
    copy = tmp_path / "set"
    shutil.copytree(drawn_set, copy)
    (first, *_) = sorted((copy / "train" / "16").glob("*.parquet"))
    flip_bit(first, first.stat().st_size // 2)
    recipe = RECIPE | {
        "phases": [{"epochs": 1, "image_px": 14, "batch": 64}],
        "schedule": {"lr": 0.01},
        "input": {"damaged": "skip"},
    }
    result = raytrain.fit(recipe, copy, model=plain_cnn, workers=1, run_dir=tmp_path / "run")
    assert result.exit_status == 0
    told = "".join(capfd.readouterr())
    assert "read from size original instead" in told.replace("\n", " ")
    assert first.name in told
