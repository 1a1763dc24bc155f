from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raytrain.errors import RaytrainError
from raytrain.run.checkpoint import Checkpoint, CheckpointFolder, CheckpointWriter, Snapshot


def snapshot(step: int, validate: bool = False) -> Snapshot:
    return Snapshot(
        step=step,
        epoch=step / 10,
        seconds=1.5 * step,
        image_px=32,
        validate=validate,
        model={"weight": torch.full((3, 2), float(step)), "count": torch.tensor(step)},
        training={"optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}}, "scaler": {}},
    )


def newest(folder: CheckpointFolder) -> tuple[Checkpoint | None, list[str]]:
    warnings: list[str] = []
    return folder.newest(warnings.append), warnings


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert newest(folder) == (None, [])
    folder.write(snapshot(7))
    found, _ = newest(folder)
    assert found is not None
    assert (found.step, found.epoch, found.seconds, found.image_px) == (7, 0.7, 10.5, 32)
    assert torch.equal(found.load_model()["weight"], torch.full((3, 2), 7.0))
    buffer = found.load_training()["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(buffer, torch.ones(2))


@pytest.mark.parametrize("name", ["model.safetensors", "training.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_passed_over_and_said(
    tmp_path: Path, name: str, damage: str
) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    folder.write(snapshot(10))
    path = folder.write(snapshot(20)).path / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0xFF
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    found, warnings = newest(folder)
    assert found is not None
    assert found.step == 10
    assert len(warnings) == 1
    assert "step-00000020 is damaged" in warnings[0]


def test_a_half_written_checkpoint_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.write(snapshot(10))
    half = tmp_path / ".step-00000020.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    found, warnings = newest(folder)
    assert found is not None
    assert (found.step, warnings) == (10, [])
    assert folder.write(snapshot(20)).step == 20


def test_old_ones_go_but_those_still_to_be_validated(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    due = folder.write(snapshot(1, validate=True))
    for step in (2, 3, 4):
        folder.write(snapshot(step))
    steps = sorted(int(p.name.removeprefix("step-")) for p in tmp_path.glob("step-*"))
    assert steps == [1, 3, 4]
    assert [c.step for c in folder.due()] == [1]
    due.validated()
    folder.write(snapshot(5))
    assert not due.path.exists()
    assert folder.due() == []


def test_checkpoints_that_the_record_does_not_know_are_set_aside(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    for step in (10, 20, 30):
        folder.write(snapshot(step, validate=True))
    told: list[str] = []
    folder.set_aside_after(20, told.append)
    found, warnings = newest(folder)
    assert found is not None
    assert (found.step, warnings) == (20, [])
    assert [c.step for c in folder.due()] == [10, 20]
    assert len(told) == 1
    assert "step-00000030 is newer than the metrics" in told[0]
    assert (tmp_path / "unrecorded-step-00000030" / "model.safetensors").exists()


def test_the_writer_raises_what_the_thread_met(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told: list[Checkpoint] = []
    writer = CheckpointWriter(CheckpointFolder(tmp_path / "file" / "checkpoints", 2), told.append)
    writer.write(snapshot(1))
    with pytest.raises(RaytrainError, match="can't write checkpoint"):
        writer.wait()
    writer.close()
    assert told == []


def test_nothing_pickled_is_executed(tmp_path: Path) -> None:
    """training.pt is read with weights_only: an object from outside is refused."""
    checkpoint = CheckpointFolder(tmp_path, 2).write(snapshot(1))
    torch.save({"optimizer": Path("/")}, checkpoint.path / "training.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        checkpoint.load_training()
