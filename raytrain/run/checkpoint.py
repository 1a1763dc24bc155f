"""Checkpoints: a folder for each, whole or not there at all.

    checkpoints/step-00000120/
        model.safetensors    weights and buffers
        ema.safetensors      the same of the averaged weights, where there is an average
        training.pt          optimizer and loss scale (read with weights_only=True)
        checkpoint.json      steps done, epoch, clock, and a SHA-256 of each file
        validation-due       only while the validation of these weights is still to come

A checkpoint is written under another name and renamed when it is complete. There is no random
state in it: all randomness of a run is a function of the step number.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from raytrain.errors import RaytrainError

_MODEL, _EMA, _TRAINING, _META, _DUE = (
    "model.safetensors",
    "ema.safetensors",
    "training.pt",
    "checkpoint.json",
    "validation-due",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a run after some steps, copied to CPU memory.

    Attributes:
        step: steps done.
        epoch: epochs done, with the fraction.
        seconds: training clock when it was taken.
        image_px: side of validation images, in pixels.
        validate: whether these weights are to be validated.
        model: the model's state dict.
        ema: the averaged model's, or None without an average.
        training: state dicts of the optimizer and of the loss scaler.
    """

    step: int
    epoch: float
    seconds: float
    image_px: int
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
    image_px: int

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
        state: dict[str, Any] = torch.load(
            self.path / _TRAINING, map_location="cpu", weights_only=True
        )
        return state

    def validated(self) -> None:
        """Take note that the validation of these weights has been written down."""
        (self.path / _DUE).unlink(missing_ok=True)

    def export_model(self, path: Path) -> None:
        """Copy the weights that count, averaged if there are such, to ``path``: whole or not."""
        temporary = path.with_name(path.name + ".tmp")
        shutil.copyfile(self.path / (_EMA if self.has_average else _MODEL), temporary)
        temporary.replace(path)


def copy_to_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A contiguous copy of a state dict in CPU memory, which later steps don't change."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in state.items()
    }


class CheckpointFolder:
    """All checkpoints of a run.

    Args:
        path: the folder; made when the first checkpoint is written.
        keep: how many of the newest stay. One whose validation is due stays in any case.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep

    def newest(self, damaged: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None.

        Args:
            damaged: told in one line of each newer one that had to be passed over.
        """
        for path in sorted(self.path.glob("step-*"), reverse=True):
            try:
                return _open(path)
            except (OSError, ValueError, KeyError) as error:
                damaged(f"{path} is damaged ({error}); going back to the checkpoint before it")
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
                aside = path.with_name(f"unrecorded-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                told(f"{path} is newer than the metrics, which end at step {step}; set aside")

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

    def due(self) -> list[Checkpoint]:
        """Whole checkpoints whose validation is still to come, oldest first."""
        return [_open(path.parent) for path in sorted(self.path.glob(f"step-*/{_DUE}"))]

    def write(self, snapshot: Snapshot) -> Checkpoint:
        """Write a checkpoint and remove those no longer kept.

        Raises:
            RaytrainError: it can't be written; what was written before is untouched.
        """
        final = self._path_of(snapshot.step)
        temporary = self.path / f".{final.name}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_file(snapshot.model, temporary / _MODEL)
            if snapshot.ema is not None:
                save_file(snapshot.ema, temporary / _EMA)
            torch.save(snapshot.training, temporary / _TRAINING)
            self._write_meta(temporary, snapshot)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
            temporary.rename(final)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these
            shutil.rmtree(temporary, ignore_errors=True)
            raise RaytrainError(
                f"can't write checkpoint {final}: {error}; make room or choose another --run-dir"
            ) from error
        self._prune()
        return _describe(final)

    def _path_of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _write_meta(self, folder: Path, snapshot: Snapshot) -> None:
        names = [name for name in (_MODEL, _EMA, _TRAINING) if (folder / name).exists()]
        meta = {
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "seconds": snapshot.seconds,
            "image_px": snapshot.image_px,
            "sha256": {name: _sha256(folder / name) for name in names},
        }
        (folder / _META).write_text(json.dumps(meta, indent=1))
        if snapshot.validate:
            (folder / _DUE).touch()

    def _prune(self) -> None:
        for path in sorted(self.path.glob("step-*"))[: -self._keep]:
            if not (path / _DUE).exists():
                shutil.rmtree(path, ignore_errors=True)


class CheckpointWriter:
    """Writes checkpoints in a thread, one after another, while training goes on.

    Args:
        folder: where to.
        written: called in that thread with each checkpoint once it is whole.
    """

    def __init__(self, folder: CheckpointFolder, written: Callable[[Checkpoint], None]) -> None:
        self._folder = folder
        self._written = written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raytrain-checkpoint")
        self._last: Future[None] | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Begin to write; waits for the one before, and raises what that one met."""
        self.wait()
        self._last = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        """Wait until nothing is being written, and raise what the last one met."""
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot) -> None:
        self._written(self._folder.write(snapshot))


def _open(path: Path) -> Checkpoint:
    """Describe a checkpoint after checking every byte of it; ValueError where one is wrong."""
    meta = json.loads((path / _META).read_text())
    for name, sha256 in meta["sha256"].items():
        if _sha256(path / name) != sha256:
            raise ValueError(f"{name} doesn't match its checksum")
    return _describe(path)


def _describe(path: Path) -> Checkpoint:
    meta = json.loads((path / _META).read_text())
    fields: Iterable[str] = ("step", "epoch", "seconds", "image_px")
    return Checkpoint(path=path, **{name: meta[name] for name in fields})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
