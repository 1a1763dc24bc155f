"""The engine on Ray: Ray Train's workers run the loop, this process keeps the run's record."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raytrain.data.reader import Batch, TrainingImages
from raytrain.errors import RaytrainError, describe_bug
from raytrain.orchestrate.cluster import Placement, cluster_hardware, ensure_ray, place
from raytrain.orchestrate.mailbox import Message, mailbox_beside_me
from raytrain.orchestrate.preflight import preflight
from raytrain.orchestrate.stream import open_stream
from raytrain.orchestrate.validate import Validations, last_line
from raytrain.run.checkpoint import Checkpoint
from raytrain.run.rows import StepRow, ValidationRow
from raytrain.session import Result, Session
from raytrain.train import Job, train
from raytrain.world import World

_POLL_SECONDS = 0.2
_STOP_SECONDS = 30  # for workers to come to their next log when the driver met a fault


@dataclass(frozen=True)
class Request:
    """What a user asks of the cluster.

    Attributes:
        workers: (fewest, most) training workers; None leaves it to the cluster.
        device: ``auto``, ``cpu`` or ``cuda``.
        price_per_hour: of the whole cluster, in USD, where known.
        verbose: show Ray's own log and the prints of worker processes.
    """

    workers: tuple[int, int] | None = None
    device: str = "auto"
    price_per_hour: float | None = None
    verbose: bool = False


def run_on_ray(job: Job, request: Request) -> Result:
    """Train with Ray Train's workers, on the cluster that this process is in or a local Ray.

    Raises:
        RaytrainError: a fault that the user should read in one line.
    """
    most = request.workers[1] if request.workers else 1
    check_workers(job, most)
    where = os.environ.get("RAY_ADDRESS", "a Ray of its own on this machine")
    print(f"run {job.run_dir}: starting on {where}", flush=True)
    ensure_ray(request.verbose, most)
    placement = place(request.workers, request.device, job.recipe.validation.where == "beside")
    check_workers(job, placement.workers[1])
    preflight(job, placement.use_gpu, request.verbose)
    job = replace(job, beside=placement.beside)
    session = Session(job, cluster_hardware(placement), request.price_per_hour)
    if job.recipe.validation.where == "beside" and not job.beside:
        session.say("every GPU has a training worker, so validation is done in line")
    return session.run(lambda: _Driver(session, placement).run())


def check_workers(job: Job, workers: int) -> None:
    """Refuse more workers than the smallest step has images."""
    fewest = job.plan.min_count
    if workers > fewest:
        raise RaytrainError(
            f"--workers {workers}: some steps have {fewest} image{'s' if fewest > 1 else ''} only, "
            f"and each worker needs one; use at most {fewest} workers or a larger phases batch"
        )


class _Driver:
    """Runs the trainer in a thread, and hands what its workers tell to the session.

    The main thread is free for that, and for Ctrl-C: Ray Train takes the signal for itself where
    it runs in the main thread.
    """

    def __init__(self, session: Session, placement: Placement) -> None:
        self._session = session
        self._placement = placement
        self._mailbox = mailbox_beside_me(session.earlier_seconds, session.recorded_steps)
        self._validations = Validations(session, placement) if placement.beside else None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Train to the end, the target or an interruption; all validations are done then."""
        trainer = threading.Thread(target=self._fit, name="raytrain-fit", daemon=True)
        trainer.start()
        try:
            if self._validations is not None:
                for checkpoint in self._session.job.checkpoints.due():
                    self._validations.add(checkpoint)
            while trainer.is_alive():
                trainer.join(_POLL_SECONDS)
                self._listen()
            self._listen()
            if self._validations is not None and not self._session.is_interrupted:
                self._validations.take_ready(wait=True)
        except RaytrainError:
            self._mailbox.stop.remote()
            trainer.join(_STOP_SECONDS)
            raise
        finally:
            with contextlib.suppress(Exception):  # Ray may be gone; the run's own end matters
                if self._validations is not None:
                    self._validations.close()
                ray.kill(self._mailbox)
        if self._error is not None:
            raise self._error

    def _fit(self) -> None:
        # how long the group may wait for a machine that is lost before a smaller one is tried
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
        storage = self._session.job.run_dir / ".ray_train"
        try:
            self._trainer(storage).fit()
            self._error = self._final_fault()
        except ray.train.TrainingFailedError as error:
            self._error = self._final_fault() or RaytrainError(_told_by_ray(error))
        except BaseException as error:
            self._error = error  # raised again in the main thread
        finally:
            shutil.rmtree(storage, ignore_errors=True)

    def _trainer(self, storage: Path) -> TorchTrainer:
        job = self._session.job
        fewest, most = self._placement.workers
        number: Any = (fewest, most) if self._placement.elastic else most  # Ray's types lack a pair
        return TorchTrainer(
            run_worker,
            train_loop_config={
                "job": job,
                "mailbox": self._mailbox,
                "path": [p for p in sys.path if Path(p).is_dir()] + [str(Path.cwd())],
            },
            scaling_config=ScalingConfig(
                num_workers=number,
                use_gpu=self._placement.use_gpu,
                resources_per_worker=None if self._placement.use_gpu else {"CPU": 1},
            ),
            run_config=RunConfig(
                name=f"{time.time_ns()}",
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=job.recipe.faults.max_restarts),
            ),
        )

    def _final_fault(self) -> RaytrainError | None:
        faults: list[str] = ray.get(self._mailbox.final_faults.remote())
        return RaytrainError(faults[0]) if faults else None

    def _listen(self) -> None:
        for message in ray.get(self._mailbox.take.remote()):
            self._handle(message)
        if self._validations is not None:
            self._validations.take_ready()
        if self._session.should_stop:
            self._mailbox.stop.remote()

    def _handle(self, message: Message) -> None:
        if message.kind == "checkpoint":
            checkpoint = Checkpoint(**message.args[0])
            self._session.checkpoint(checkpoint)
            if checkpoint.validation_due and self._validations is not None:
                self._validations.add(checkpoint)
        else:
            getattr(self._session, message.kind)(*message.args)


def run_worker(config: dict[str, Any]) -> None:
    """What each of Ray Train's workers runs."""
    sys.path.extend(p for p in config["path"] if p not in sys.path)
    mailbox = config["mailbox"]
    group: int | None = ray.get(mailbox.enter.remote())
    if group is None:
        return
    context = ray.train.get_context()
    world = World(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_size=context.get_local_world_size(),
        device=str(ray.train.torch.get_device()),
    )
    cores = max(1, (os.cpu_count() or 1) // world.local_size)
    torch.set_num_threads(cores)
    try:
        train(config["job"], world, _OnRay(mailbox, group, config["job"], cores))
    except Exception as error:
        _tell_fault(mailbox, group, world, error)
        if not _all_gave_up(mailbox, world):
            raise  # so that Ray Train ends the workers that still wait for this one


def _tell_fault(mailbox: Any, group: int, world: World, error: Exception) -> None:
    if isinstance(error, RaytrainError):
        ray.get(mailbox.fault.remote(group, str(error), final=True))
    elif _is_lost_peer(error):
        ray.get(mailbox.lost_peer.remote(group))
    else:
        traceback.print_exc()
        text = f"worker {world.rank}: {describe_bug(error)}"
        ray.get(mailbox.fault.remote(group, text, final=False))


def _all_gave_up(mailbox: Any, world: World) -> bool:
    """Whether every worker met a fault that ends the run, as when the loss isn't finite."""
    for _ in range(10):
        if len(ray.get(mailbox.final_faults.remote())) >= world.size:
            return True
        time.sleep(0.1)
    return False


class _OnRay:
    """What the loop needs, over Ray."""

    def __init__(self, mailbox: Any, group: int, job: Job, cores: int) -> None:
        self._mailbox = mailbox
        self._group = group
        self.threads = job.recipe.input.decoders or cores

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        return open_stream(images, start, self.threads)

    def recorded_steps(self) -> int:
        steps: int = ray.get(self._mailbox.recorded_steps.remote())
        return steps

    def begin(self, start: int, world_size: int) -> float:
        seconds: float = ray.get(self._mailbox.begin.remote(self._group, start, world_size))
        return seconds

    def metrics(self, rows: list[StepRow]) -> bool:
        stop: bool = ray.get(self._mailbox.put.remote(self._group, "metrics", rows))
        return stop

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        ray.get(self._mailbox.put.remote(self._group, "checkpoint", asdict(checkpoint)))

    def validation(self, row: ValidationRow) -> None:
        ray.get(self._mailbox.put.remote(self._group, "validation", row))

    def say(self, message: str) -> None:
        ray.get(self._mailbox.put.remote(self._group, "say", message))


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another worker went away: that one is the cause."""
    if isinstance(error, dist.DistError):
        return True
    return bool(re.search(r"gloo|nccl|connection (closed|reset)", str(error), re.IGNORECASE))


def _told_by_ray(error: ray.train.TrainingFailedError) -> str:
    failures = getattr(error, "worker_failures", None)
    cause = next(iter(failures.values())) if failures else error
    return f"training failed: {type(cause).__name__}: {last_line(cause)}; --verbose shows more"
