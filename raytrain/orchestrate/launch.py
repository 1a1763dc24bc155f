"""The engine on Ray: Ray Train's workers run the loop, this process keeps the run's record."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raytrain.data.reader import Batch, TrainingImages, read_with_threads
from raytrain.errors import RaytrainError, describe_bug
from raytrain.orchestrate.cluster import Placement, cluster_hardware, ensure_ray, place
from raytrain.orchestrate.groups import Groups, Turn, Watch
from raytrain.orchestrate.mailbox import Message, mailbox_beside_me
from raytrain.orchestrate.preflight import preflight
from raytrain.orchestrate.stream import open_stream
from raytrain.orchestrate.validate import Validations
from raytrain.parallel.replicas import ReplicaTeam, Waits, check_torchft
from raytrain.parallel.share import time_exchange
from raytrain.parallel.team import FixedTeam, Team
from raytrain.run.checkpoint import Checkpoint, MemoryCopier, Packed, Snapshot
from raytrain.run.rows import StepRow, ValidationRow
from raytrain.run.startup import StartUp, process_age
from raytrain.session import Result, Session
from raytrain.session import Watch as Listener
from raytrain.train import Job, train
from raytrain.world import World

_POLL_SECONDS = 0.2
_HUNG_AFTER = "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"
_EXCHANGE_MB = 4  # two seconds at 100 Mbit/s
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


def run_on_ray(job: Job, request: Request, startup: StartUp) -> Result:
    """Train with Ray Train's workers, on the cluster that this process is in or a local Ray.

    Args:
        job: the run.
        request: what is asked of the cluster.
        startup: what the command has done so far.

    Raises:
        RaytrainError: a fault that the user should read in one line.
    """
    most = request.workers[1] if request.workers else 1
    check_workers(job, most)
    if elastic_steps(job):
        check_torchft()
    where = os.environ.get("RAY_ADDRESS", "a Ray of its own on this machine")
    print(f"run {job.run_dir}: starting on {where}", flush=True)
    standby = most if job.recipe.faults.standby else 0
    ensure_ray(request.verbose, most, spare=standby + int(elastic_steps(job)))
    startup.ended("Ray")
    placement = place(request.workers, request.device, job.recipe.validation.where == "beside")
    if elastic_steps(job):
        check_elastic_steps(placement)
    check_workers(job, placement.workers[1])
    preflight(job, placement.use_gpu, request.verbose)
    startup.ended("pre-flight")
    return run_placed(job, placement, request.price_per_hour, startup)


def run_placed(
    job: Job,
    placement: Placement,
    price_per_hour: float | None,
    startup: StartUp | None = None,
    watch: Listener | None = None,
) -> Result:
    """Train where it has been decided and seen that it can run; Ray is there.

    Args:
        job: the run.
        placement: its part of the cluster.
        price_per_hour: of that, in USD, where known.
        startup: what the command has done so far.
        watch: hears each validation, and may stop the run.
    """
    job = replace(job, beside=placement.beside)
    session = Session(job, cluster_hardware(placement), price_per_hour, startup, watch)
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


def elastic_steps(job: Job) -> bool:
    """Whether a lost worker costs one step rather than a restart."""
    return job.recipe.faults.elastic == "step"


def waits(job: Job) -> Waits:
    """How long workers wait for each other in elastic steps."""
    faults = job.recipe.faults
    return Waits(exchange_s=faults.hang_s, quorum_s=faults.wait_s)


def check_elastic_steps(placement: Placement) -> None:
    """Refuse what elastic steps can't do.

    Raises:
        RaytrainError: too few workers, or no place for validation.
    """
    if placement.workers[1] < 2:
        raise RaytrainError(
            "faults.elastic: step needs two workers or more, so that one is left to go on; "
            "ask for --workers 2, or use --elastic restart"
        )
    if not placement.beside:
        raise RaytrainError(
            "faults.elastic: step validates in a process of its own, for which there is no "
            "GPU left (or validation.where is inline); give one worker less, or use "
            "--elastic restart"
        )


class _Driver:
    """Runs the trainer in a thread, and hands what its workers tell to the session.

    The main thread is free for that, and for Ctrl-C: Ray Train takes the signal for itself where
    it runs in the main thread.
    """

    def __init__(self, session: Session, placement: Placement) -> None:
        self._session = session
        self._placement = placement
        restarts = session.job.recipe.faults.max_restarts
        self._mailbox = mailbox_beside_me(
            session.earlier_seconds,
            session.recorded_steps,
            most_restarts=restarts if elastic_steps(session.job) else None,
        )
        self._storage = session.job.run_dir / ".ray_train"
        self._groups = Groups(session, placement, self._mailbox, self._trainer)
        self._watch = Watch(session, placement, self._mailbox, self._groups)
        self._due = session.job.checkpoints.due() if placement.beside else []
        self._validations: Validations | None = None
        self._made_steps = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Train to the end, the target or an interruption; all validations are done then."""
        trainer = threading.Thread(target=self._fit, name="raytrain-fit", daemon=True)
        trainer.start()
        try:
            while trainer.is_alive():
                trainer.join(_POLL_SECONDS)
                self._listen()
            self._listen()
            if not self._session.is_interrupted:
                self._validate(to_the_end=True)
        except RaytrainError:
            self._mailbox.stop.remote()
            trainer.join(_STOP_SECONDS)
            raise
        finally:
            with contextlib.suppress(Exception):  # Ray may be gone; the run's own end matters
                if self._validations is not None:
                    self._validations.close()
                if self._groups.keeper is not None:
                    ray.kill(self._groups.keeper)  # now: a sweep goes on, and needs the memory
                ray.kill(self._mailbox)
        if self._error is not None:
            raise self._error

    def _fit(self) -> None:
        try:
            self._groups.run()
        except BaseException as error:
            self._error = error  # raised again in the main thread
        finally:
            shutil.rmtree(self._storage, ignore_errors=True)

    def _trainer(self, workers: int, turn: Turn) -> TorchTrainer:
        job = replace(self._session.job, attempt=time.time_ns())
        os.environ[_HUNG_AFTER] = f"{3 * job.recipe.faults.hang_s}"
        replicas = self._replica_groups() if elastic_steps(job) else None
        return TorchTrainer(
            run_worker,
            train_loop_config={
                "job": job,
                "mailbox": self._mailbox,
                "turn": turn,
                "keeper": self._groups.keeper,
                "path": [p for p in sys.path if Path(p).is_dir()] + [str(Path.cwd())],
            },
            scaling_config=ScalingConfig(
                num_workers=workers,
                use_gpu=self._placement.use_gpu,
                resources_per_worker=None if self._placement.use_gpu else {"CPU": 1},
            ),
            run_config=RunConfig(
                name=f"{time.time_ns()}",
                storage_path=str(self._storage),
                # Groups tries again; of replica groups, Ray replaces each one that is lost
                failure_config=FailureConfig(max_failures=-1 if replicas else 0),
            ),
            torch_config=replicas,
        )

    def _replica_groups(self) -> TorchConfig:
        from ray.train.v2.torch.torchft_config import TorchftConfig  # noqa: PLC0415 (if asked for)

        fewest, most = self._placement.workers
        settings = waits(self._session.job).lighthouse(fewest if fewest < most else 1)
        return TorchftConfig(lighthouse_kwargs=settings, backend="gloo")

    def _listen(self) -> None:
        for message in ray.get(self._mailbox.take.remote()):
            self._handle(message)
        self._validate()
        self._watch.look()
        if self._session.should_stop:
            self._mailbox.stop.remote()

    def _handle(self, message: Message) -> None:
        if message.kind == "checkpoint":
            checkpoint = Checkpoint(**message.args[0])
            new = self._session.checkpoint(checkpoint)
            if new and checkpoint.validation_due and self._placement.beside:
                self._due.append(checkpoint)
        else:
            getattr(self._session, message.kind)(*message.args)
            self._made_steps |= message.kind == "metrics"
        self._watch.hear(message.kind)
        self._groups.hear(message.kind)

    def _validate(self, to_the_end: bool = False) -> None:
        """Hand out what is due and take what is done.

        The process that validates starts after the first steps: they wait for nothing else then.
        """
        if self._validations is None:
            if not (self._made_steps and self._placement.beside) and not (to_the_end and self._due):
                return
            self._validations = Validations(self._session, self._placement)
        while self._due:
            self._validations.add(self._due.pop(0))
        self._validations.take_ready(wait=to_the_end)


def run_worker(config: dict[str, Any]) -> None:
    """What each of Ray Train's workers runs."""
    sys.path.extend(p for p in config["path"] if p not in sys.path)
    mailbox, turn = config["mailbox"], config["turn"]
    context = ray.train.get_context()
    node = ray.get_runtime_context().get_node_id()
    if turn.gate is not None:
        _stand_by(mailbox, turn, node, context.get_world_size())
    who = (node, context.get_world_rank(), os.getpid(), socket.gethostname())
    group: int | None = ray.get(mailbox.enter.remote(turn.number, *who))
    if group is None:
        return
    world = World(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_size=context.get_local_world_size(),
        device=str(ray.train.torch.get_device()),
    )
    cores = max(1, (os.cpu_count() or 1) // world.local_size)
    torch.set_num_threads(cores)
    job: Job = config["job"]
    outside = _OnRay(mailbox, group, job, cores, config["keeper"])
    team: Team = ReplicaTeam(world, waits(job)) if elastic_steps(job) else FixedTeam(world)
    if world.is_first:
        ray.get(mailbox.put.remote(group, "worker_is_up", process_age()))
    try:
        with _warnings_said(outside):
            if world.size > 1 and not team.forms_in_steps:
                seconds = time_exchange(world, _EXCHANGE_MB)
                if world.is_first:
                    ray.get(
                        mailbox.put.remote(group, "exchange", _EXCHANGE_MB, seconds, world.size)
                    )
            train(job, team, outside)
    except Exception as error:
        _tell_fault(mailbox, group, world, error)
        if not _all_gave_up(mailbox, world):
            raise  # so that Ray Train ends the workers that still wait for this one


def _stand_by(mailbox: Any, turn: Turn, node: str, world_size: int) -> None:
    """Wait until it is this worker's turn, with what torch imports in a first step imported."""
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    ray.get(mailbox.stand_by.remote(turn.number, node, world_size))
    ray.get(turn.gate.wait.remote(turn.number))


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

    def __init__(self, mailbox: Any, group: int, job: Job, cores: int, keeper: Any) -> None:
        self._mailbox = mailbox
        self._group = group
        self._keeper = keeper
        self._copier = MemoryCopier(self._send)
        self._reopens = elastic_steps(job)
        self.threads = job.recipe.input.decoders or cores

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        if self._reopens:  # at once, a step at a time
            return read_with_threads(images, images.units(start, most_images=1), self.threads)
        return open_stream(images, start, self.threads)

    def recorded_steps(self) -> int:
        steps: int = ray.get(self._mailbox.recorded_steps.remote())
        return steps

    def begin(self, start: int, world_size: int) -> float:
        if self._keeper is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # a run goes on without it
                ray.get(self._keeper.step.remote())  # its process is there before the first step
        seconds: float = ray.get(self._mailbox.begin.remote(self._group, start, world_size))
        return seconds

    def metrics(self, rows: list[StepRow]) -> bool:
        stop: bool = ray.get(self._mailbox.put.remote(self._group, "metrics", rows))
        return stop

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        ray.get(self._mailbox.put.remote(self._group, "checkpoint", asdict(checkpoint)))

    def keep(self, snapshot: Snapshot) -> None:
        self._copier.copy(snapshot)

    def _send(self, state: Packed) -> None:
        packed = (state.about, state.validates, state.files)
        ray.get(self._keeper.keep.remote(self._group, *packed))

    def checkpoint_failed(self, step: int, reason: str) -> None:
        ray.get(self._mailbox.put.remote(self._group, "checkpoint_failed", step, reason))

    def validation(self, row: ValidationRow) -> bool:
        stop: bool = ray.get(self._mailbox.put.remote(self._group, "validation", row))
        return stop

    def say(self, message: str) -> None:
        ray.get(self._mailbox.put.remote(self._group, "say", message))


@contextmanager
def _warnings_said(outside: _OnRay) -> Iterator[None]:
    """Tell the user what raytrain logs as a warning in this process."""
    logger, handler = logging.getLogger("raytrain"), _Saying(outside)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Saying(logging.Handler):
    def __init__(self, outside: _OnRay) -> None:
        super().__init__(logging.WARNING)
        self._outside = outside

    def emit(self, record: logging.LogRecord) -> None:
        self._outside.say(f"warning: {record.getMessage()}")


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another worker went away: that one is the cause."""
    if isinstance(error, dist.DistError):
        return True
    return bool(re.search(r"gloo|nccl|connection (closed|reset)", str(error), re.IGNORECASE))
