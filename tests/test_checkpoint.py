from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as _checkpoint
from torch.multiprocessing.spawn import spawn

from raytrain.errors import RaytrainError
from raytrain.learn.optim import load_optimizer_state, optimizer_state
from raytrain.run.checkpoint import (
    LAST_TRIES,
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    MemoryCopier,
    Packed,
    Snapshot,
)
from raytrain.run.tensors import join_state, split_state
from tests.workers import plain_cnn

dcp: Any = _checkpoint  # some of its public names are missing from its types


def snapshot(step: int, validate: bool = False) -> Snapshot:
    return Snapshot(
        step=step,
        epoch=step / 10,
        seconds=1.5 * step,
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
    assert (found.step, found.epoch, found.seconds) == (7, 0.7, 10.5)
    assert torch.equal(found.load_model()["weight"], torch.full((3, 2), 7.0))
    buffer = found.load_training()["optimizer"]["state"][0]["momentum_buffer"]
    assert torch.equal(buffer, torch.ones(2))


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "checkpoint.json"])
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


def test_where_all_are_damaged_new_ones_are_still_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (10, 20):
        (folder.write(snapshot(step)).path / "training.safetensors").write_bytes(b"bad")
    found, warnings = newest(folder)
    assert found is None
    assert len(warnings) == 2
    assert folder.write(snapshot(5)).path.exists()
    again, _ = newest(folder)
    assert again is not None
    assert again.step == 5
    assert (tmp_path / "damaged-step-00000020").exists()


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


class Told:
    """Listens to a writer."""

    def __init__(self, folder: CheckpointFolder, max_failures: int | None = None) -> None:
        self.written: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.writer = CheckpointWriter(
            folder,
            lambda checkpoint: self.written.append(checkpoint.step),
            lambda step, reason: self.failed.append((step, reason)),
            max_failures,
        )

    def write(self, step: int) -> None:
        self.writer.write(snapshot(step), needed=True)


def test_a_snapshot_may_change_once_it_was_taken(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=3)
    told = Told(folder)
    taken = snapshot(1)
    told.writer.write(taken, needed=True)
    taken.model["weight"] += 5
    told.write(2)  # in the same host memory
    told.writer.finish()
    assert told.written == [1, 2]
    assert folder.at(1).load_model()["weight"][0, 0] == 1
    assert folder.at(2).load_model()["weight"][0, 0] == 2


def test_failures_are_told_and_put_up_with(tmp_path: Path) -> None:
    """The storage is away for two checkpoints, then back."""
    home, away = tmp_path / "run", tmp_path / "away"
    home.mkdir()
    told = Told(CheckpointFolder(home / "checkpoints", 9), max_failures=2)
    told.write(1)
    told.writer.wait()
    home.rename(away)
    for step in (2, 3):
        told.write(step)
    told.writer.wait()
    assert not home.exists()  # nothing grows where the storage isn't
    away.rename(home)
    told.write(4)
    told.writer.finish()
    assert told.written == [1, 4]
    assert [step for step, _ in told.failed] == [2, 3]
    assert "can't write checkpoint" in told.failed[0][1]
    assert "No such file or directory" in told.failed[0][1]


def test_more_failures_than_allowed_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told = Told(CheckpointFolder(tmp_path / "file" / "checkpoints", 2), max_failures=1)
    told.write(1)
    told.write(2)
    with pytest.raises(RaytrainError, match=r"2 in a row; checkpoint.max_failures is 1"):
        told.writer.wait()
    assert told.written == []


def test_the_last_checkpoint_must_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.run.checkpoint._RETRY_SECONDS", 0.01)
    home = tmp_path / "run"
    told = Told(CheckpointFolder(home / "checkpoints", 2))
    told.write(1)
    with pytest.raises(RaytrainError, match="can't write checkpoint"):
        told.writer.finish()
    assert [step for step, _ in told.failed] == [1] * LAST_TRIES
    home.mkdir()
    told.writer.finish()
    assert told.written == [1]


@pytest.mark.parametrize("size", [150_000, 420_000])
def test_no_room_in_the_middle_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The disk is full after so many bytes: in the weights, in the optimizer's state."""
    left, write = size, os.write

    def limited(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(descriptor, data[:left])
        left -= done
        return done

    folder = CheckpointFolder(tmp_path, keep=2)
    large = replace(
        snapshot(10), model={"w": torch.ones(100_000)}, training={"m": torch.ones(100_000)}
    )
    folder.write(large)
    monkeypatch.setattr("raytrain.run.tensors.os.write", limited)
    with pytest.raises(RaytrainError, match="No space left on device; make room"):
        folder.write(replace(large, step=20))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def _killed_while_it_writes(folder: CheckpointFolder, where: str) -> None:
    def die(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    if where == "write":
        os.write = die
    else:
        Path.rename = die  # type: ignore[method-assign, assignment]
    folder.write(snapshot(20))


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path: Path, where: str) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    folder.write(snapshot(10))
    child = get_context("fork").Process(target=_killed_while_it_writes, args=(folder, where))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    found, warnings = newest(folder)
    assert found is not None
    assert (found.step, warnings) == (10, [])
    assert folder.write(snapshot(20)).step == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_slow_storage_leaves_some_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps don't wait for it longer than BUSY_SECONDS, and the user is told once."""
    free = threading.Event()
    folder = CheckpointFolder(tmp_path, keep=9)
    whole = folder.write_copy

    def slow(copied: Any) -> Checkpoint:
        assert free.wait(30)
        return whole(copied)

    monkeypatch.setattr(folder, "write_copy", slow)
    told = Told(folder)
    for step in (1, 2, 3):
        told.writer.write(snapshot(step), needed=False)
    assert [step for step, _ in told.failed] == [2]
    free.set()
    told.writer.wait()
    told.writer.write(snapshot(4), needed=False)
    told.writer.finish()
    assert told.written == [1, 4]


def test_a_state_sent_elsewhere_makes_the_same_files(tmp_path: Path) -> None:
    """Pickled as on its way to another process, it is byte for byte what a checkpoint has."""
    sent: list[bytes] = []
    copier = MemoryCopier(lambda state: sent.append(pickle.dumps(state)))
    taken = replace(snapshot(7, validate=True), ema={"weight": torch.zeros(3, 2)})
    copier.copy(taken)
    while copier.is_sending():
        time.sleep(0.01)
    ours = CheckpointFolder(tmp_path / "sent", 1).write_copy(pickle.loads(sent[0]))
    theirs = CheckpointFolder(tmp_path / "written", 1).write(taken)
    assert replace(ours, path=theirs.path) == theirs
    names = sorted(path.relative_to(theirs.path) for path in theirs.path.rglob("*.*"))
    assert len(names) == 4
    for name in names:
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()
    assert ours.validation_due


def test_copies_are_left_out_while_one_is_sent() -> None:
    """The step doesn't wait, and one that doesn't arrive is no fault."""
    sent: list[int] = []
    taken, free = threading.Semaphore(0), threading.Semaphore(0)

    def send(state: Packed) -> None:
        taken.release()
        assert free.acquire(timeout=30)
        sent.append(state.about["step"])
        if sent[-1] == 1:
            raise ConnectionError("nobody there")

    copier = MemoryCopier(send)
    copier.copy(snapshot(1))
    assert taken.acquire(timeout=30)
    copier.copy(snapshot(2))
    free.release(2)
    while copier.is_sending():
        time.sleep(0.01)
    copier.copy(snapshot(3))
    while copier.is_sending():
        time.sleep(0.01)
    assert sent == [1, 3]


def test_a_storage_that_never_answers_ends_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.run.checkpoint.STORAGE_SECONDS", 0.05)
    free = threading.Event()
    folder = CheckpointFolder(tmp_path, keep=9)
    monkeypatch.setattr(folder, "write_copy", lambda _: free.wait(30))
    told = Told(folder)
    told.write(1)
    with pytest.raises(RaytrainError, match="the storage hasn't written a checkpoint in"):
        told.write(2)
    free.set()


def test_another_format_is_one_line(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 2)
    meta = folder.write(snapshot(1)).path / "checkpoint.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(RaytrainError, match="has format 3, and this raytrain reads 2"):
        newest(folder)


def test_state_of_every_plain_kind() -> None:
    state = {
        "a": torch.ones(2),
        1: [None, True, 2, 0.5, float("inf"), "x", (torch.zeros(()), [])],
    }
    tensors, rest = split_state(state, "s")
    assert sorted(tensors) == ["s.1.6.0", "s.a"]
    again = join_state(tensors, json.loads(json.dumps(rest, allow_nan=False)))
    assert again["a"] is state["a"]
    assert again[1][:6] == [None, True, 2, 0.5, float("inf"), "x"]
    assert isinstance(again[1][6], tuple)
    with pytest.raises(RaytrainError, match=r"can't hold s\.b: it is a PosixPath"):
        split_state({"b": Path("/")}, "s")


def test_an_optimizer_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """Also with its parameters in another grouping, and images stored with the channels last."""

    def start(groups: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = plain_cnn(4).to(memory_format=torch.channels_last)
        params = list(model.parameters())
        parts = [params] if groups == 1 else [params[1::2], params[::2]]
        return model, torch.optim.SGD([{"params": p} for p in parts], lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3, 16, 16)).square().sum().backward()
        optimizer.step()

    model, optimizer = start(1)
    step(model, optimizer)
    taken = replace(
        snapshot(1),
        model=model.state_dict(),
        training={"optimizer": optimizer_state(optimizer, model)},
    )
    found = CheckpointFolder(tmp_path, 1).write(taken)
    state = found.load_training()["optimizer"]
    again, other = start(1)
    again.load_state_dict(found.load_model())
    load_optimizer_state(other, again, state)
    for parameter in again.parameters():
        assert other.state[parameter]["momentum_buffer"].stride() == parameter.stride()
    step(model, optimizer)
    step(again, other)
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def _read_a_shard(rank: int, store: str, path: str) -> None:
    """One of two processes that hold half of each tensor, read with torch's own reader."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    half = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
    momentum = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])
    state = {"weight": half, "optimizer": {"state": {"weight": {"momentum_buffer": momentum}}}}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path))
    full = torch.arange(12.0).view(6, 2)
    assert torch.equal(half.to_local(), full[3 * rank : 3 * rank + 3])
    assert torch.equal(momentum.to_local(), -full[:, rank : rank + 1])
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="an old torch")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_torch_reads_it_whole_and_in_another_sharding(tmp_path: Path, workers: int) -> None:
    full = torch.arange(12.0).view(6, 2)
    taken = replace(
        snapshot(1),
        model={"weight": full},
        training={"optimizer": {"state": {"weight": {"momentum_buffer": -full}}}},
        ema={"weight": full + 1},
    )
    path = CheckpointFolder(tmp_path, 1).write(taken).path
    if workers == 2:
        spawn(_read_a_shard, args=(str(tmp_path / "store"), str(path)), nprocs=2)
        return
    momentum = {"momentum_buffer": torch.zeros(6, 2)}
    state = {"weight": torch.zeros(6, 2), "optimizer": {"state": {"weight": momentum}}}
    reader = dcp.HuggingFaceStorageReader(str(path))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(torch.as_tensor(state["weight"]), full)
    assert torch.equal(momentum["momentum_buffer"], -full)
