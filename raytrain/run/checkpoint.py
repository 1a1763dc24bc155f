"""Checkpoints: a folder for each, whole or not there at all.

    checkpoints/step-00000120/
        model.safetensors      weights and buffers
        training.safetensors   the optimizer's tensors, by the names of their parameters
        ema/model.safetensors  the averaged weights and their buffers, where there is an average
        checkpoint.json        format, steps done, epoch, clock, the rest of the optimizer's state
                               and of the loss scale, and a SHA-256 of each file
        validation-due         only while the validation of these weights is still to come

A checkpoint is written under another name, down to the disk, and renamed when it is complete. There
is no random state in it: all randomness of a run is a function of the step number. Nothing in it is
a pickle. Tensors are whole whatever the number of workers, and torch.distributed.checkpoint reads
the folder as it is (``HuggingFaceStorageReader``), in any sharding.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from raytrain.errors import RaytrainError
from raytrain.run.tensors import FileParts, HostTensors, join_state, split_state, write_parts

_MODEL, _EMA, _TRAINING, _META, _DUE = (
    "model.safetensors",
    "ema/model.safetensors",
    "training.safetensors",
    "checkpoint.json",
    "validation-due",
)
_FORMAT = 2

BUSY_SECONDS = 0.1
"""Longest that a step waits for the checkpoint before; after that its own is left out."""
STORAGE_SECONDS = 600.0
"""Longest that a run waits for its storage where it can't go on without the checkpoint."""
LAST_TRIES = 3
"""Attempts to write the checkpoint that a run ends or hands over with."""
_RETRY_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a run after some steps.

    Attributes:
        step: steps done.
        epoch: epochs done, with the fraction.
        seconds: training clock when it was taken.
        validate: whether these weights are to be validated.
        model: the model's state dict.
        ema: the averaged model's, or None without an average.
        training: state dicts of the optimizer and of the loss scaler: tensors and plain values.
    """

    step: int
    epoch: float
    seconds: float
    validate: bool
    model: dict[str, Tensor]
    training: dict[str, Any]
    ema: dict[str, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk. The fields are the Snapshot's."""

    path: Path
    step: int
    epoch: float
    seconds: float

    @property
    def validation_due(self) -> bool:
        return (self.path / _DUE).exists()

    def load_model(self) -> dict[str, Tensor]:
        """The model's state dict, on the CPU."""
        return load_file(self.path / _MODEL)

    @property
    def has_average(self) -> bool:
        return (self.path / _EMA).exists()

    def load_average(self) -> dict[str, Tensor]:
        """The averaged model's state dict, on the CPU; only where there is an average."""
        return load_file(self.path / _EMA)

    def load_training(self) -> dict[str, Any]:
        """The state dicts of the optimizer and of the loss scaler, on the CPU."""
        rest = json.loads((self.path / _META).read_text())["training"]
        state: dict[str, Any] = join_state(load_file(self.path / _TRAINING), rest)
        return state

    def validated(self) -> None:
        """Take note that the validation of these weights has been written down."""
        (self.path / _DUE).unlink(missing_ok=True)

    def export_model(self, path: Path) -> None:
        """Copy the weights that count, averaged if there are such, to ``path``: whole or not."""
        temporary = path.with_name(path.name + ".tmp")
        shutil.copyfile(self.path / (_EMA if self.has_average else _MODEL), temporary)
        temporary.replace(path)


class CheckpointFolder:
    """All checkpoints of a run.

    Args:
        path: the folder; made when the first checkpoint is written.
        keep: how many of the newest stay. One whose validation is due stays in any case.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def newest(self, told: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None. Damaged newer ones are set aside.

        Args:
            told: told in one line of each that was set aside.
        """
        for path in sorted(self.path.glob("step-*"), reverse=True):
            try:
                return _open(path)
            except (OSError, ValueError, KeyError) as error:
                aside = self._set_aside(path, "damaged")
                told(f"warning: checkpoint {path.name} is damaged ({error}); set aside as {aside}")
        return None

    def set_aside_after(self, step: int, told: Callable[[str], None]) -> None:
        """Set aside checkpoints of later steps than the run's record knows of.

        When everything is killed at once, a checkpoint may be whole while the metrics of its last
        steps were not written yet. Those steps are made again, so that the record has no gap.

        Args:
            step: steps in the record.
            told: told in one line of each.
        """
        for path in sorted(self.path.glob("step-*")):
            if int(path.name.removeprefix("step-")) > step:
                aside = self._set_aside(path, "unrecorded")
                told(
                    f"{path.name} is newer than the metrics (to step {step}); set aside as {aside}"
                )

    def _set_aside(self, path: Path, why: str) -> str:
        aside = path.with_name(f"{why}-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            path.rename(aside)
        except OSError as error:
            raise RaytrainError(
                f"can't set {path} aside ({why}): {error.strerror}; give --run-dir rights and room"
            ) from error
        return aside.name

    def at(self, step: int) -> Checkpoint:
        """The checkpoint after ``step`` steps, checked.

        Raises:
            RaytrainError: it isn't there or damaged, as when a machine doesn't see the folder.
        """
        path = self._path_of(step)
        try:
            return _open(path)
        except (OSError, ValueError, KeyError) as error:
            raise RaytrainError(
                f"can't read checkpoint {path}: {error}; --run-dir must be one folder that every "
                "machine of the cluster reaches"
            ) from error

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint after ``step`` steps, damaged or not."""
        return self._path_of(step).exists()

    def newest_step(self) -> int:
        """Steps done of the newest checkpoint, damaged or not; 0 without one."""
        steps = (int(path.name.removeprefix("step-")) for path in self.path.glob("step-*"))
        return max(steps, default=0)

    def due(self) -> list[Checkpoint]:
        """Whole checkpoints whose validation is still to come, oldest first."""
        return [_open(path.parent) for path in sorted(self.path.glob(f"step-*/{_DUE}"))]

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Copy and write a checkpoint here and now.

        Raises:
            RaytrainError: it can't be written; what was written before is untouched.
        """
        copied = _Copied()
        copied.fill(snapshot)
        return self.write_copy(copied.packed)

    def write_copy(self, copied: Packed) -> Checkpoint:
        """Write a checkpoint and remove those no longer kept.

        Raises:
            RaytrainError: it can't be written; what was written before is untouched.
        """
        final = self._path_of(copied.about["step"])
        temporary = self.path / f".{final.name}.tmp"
        try:
            self.path.mkdir(exist_ok=True)  # not its parents: the storage may be away
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            copied.write(temporary)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            temporary.rename(final)
            _sync(self.path)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise RaytrainError(
                f"can't write checkpoint {final}: {error.strerror or error}; "
                "make room or choose another --run-dir"
            ) from error
        self._prune()
        return _describe(final)

    def _path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _prune(self) -> None:
        for path in sorted(self.path.glob("step-*"))[: -self._keep]:
            if not (path / _DUE).exists():
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Packed:
    """A snapshot as the bytes of its files: plain values, which any process can hold.

    Attributes:
        about: what checkpoint.json says of it.
        validates: whether these weights are to be validated.
        files: name -> parts of each safetensors file.
    """

    about: dict[str, Any]
    validates: bool
    files: dict[str, FileParts]

    def write(self, folder: Path) -> None:
        """Write the files of a checkpoint.

        Raises:
            OSError: the storage doesn't take it.
        """
        sha256 = {}
        for name, parts in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            sha256[name] = write_parts(parts, folder / name)
        with (folder / _META).open("w") as file:
            json.dump(self.about | {"sha256": sha256}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if self.validates:
            (folder / _DUE).touch()
        _sync(folder)


class _Copied:
    """A snapshot in host memory of its own, which later snapshots use again."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.validates = False  # whether these weights are to be validated
        self._files: dict[str, HostTensors] = {}

    def fill(self, snapshot: Snapshot) -> None:
        tensors, rest = split_state(snapshot.training)
        parts = {_MODEL: snapshot.model, _TRAINING: tensors}
        if snapshot.ema is not None:
            parts[_EMA] = snapshot.ema
        for name, part in parts.items():
            self._files.setdefault(name, HostTensors()).fill(part)
        if any(value.device.type == "cuda" for value in snapshot.model.values()):
            torch.cuda.synchronize()
        self.about = {
            "format": _FORMAT,
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "seconds": snapshot.seconds,
            "training": rest,
        }
        self.validates = snapshot.validate

    @property
    def packed(self) -> Packed:
        """What was copied; the next copy changes it."""
        files = {name: tensors.parts for name, tensors in self._files.items()}
        return Packed(self.about, self.validates, files)


class MemoryCopier:
    """Sends states away in a thread, one at a time, while training goes on.

    A step pays for a copy of its state in host memory. Where sending is slower than states come,
    some are left out.

    Args:
        send: called in that thread; returns when the state has arrived. What it raises is logged.
    """

    def __init__(self, send: Callable[[Packed], None]) -> None:
        self._send = send
        self._copied = _Copied()
        self._thread: threading.Thread | None = None

    def copy(self, snapshot: Snapshot) -> None:
        """Copy a snapshot, and begin to send it.

        Args:
            snapshot: its tensors may change once this returns.
        """
        if self.is_sending():
            return
        self._copied.fill(snapshot)
        self._thread = threading.Thread(target=self._run, name="raytrain-copy", daemon=True)
        self._thread.start()

    def is_sending(self) -> bool:
        """Whether a state is on its way now."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._send(self._copied.packed)
        except Exception as error:  # the loop needs no copy; the next one is tried
            _log.warning("no copy of step %d in memory: %s", self._copied.about["step"], error)


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time, while training goes on.

    A step pays for a copy of its state in host memory. Where the storage is slower than the
    checkpoints come, some are left out; where it takes none, training goes on without them, as
    long as ``max_failures`` allows.

    Args:
        folder: where to.
        written: called in that thread with each checkpoint once it is whole.
        failed: called with (steps done, what happened) where one isn't written, in either thread.
        max_failures: checkpoints in a row that may fail; None: any number.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        written: Callable[[Checkpoint], None],
        failed: Callable[[int, str], None],
        max_failures: int | None = None,
    ) -> None:
        self._folder = folder
        self._written = written
        self._failed = failed
        self._max_failures = max_failures
        self._copied = _Copied()
        self._thread: threading.Thread | None = None
        self._held: int | None = None  # steps done of a copy that isn't to be written yet
        self._failures = 0
        self._left_out = False
        self._unwritten: RaytrainError | None = None
        self._fatal: BaseException | None = None

    def write(self, snapshot: Snapshot, *, needed: bool) -> None:
        """Copy a snapshot and begin to write it.

        Args:
            snapshot: its tensors may change once this returns.
            needed: wait for the one before, however long. Else this one is left out where that
                would take longer than ``BUSY_SECONDS``.

        Raises:
            RaytrainError: more failed than may, or the storage doesn't answer.
        """
        self._join(STORAGE_SECONDS if needed else BUSY_SECONDS)
        if self._thread is not None:
            if not self._left_out:  # the first of several in a row
                self._failed(snapshot.step, "left out: the one before is still being written")
            self._left_out = True
            return
        self._left_out, self._held = False, None
        self._copied.fill(snapshot)
        self._thread = threading.Thread(target=self._write, name="raytrain-checkpoint", daemon=True)
        self._thread.start()

    def hold(self, snapshot: Snapshot) -> None:
        """Copy a snapshot, and don't write it unless ``write_held`` asks for that.

        One that is to be validated is held until it, or a later one, is on the storage: who writes
        it may be lost while the others make the next steps.

        Args:
            snapshot: its tensors may change once this returns.
        """
        holds_due = self._held is not None and self._copied.validates
        if not snapshot.validate and (
            self.is_writing() or (holds_due and self._folder.newest_step() < (self._held or 0))
        ):
            return
        self._join(STORAGE_SECONDS)
        self._copied.fill(snapshot)
        self._held = snapshot.step

    def write_held(self) -> None:
        """Begin to write what is held, unless it is on the storage already: then tell of it."""
        held, self._held = self._held, None
        if held is None:
            return
        if self._folder.has(held):
            self._written(self._folder.at(held))
            return
        self._thread = threading.Thread(target=self._write, name="raytrain-checkpoint", daemon=True)
        self._thread.start()

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            RaytrainError: more failed than may, or the storage doesn't answer.
        """
        self._join(STORAGE_SECONDS)

    def finish(self) -> None:
        """Wait until the last checkpoint is written; one that failed is tried again.

        Raises:
            RaytrainError: it can't be written.
        """
        self.wait()
        for _ in range(LAST_TRIES - 1):
            if self._unwritten is None:
                return
            time.sleep(_RETRY_SECONDS)
            self._write()
            self.wait()
        if self._unwritten is not None:
            raise self._unwritten

    def close(self) -> None:
        """Let what is being written come to its end, if it does so in ``STORAGE_SECONDS``."""
        if self._thread is not None:
            self._thread.join(STORAGE_SECONDS)

    def _join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None
            elif seconds == STORAGE_SECONDS:
                raise RaytrainError(
                    f"{self._folder.path}: the storage hasn't written a checkpoint in "
                    f"{seconds:.0f} s; see to it, or choose another --run-dir"
                )
        if self._fatal is not None:
            raise self._fatal

    def _write(self) -> None:
        """Write the copy; whatever it meets is kept for the loop's thread."""
        step = self._copied.about["step"]
        try:
            checkpoint = self._folder.write_copy(self._copied.packed)
            self._failures, self._unwritten = 0, None
            self._written(checkpoint)
        except RaytrainError as error:
            self._failures, self._unwritten = self._failures + 1, error
            self._failed(step, str(error))
            if self._max_failures is not None and self._failures > self._max_failures:
                self._fatal = RaytrainError(
                    f"{error} ({self._failures} in a row; checkpoint.max_failures is "
                    f"{self._max_failures})"
                )
        except BaseException as error:
            self._fatal = error  # the loop must meet it, whatever it is


def _open(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking every byte of it; ValueError where one is wrong."""
    meta = json.loads((path / _META).read_text())
    if meta.get("format") != _FORMAT:
        raise RaytrainError(
            f"checkpoint {path} has format {meta.get('format', 1)}, and this raytrain reads "
            f"{_FORMAT}; go on with the raytrain that began the run, or start a new --run-dir"
        )
    for name, sha256 in meta["sha256"].items():
        if _sha256(path / name) != sha256:
            raise ValueError(f"{name} doesn't match its checksum")
    return _describe(path)


def _describe(path: Path) -> Checkpoint:
    meta = json.loads((path / _META).read_text())
    fields: Iterable[str] = ("step", "epoch", "seconds")
    return Checkpoint(path=path, **{name: meta[name] for name in fields})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Put a folder's entries down to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
