"""The engine without Ray: one worker in this process. For a debugger, a test, a small job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from raytrain.data.reader import Batch, TrainingImages, read_with_threads
from raytrain.errors import RaytrainError
from raytrain.parallel.team import FixedTeam
from raytrain.run.checkpoint import Checkpoint, Snapshot
from raytrain.run.kernels import kernel_fault
from raytrain.run.record import cpu_model
from raytrain.run.rows import Hardware, StepRow, ValidationRow
from raytrain.run.startup import StartUp
from raytrain.session import Result, Session, Watch
from raytrain.train import Job, build_job_model, score_checkpoint, train, validation_row
from raytrain.world import World


def run_inline(
    job: Job,
    device: str,
    price_per_hour: float | None,
    startup: StartUp | None = None,
    watch: Watch | None = None,
) -> Result:
    """Train with one worker in this process, validating in line.

    Args:
        job: what to train; the numbers are those of one worker under any other engine.
        device: ``cpu``, ``cuda`` or ``auto``.
        price_per_hour: of this machine, in USD, where known.
        startup: what the command has done so far.
        watch: hears each validation, and may stop the run.

    Raises:
        RaytrainError: a fault that the user should read in one line.
    """
    device = pick_device(device)
    check_kernels(device)
    session = Session(job, local_hardware(device), price_per_hour, startup, watch)
    team, outside = FixedTeam(World(device=device)), _InThisProcess(session, device)
    return session.run(lambda: train(job, team, outside))


def pick_device(device: str) -> str:
    """``auto`` is the first GPU where there is one, else the CPU.

    Raises:
        RaytrainError: a GPU is asked for and torch finds none.
    """
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RaytrainError(f"--device {device}: torch {torch.__version__} finds no GPU here")
    return device


def check_kernels(device: str) -> None:
    """Refuse a GPU for which this torch has no kernels.

    Raises:
        RaytrainError: it has none; the line says what to install.
    """
    if not device.startswith("cuda"):
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    fault = kernel_fault(name, capability, torch.cuda.get_arch_list(), torch.__version__)
    if fault:
        raise RaytrainError(f"--device {device}: {fault}")


def local_hardware(device: str) -> Hardware:
    """What this process trains on."""
    on_gpu = device.startswith("cuda")
    return Hardware(
        nodes=1,
        cpu=cpu_model(),
        cpus=os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        gpus=1 if on_gpu else 0,
    )


class _InThisProcess:
    """What the loop needs, by direct calls."""

    def __init__(self, session: Session, device: str) -> None:
        self._session = session
        self._device = device
        self.threads = session.job.recipe.input.decoders or os.cpu_count() or 1

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        return read_with_threads(images, images.units(start), self.threads)

    def recorded_steps(self) -> int:
        return self._session.recorded_steps

    def begin(self, start: int, world_size: int) -> float:
        seconds = self._session.earlier_seconds
        self._session.begin(start, world_size, seconds)
        self._validate_due()
        return seconds

    def metrics(self, rows: list[StepRow]) -> bool:
        self._session.metrics(rows)
        return self._session.should_stop

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        self._session.checkpoint(checkpoint)

    def keep(self, snapshot: Snapshot) -> None:
        """Nothing: memory beside this process would be lost with it."""

    def checkpoint_failed(self, step: int, reason: str) -> None:
        self._session.checkpoint_failed(step, reason)

    def validation(self, row: ValidationRow) -> bool:
        self._session.validation(row)
        return self._session.should_stop

    def say(self, message: str) -> None:
        self._session.say(message)

    def _validate_due(self) -> None:
        """Validate what an earlier command left unvalidated when it died."""
        job = self._session.job
        for checkpoint in job.checkpoints.due():
            model = build_job_model(job).to(self._device)
            score = score_checkpoint(job, checkpoint, model, self._device, self.threads)
            row = validation_row(score, checkpoint.step, checkpoint.epoch, self._session.seconds())
            self._session.validation(row)
