"""READ FIRST: the training loop of one worker, top to bottom. Plain torch, no Ray.

The step number is the whole state of progress. A plan says what each step needs; a worker adds
who it is; a checkpoint adds the weights. Everything that an engine (Ray, or this process alone)
does differently is behind ``Outside``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.data.reader import Batch, TrainingImages, ValidationImages, read_with_threads
from raytrain.data.shards import ShardSet
from raytrain.learn.average import WeightAverage
from raytrain.learn.blur import blur_before_strides
from raytrain.learn.compiled import Compiled, allow_programs
from raytrain.learn.loss import LossFunction, build_loss, count_correct, loss_sum
from raytrain.learn.mixup import Mixup
from raytrain.learn.models import build_model
from raytrain.learn.optim import (
    OptimizerMaker,
    build_optimizer,
    parameter_groups,
    set_hyperparameters,
)
from raytrain.learn.precision import Normalizer, NumberFormat
from raytrain.parallel.share import (
    agree,
    average_buffers,
    share_gradients,
    sum_over_workers,
    without_exchange,
)
from raytrain.recipe.plan import Plan, Step, share
from raytrain.recipe.types import Loss, Recipe
from raytrain.run.audit import Audit
from raytrain.run.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    Snapshot,
    copy_to_cpu,
)
from raytrain.run.evaluate import Examiner, Score, Scores
from raytrain.run.feed import DeviceBatch, Feed
from raytrain.run.meter import Meter
from raytrain.run.rows import StepRow, ValidationRow, meets
from raytrain.world import World


@dataclass(frozen=True)
class Parts:
    """Functions of the user's in place of what the recipe names.

    Attributes:
        model: called with the number of classes, returns an nn.Module.
        loss: called with logits (n, classes) and labels (n,), or with mixup the share of each
            class (n, classes); returns one number an image (n,) or their mean.
        optimizer: called with a list of parameter groups, returns a torch optimizer. Its lr,
            momentum (or beta_1) and weight decay are written by the plan at every step.
    """

    model: Callable[[int], nn.Module] | None = None
    loss: LossFunction | None = None
    optimizer: OptimizerMaker | None = None


@dataclass(frozen=True)
class Job:
    """What is to be trained: the same for every worker and every attempt.

    Attributes:
        recipe: how.
        shards: on what.
        run_dir: where checkpoints go; every worker must reach it.
        parts: the user's own functions.
        beside: whether the engine validates checkpoints in a process of their own, so that the
            workers needn't.
    """

    recipe: Recipe
    shards: ShardSet
    run_dir: Path
    parts: Parts = field(default_factory=Parts)
    beside: bool = False

    @property
    def plan(self) -> Plan:
        return Plan(self.recipe, self.shards.num_images("train"))

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.run_dir / "checkpoints", self.recipe.checkpoint.keep)


class Outside(Protocol):
    """What the loop needs of the engine that runs it."""

    threads: int
    """CPU threads that this worker may decode with."""

    def batches(self, images: TrainingImages, start: int) -> Iterator[Batch]:
        """This worker's batches from step ``start`` to the end, read ahead."""

    def recorded_steps(self) -> int:
        """How many steps' metrics rank 0 can count on in the record."""

    def begin(self, start: int, world_size: int) -> float:
        """Rank 0 is about to make step ``start``; gives the training clock in seconds."""

    def metrics(self, rows: list[StepRow]) -> bool:
        """Rank 0 has these steps to tell; gives whether the run should stop."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is whole. Called from another thread of rank 0."""

    def validation(self, row: ValidationRow) -> None:
        """Rank 0 has validated, in line, the weights whose checkpoint is whole by now."""

    def warn(self, message: str) -> None:
        """Something that a user should read."""


def train(job: Job, world: World, outside: Outside) -> None:
    """Train one worker's share of a run, from the newest checkpoint to the end or the target.

    Args:
        job: what to train.
        world: who this worker is; with more than one, torch.distributed's group must be there.
        outside: the engine.

    Raises:
        RaytrainError: a fault that the user should read in one line.
    """
    recipe, plan = job.recipe, job.plan
    start, attempt = find_start(job, world, outside)
    clock = Clock(outside.begin(start, world.size) if world.is_first else 0.0)
    with ExitStack() as cleanup:
        images = TrainingImages(job.shards, plan, world.rank, world.size)
        feed = Feed(outside.batches(images, start), world.device, recipe.input.ahead_batches)
        cleanup.callback(feed.close)
        writer = CheckpointWriter(job.checkpoints, outside.checkpoint)
        cleanup.callback(writer.close)
        audit = Audit(job.run_dir / "audit", attempt, start, world) if recipe.input.audit else None
        learner = build_learner(job, world)
        if start > 0:
            restore(learner, job.checkpoints.at(start))
        if recipe.compile:
            compile_ahead(learner, plan, start, world)
        meter = Meter(plan, world, clock.seconds())
        asked_to_stop = stop = False

        for batch in feed:
            step = plan.step(batch.step)
            torch.manual_seed(_seed(recipe.seed, step.index, world.rank))
            sums, scale = make_step(learner, batch, step, world)
            meter.add(step, sums, batch.waited, clock.seconds(), scale)
            if audit:
                audit.step(step.index, batch.rows)

            validates = plan.validates_after(step.index)
            saves = validates or _due(step, recipe.checkpoint.every_steps)
            if saves or _due(step, recipe.log.every_steps):
                rows, stop = meter.rows(asked_to_stop)
                if world.is_first:
                    asked_to_stop = outside.metrics(rows)
            if saves or stop:
                for model in learner.models:
                    average_buffers(model, world)
                if world.is_first:
                    writer.write(take_snapshot(learner, job, step, clock.seconds()))
            if validates and not job.beside:
                row = validate_in_line(learner, job, step, world, clock, outside.threads)
                if world.is_first:
                    writer.wait()
                    outside.validation(row)
                stop = stop or meets(target_of(recipe), row)
            if stop:
                break
        writer.wait()


@dataclass(frozen=True)
class Learner:
    """What is trained, and what trains it.

    Attributes:
        model: on the device; ``shared`` is the same model with its gradients exchanged.
        shared: what the forward pass calls.
        average: of the model's weights, if the recipe asks for one.
        optimizer: over the model's parameters.
        loss: for training.
        examiner: for validation.
        number_format: precision and loss scale.
        normalizer: pixels to input.
        mixup: mixes the images of a step, if the recipe asks for it.
        images_per_pass: most images in one forward and backward pass.
        clip_norm: most that the norm of all gradients may be.
    """

    model: nn.Module
    shared: nn.Module
    average: WeightAverage | None
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    examiner: Examiner
    number_format: NumberFormat
    normalizer: Normalizer
    mixup: Mixup | None
    images_per_pass: int | None
    clip_norm: float | None

    @property
    def models(self) -> list[nn.Module]:
        """What is validated: the model and, where there is one, the average of its weights."""
        return [self.model] if self.average is None else [self.model, self.average.model]


def build_learner(job: Job, world: World) -> Learner:
    """Model, optimizer and loss with the same first weights on every worker."""
    recipe = job.recipe
    torch.manual_seed(recipe.seed)
    examiner = build_examiner(job, world.device)
    number_format = examiner.number_format
    model = number_format.place(build_job_model(job), world.device)
    averages, mixes = recipe.ema.decay is not None, recipe.augment.mixup > 0
    groups = parameter_groups(model, recipe.optimizer)
    make_optimizer = job.parts.optimizer or (lambda g: build_optimizer(recipe.optimizer, g))
    return Learner(
        model=model,
        shared=share_gradients(Compiled(model) if recipe.compile else model, world),
        average=WeightAverage(model, recipe.ema) if averages else None,
        optimizer=make_optimizer(groups),
        loss=job.parts.loss or build_loss(recipe.loss),
        examiner=examiner,
        number_format=number_format,
        normalizer=examiner.normalizer,
        mixup=Mixup(job.plan, len(job.shards.classes)) if mixes else None,
        images_per_pass=recipe.memory.images_per_pass,
        clip_norm=recipe.optimizer.clip_norm,
    )


def build_job_model(job: Job) -> nn.Module:
    """The job's model with fresh weights, on the CPU."""
    num_classes, spec = len(job.shards.classes), job.recipe.model
    model = job.parts.model(num_classes) if job.parts.model else build_model(spec, num_classes)
    if spec.blurpool:
        blur_before_strides(model)
    return model


def build_examiner(job: Job, device: str) -> Examiner:
    """What validation of a job needs; its loss is without label smoothing."""
    recipe = job.recipe
    number_format = NumberFormat(recipe.precision, device)
    normalizer = Normalizer(
        recipe.normalize.mean, recipe.normalize.std, device, recipe.precision.channels_last
    )
    return Examiner(job.parts.loss or build_loss(Loss()), number_format, normalizer, device)


def compile_ahead(learner: Learner, plan: Plan, start: int, world: World) -> None:
    """Compile for every image size from step ``start`` on, so that no phase begins with a wait.

    Each size gets one pass with black images, which leaves nothing behind.
    """
    coming = [span for span in plan.phases if span.first_step + span.num_steps > start]
    steps = {span.phase.image_px: plan.step(span.first_step) for span in coming}
    allow_programs(len(steps))
    before = copy_to_cpu(learner.model.state_dict())  # a pass changes BatchNorm's statistics
    for image_px, step in steps.items():
        number = plan.share_of(step, world.rank, world.size)[1]
        pixels = torch.zeros(number, image_px, image_px, 3, dtype=torch.uint8, device=world.device)
        labels = torch.zeros(number, dtype=torch.int64, device=world.device)
        batch = DeviceBatch(step.index, pixels, labels, np.zeros(number, np.int64), 0.0)
        with without_exchange(learner.shared):
            forward_backward(learner, batch, step, world)
    learner.optimizer.zero_grad()
    learner.model.load_state_dict(before)


def make_step(
    learner: Learner, batch: DeviceBatch, step: Step, world: World
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One step of the optimizer, by the plan's hyperparameters.

    Returns:
        The sums of ``forward_backward``, and the loss scale that the step was made with.
    """
    set_hyperparameters(learner.optimizer, step)
    sums = forward_backward(learner, batch, step, world)
    scale = learner.number_format.step(learner.optimizer, learner.clip_norm)
    if learner.average:
        learner.average.update(learner.model, step.index + 1)
    return sums, scale


def forward_backward(
    learner: Learner, batch: DeviceBatch, step: Step, world: World
) -> tuple[Tensor, Tensor]:
    """Gradients of the step's mean loss over *all* its images, in as many passes as memory needs.

    The exchange averages over workers, so each image's loss is weighted with
    ``world.size / step.count``: however the images are split, each counts the same.

    Returns:
        (sum of the losses, right top-1 guesses) over this worker's images, on the device.
    """
    pixels, labels = batch.pixels, batch.labels
    if learner.mixup:
        pixels, labels = learner.mixup(pixels, labels, step, world)
    number = len(batch.labels)
    passes = -(-number // (learner.images_per_pass or number))
    total_loss = torch.zeros((), device=batch.labels.device)
    correct = torch.zeros((), dtype=torch.int64, device=batch.labels.device)
    for i in range(passes):
        offset, size = share(number, i, passes)
        part = slice(offset, offset + size)
        with ExitStack() as context:
            if i < passes - 1:
                context.enter_context(without_exchange(learner.shared))
            with learner.number_format.autocast():
                logits = learner.shared(learner.normalizer(pixels[part]))
            logits = logits.float()
            loss = loss_sum(learner.loss, logits, labels[part])
            learner.number_format.scaler.scale(loss * (world.size / step.count)).backward()
        total_loss += loss.detach()
        correct += count_correct(logits.detach(), batch.labels[part], 1)
    return total_loss, correct


def find_start(job: Job, world: World, outside: Outside) -> tuple[int, int]:
    """Where the newest whole checkpoint left the run.

    Returns:
        (steps done, a number for this attempt that is larger than that of any before); the same
        on every worker.
    """
    newest = None
    if world.is_first:
        job.checkpoints.set_aside_after(outside.recorded_steps(), outside.warn)
        newest = job.checkpoints.newest(outside.warn)
    start, attempt = agree([newest.step if newest else 0, time.time_ns()], world)
    return start, attempt


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load weights, their average, optimizer and loss scale."""
    learner.model.load_state_dict(checkpoint.load_model())
    if learner.average:
        learner.average.model.load_state_dict(checkpoint.load_average())
    state = checkpoint.load_training()
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.number_format.scaler.load_state_dict(state["scaler"])


def take_snapshot(learner: Learner, job: Job, step: Step, seconds: float) -> Snapshot:
    """A copy of the state after a step, in CPU memory."""
    recipe, plan = job.recipe, job.plan
    return Snapshot(
        step=step.index + 1,
        epoch=_epochs_done(plan, step),
        seconds=seconds,
        image_px=recipe.validation.image_px or step.image_px,
        validate=plan.validates_after(step.index),
        model=copy_to_cpu(learner.model.state_dict()),
        training={
            "optimizer": _copy(learner.optimizer.state_dict()),
            "scaler": learner.number_format.scaler.state_dict(),
        },
        ema=copy_to_cpu(learner.average.model.state_dict()) if learner.average else None,
    )


def validate_in_line(
    learner: Learner, job: Job, step: Step, world: World, clock: Clock, threads: int
) -> ValidationRow:
    """Score what is trained on all validation images, shared by the workers; each gets the row."""
    validation = job.recipe.validation
    offset, size = share(job.shards.num_images("val"), world.rank, world.size)
    image_px = validation.image_px or step.image_px
    images = validation_images(job, image_px, range(offset, offset + size))
    with clock.paused(validation.clock == "outside"):
        mine = [score_rows(learner.examiner, model, images, threads) for model in learner.models]
        sums = torch.tensor([s.as_list() for s in mine], dtype=torch.float64, device=world.device)
        scores = Scores(*(Score(*row) for row in sum_over_workers(sums, world).tolist()))
    return validation_row(scores, step.index + 1, _epochs_done(job.plan, step), clock.seconds())


def score_checkpoint(
    job: Job, checkpoint: Checkpoint, model: nn.Module, device: str, threads: int
) -> Scores:
    """Score the weights of a checkpoint, and their average, on all validation images.

    Args:
        job: the run.
        checkpoint: whose weights.
        model: one of the job's models, on the device; its weights are replaced.
        device: torch device name.
        threads: CPU threads to decode with.
    """
    rows = range(job.shards.num_images("val"))
    images = validation_images(job, checkpoint.image_px, rows)
    examiner = build_examiner(job, device)
    states = [checkpoint.load_model()]
    if checkpoint.has_average:
        states.append(checkpoint.load_average())
    scores: list[Score] = []
    for state in states:
        model.load_state_dict(state)
        scores.append(score_rows(examiner, model, images, threads))
    return Scores(*scores)


def validation_images(job: Job, image_px: int, rows: range) -> ValidationImages:
    """Validation rows as the recipe wants them seen."""
    validation = job.recipe.validation
    return ValidationImages(job.shards, image_px, validation.crop_ratio, validation.batch, rows)


def score_rows(
    examiner: Examiner, model: nn.Module, images: ValidationImages, threads: int
) -> Score:
    """Score a model on validation images, decoded by threads of this process."""
    return examiner.score(model, read_with_threads(images, images.units(), threads))


def validation_row(scores: Scores, step: int, epoch: float, seconds: float) -> ValidationRow:
    """Scores of all validation images as a row of validations.jsonl."""
    score, ema = scores.raw, scores.ema
    return ValidationRow(
        step=step,
        epoch=epoch,
        seconds=seconds,
        top1=score.top1 / score.images,
        top5=score.top5 / score.images,
        loss=score.loss / score.images,
        num_images=round(score.images),
        ema_top1=ema.top1 / ema.images if ema else None,
        ema_top5=ema.top5 / ema.images if ema else None,
    )


def target_of(recipe: Recipe) -> dict[str, float]:
    """The shares that the recipe asks for; empty without a target."""
    return {k: v for k, v in recipe.target.model_dump().items() if v is not None}


class Clock:
    """The training clock: seconds since a run began, minus what its rule leaves out."""

    def __init__(self, seconds: float) -> None:
        self._zero = time.perf_counter() - seconds

    def seconds(self) -> float:
        return time.perf_counter() - self._zero

    @contextmanager
    def paused(self, when: bool) -> Iterator[None]:
        """Stand still inside, if ``when``."""
        began = time.perf_counter()
        yield
        if when:
            self._zero += time.perf_counter() - began


def _epochs_done(plan: Plan, step: Step) -> float:
    return plan.samples_before(step.index + 1) / plan.num_images


def _due(step: Step, every: int | None) -> bool:
    return every is not None and (step.index + 1) % every == 0


def _seed(seed: int, step: int, rank: int) -> int:
    """Of the model's own randomness, such as dropout: a function of the step, so never saved."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63


def _copy(state: object) -> object:
    """A deep copy of an optimizer's state dict with its tensors on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value) for value in state]
    return state
