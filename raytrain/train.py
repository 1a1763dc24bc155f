"""READ FIRST: the training loop of one worker, top to bottom. Plain torch, no Ray.

The step number is the whole state of progress. A plan says what each step needs; a worker adds
who it is; a checkpoint adds the weights. Everything that an engine (Ray, or this process alone)
does differently is behind ``Outside``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.data.decoders import choose_decoder
from raytrain.data.reader import (
    Batch,
    TrainingImages,
    ValidationImages,
    View,
    read_with_threads,
)
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.learn.average import WeightAverage
from raytrain.learn.blur import blur_before_strides
from raytrain.learn.compiled import Compiled, allow_programs
from raytrain.learn.loss import LossFunction, build_loss, count_correct, loss_sum
from raytrain.learn.mixup import Mixup
from raytrain.learn.models import build_model
from raytrain.learn.optim import (
    OptimizerMaker,
    build_optimizer,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
    set_hyperparameters,
)
from raytrain.learn.precision import Normalizer, NumberFormat
from raytrain.parallel.share import without_exchange
from raytrain.parallel.team import State, Team
from raytrain.recipe.plan import Plan, Step, share
from raytrain.recipe.types import Loss, Recipe
from raytrain.run.audit import Audit
from raytrain.run.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    CheckpointWriter,
    Snapshot,
)
from raytrain.run.evaluate import Examiner, Score, Scores
from raytrain.run.feed import DeviceBatch, ShareFeed
from raytrain.run.meter import Meter, tally
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
        attempt: number of these workers' attempt; that of later ones is larger.
    """

    recipe: Recipe
    shards: ShardSet
    run_dir: Path
    parts: Parts = field(default_factory=Parts)
    beside: bool = False
    attempt: int = field(default_factory=time.time_ns)

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
        """Rank 0 of workers that have formed (again) is about to make step ``start``; gives the
        training clock in seconds."""

    def metrics(self, rows: list[StepRow]) -> bool:
        """Rank 0 has these steps to tell, the first of which may be told already; gives whether
        the run should stop."""

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is whole, as may be known. Called from any thread of who wrote it."""

    def keep(self, snapshot: Snapshot) -> None:
        """Rank 0 has a state for a restart to go on from, which nobody waits for."""

    def checkpoint_failed(self, step: int, reason: str) -> None:
        """The checkpoint after ``step`` steps isn't there. Called from any thread, as above."""

    def validation(self, row: ValidationRow) -> bool:
        """Rank 0 has validated, in line, the weights whose checkpoint is whole by now.

        Gives whether the run should stop.
        """

    def say(self, message: str) -> None:
        """Rank 0 has a line for the user."""


def train(job: Job, team: Team, outside: Outside) -> None:
    """Train one worker's share of a run, from the newest checkpoint to the end or the target.

    Args:
        job: what to train.
        team: the workers that share each step, and who this one is.
        outside: the engine.

    Raises:
        RaytrainError: a fault that the user should read in one line.
    """
    recipe, world = job.recipe, team.world
    start, attempt = find_start(job, team, outside)
    with ExitStack() as cleanup:
        cleanup.callback(team.leave)
        feed = ShareFeed(training_batches(job, world, outside), recipe.input.ahead_batches)
        cleanup.callback(feed.close)
        clock = Clock(0.0)
        if not team.forms_in_steps:
            clock = Clock(outside.begin(start, world.size) if world.is_first else 0.0)
            feed.open(start, world)
        writer = CheckpointWriter(
            job.checkpoints,
            outside.checkpoint,
            outside.checkpoint_failed,
            recipe.checkpoint.max_failures,
        )
        cleanup.callback(writer.close)
        learner = build_learner(job, team)
        if team.forms_in_steps:
            start = restore_newest(learner, job)
        elif start > 0:
            restore(learner, job.checkpoints.at(start))
        if recipe.compile:
            compile_ahead(learner, job.plan, start, world)
        make_steps(
            job,
            team,
            outside,
            Hands(
                feed=feed,
                learner=learner,
                meter=Meter(job.plan, clock.seconds(), retells=team.forms_in_steps),
                lead=Lead(team, outside, writer, clock),
                audit=Audit(job.run_dir / "audit", attempt, world.rank, recipe.input.audit),
            ),
            start,
        )


@dataclass(frozen=True)
class Hands:
    """What a worker makes steps with.

    Attributes:
        feed: its share of the images.
        learner: what is trained.
        meter: what is told of it.
        lead: what only the first worker does.
        audit: which rows were used.
    """

    feed: ShareFeed
    learner: Learner
    meter: Meter
    lead: Lead
    audit: Audit


def make_steps(job: Job, team: Team, outside: Outside, hands: Hands, start: int) -> None:
    """The loop: from step ``start`` to the end, the target or a request to stop."""
    recipe, plan, learner, lead = job.recipe, job.plan, hands.learner, hands.lead
    team.prepare(*state_functions(learner, hands.meter, team.world.device), lead.hand_on)
    asked_to_stop = stop = False
    for index in team.steps(start, plan.num_steps):
        world, step = team.world, plan.step(index)
        if team.formed_anew:
            lead.pass_on(index)
            hands.meter.begins(lead.clock.seconds())
        batch = hands.feed.at(index, world)
        hands.audit.tries(index, team.quorum, batch.rows)
        validates = plan.validates_after(index)
        saves = validates or _due(step, recipe.checkpoint.every_steps)
        keeps = _due(step, recipe.checkpoint.memory_steps) and not saves
        tells = saves or keeps or _due(step, recipe.log.every_steps)

        torch.manual_seed(_seed(recipe.seed, index, world.rank))
        sums = forward_backward(learner, batch, step, world)
        scale = learner.number_format.scale()
        told = tally(sums, batch.waited, scale, lead.clock.seconds(), asked_to_stop, world)
        if not team.has_made(learner.model, told, learner.models if tells else ()):
            learner.optimizer.zero_grad()
            continue
        update(learner, step)
        hands.meter.add(step, world.size, told)
        hands.audit.made(index, team.quorum)

        if tells:
            rows, stop = hands.meter.rows(team.add_up)
            if world.is_first:
                asked_to_stop = outside.metrics(rows)
        if (saves or stop) and (world.is_first or team.forms_in_steps):
            snapshot = take_snapshot(learner, job, step, lead.clock.seconds())
            lead.save(snapshot, needed=validates or stop)
        elif keeps and world.is_first:
            outside.keep(take_snapshot(learner, job, step, lead.clock.seconds()))
        if validates and not job.beside:
            row = validate_in_line(learner, job, step, team, lead.clock, outside.threads)
            told_to_stop = team.agree([int(lead.validated(row))]) != [0]
            stop = stop or told_to_stop or meets(target_of(recipe), row)
        if stop:
            break
    lead.end()


class Lead:
    """What one worker does for all, where it may be lost and another takes over.

    The first worker writes checkpoints. Where it may be lost, the others hold what it writes. A new
    process may have its place by the time that they form anew, and knows nothing of what it was to
    write: the first of those who do writes that.

    Args:
        team: tells which worker is the first.
        outside: the engine.
        writer: of checkpoints.
        clock: the training clock; that of the first worker is the run's.
    """

    def __init__(
        self, team: Team, outside: Outside, writer: CheckpointWriter, clock: Clock
    ) -> None:
        self._team, self._outside, self._writer = team, outside, writer
        self.clock = clock

    def pass_on(self, index: int) -> None:
        """The team has formed to make a step: take the lead where it is this worker's now."""
        if self._team.world.is_first:
            self.clock = Clock(self._outside.begin(index, self._team.world.size))
        self._inherit()

    def save(self, snapshot: Snapshot, *, needed: bool) -> None:
        """Write a checkpoint, or hold it until the next one."""
        if self._team.world.is_first:
            self._writer.write(snapshot, needed=needed)
        else:
            self._writer.hold(snapshot)

    def validated(self, row: ValidationRow) -> bool:
        """Tell of a validation in line, once the checkpoint of its weights is whole.

        Gives whether the run should stop, as far as this worker knows.
        """
        if not self._team.world.is_first:
            return False
        self._writer.wait()
        return self._outside.validation(row)

    def hand_on(self) -> None:
        """The team is at the end, and may have formed anew for that."""
        self._inherit()
        self.end()

    def end(self) -> None:
        """The checkpoints that are this worker's to write are whole when it returns."""
        self._writer.finish()

    def _inherit(self) -> None:
        """See to it that the last checkpoint is there, and known: a lost one was to write it."""
        if self._team.is_heir:
            self._writer.write_held()


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
        num_classes: outputs that the model must have.
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
    num_classes: int
    images_per_pass: int | None
    clip_norm: float | None

    @property
    def models(self) -> list[nn.Module]:
        """What is validated: the model and, where there is one, the average of its weights."""
        return [self.model] if self.average is None else [self.model, self.average.model]


def build_learner(job: Job, team: Team) -> Learner:
    """Model, optimizer and loss with the same first weights on every worker."""
    recipe, world = job.recipe, team.world
    torch.manual_seed(recipe.seed)
    examiner = build_examiner(job, world.device)
    number_format = examiner.number_format
    model = number_format.place(build_job_model(job), world.device)
    averages, mixes = recipe.ema.decay is not None, recipe.augment.mixup > 0
    groups = parameter_groups(model, recipe.optimizer)
    make_optimizer = job.parts.optimizer or (lambda g: build_optimizer(recipe.optimizer, g))
    return Learner(
        model=model,
        shared=team.share_gradients(Compiled(model) if recipe.compile else model),
        average=WeightAverage(model, recipe.ema) if averages else None,
        optimizer=make_optimizer(groups),
        loss=job.parts.loss or build_loss(recipe.loss),
        examiner=examiner,
        number_format=number_format,
        normalizer=examiner.normalizer,
        mixup=Mixup(job.plan, len(job.shards.classes)) if mixes else None,
        num_classes=len(job.shards.classes),
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
    state = learner.model.state_dict()  # a pass changes BatchNorm's statistics
    before = {name: value.clone() for name, value in state.items()}
    for image_px, step in steps.items():
        number = plan.share_of(step, world.rank, world.size)[1]
        pixels = torch.zeros(number, image_px, image_px, 3, dtype=torch.uint8, device=world.device)
        labels = torch.zeros(number, dtype=torch.int64, device=world.device)
        batch = DeviceBatch(step.index, pixels, labels, np.zeros(number, np.int64), 0.0)
        with without_exchange(learner.shared):
            forward_backward(learner, batch, step, world)
    learner.optimizer.zero_grad()
    learner.model.load_state_dict(before)


def update(learner: Learner, step: Step) -> None:
    """The optimizer's step, by the plan's hyperparameters, with the gradients that are there."""
    set_hyperparameters(learner.optimizer, step)
    learner.number_format.step(learner.optimizer, learner.clip_norm)
    if learner.average:
        learner.average.update(learner.model, step.index + 1)


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
            _check_outputs(logits, learner.num_classes)
            loss = loss_sum(learner.loss, logits, labels[part])
            learner.number_format.scaler.scale(loss * (world.size / step.count)).backward()
        total_loss += loss.detach()
        correct += count_correct(logits.detach(), batch.labels[part], 1)
    return total_loss, correct


def _check_outputs(logits: Tensor, num_classes: int) -> None:
    if logits.ndim != 2 or logits.shape[1] != num_classes:
        raise RaytrainError(
            f"model: gives shape {tuple(logits.shape)} for {len(logits)} images and {num_classes} "
            f"classes; it must give ({len(logits)}, {num_classes})"
        )


def find_start(job: Job, team: Team, outside: Outside) -> tuple[int, int]:
    """Where the newest whole checkpoint left the run.

    Returns:
        (steps done, a number for this attempt that is larger than that of any before), the same
        on every worker. Of a team that forms in steps, each worker finds out for itself.
    """
    if team.forms_in_steps:
        return 0, job.attempt
    newest = None
    if team.world.is_first:
        job.checkpoints.set_aside_after(outside.recorded_steps(), outside.say)
        newest = job.checkpoints.newest(outside.say)
        if newest is None and outside.recorded_steps() > 0:
            outside.say("warning: no whole checkpoint to go on from; starting again at step 0")
    start, attempt = team.agree([newest.step if newest else 0, time.time_ns()])
    return start, attempt


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load weights, their average, optimizer and loss scale."""
    learner.model.load_state_dict(checkpoint.load_model())
    if learner.average:
        learner.average.model.load_state_dict(checkpoint.load_average())
    state = checkpoint.load_training()
    load_optimizer_state(learner.optimizer, learner.model, state["optimizer"])
    learner.number_format.scaler.load_state_dict(state["scaler"])


def restore_newest(learner: Learner, job: Job) -> int:
    """Restore the newest checkpoint while others may go on training, and pruning.

    Returns:
        Steps done.
    """
    while (newest := job.checkpoints.newest(lambda _line: None)) is not None:
        try:
            restore(learner, newest)
        except OSError:
            if newest.path.exists():
                raise
            continue  # a newer one has taken its place
        return newest.step
    return 0


def state_functions(
    learner: Learner, meter: Meter, device: str
) -> tuple[Callable[[], State], Callable[[State], None]]:
    """What a worker gives to a peer that joins in mid-run, and how that one takes it."""
    parts: list[tuple[str, Any]] = [
        ("model", learner.model),
        ("scaler", learner.number_format.scaler),
    ]
    if learner.average:
        parts.append(("average", learner.average.model))

    def give() -> State:
        state = {name: part.state_dict() for name, part in parts}
        optimizer = optimizer_state(learner.optimizer, learner.model)
        return state | {"optimizer": optimizer, "meter": meter.state()}

    def take(state: State) -> None:
        for name, part in parts:
            part.load_state_dict(state[name])
        load_optimizer_state(learner.optimizer, learner.model, state["optimizer"])
        meter.load(state["meter"], device)

    return give, take


def take_snapshot(learner: Learner, job: Job, step: Step, seconds: float) -> Snapshot:
    """The state after a step. Its tensors are the live ones."""
    plan = job.plan
    return Snapshot(
        step=step.index + 1,
        epoch=_epochs_done(plan, step),
        seconds=seconds,
        validate=plan.validates_after(step.index),
        model=learner.model.state_dict(),
        training={
            "optimizer": optimizer_state(learner.optimizer, learner.model),
            "scaler": learner.number_format.scaler.state_dict(),
        },
        ema=learner.average.model.state_dict() if learner.average else None,
    )


def validate_in_line(
    learner: Learner, job: Job, step: Step, team: Team, clock: Clock, threads: int
) -> ValidationRow:
    """Score what is trained on all validation images, shared by the workers; each gets the row."""
    validation, world = job.recipe.validation, team.world
    offset, size = share(job.shards.num_images("val"), world.rank, world.size)
    images = validation_images(job, step, range(offset, offset + size))
    with clock.paused(validation.clock == "outside"):
        mine = [score_rows(learner.examiner, model, images, threads) for model in learner.models]
        sums = torch.tensor([s.as_list() for s in mine], dtype=torch.float64, device=world.device)
        scores = Scores(*(Score(*row) for row in team.add_up(sums).tolist()))
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
    images = validation_images(job, job.plan.step(checkpoint.step - 1), rows)
    examiner = build_examiner(job, device)
    states = [checkpoint.load_model()]
    if checkpoint.has_average:
        states.append(checkpoint.load_average())
    scores: list[Score] = []
    for state in states:
        model.load_state_dict(state)
        scores.append(score_rows(examiner, model, images, threads))
    return Scores(*scores)


def training_batches(
    job: Job, world: World, outside: Outside
) -> Callable[[int, World], Iterator[Batch]]:
    """What reads a worker's part of the run from a step on, whoever the worker then is.

    The decoder is the one that the recipe or the hardware chooses.
    """
    decoder = choose_decoder(job.recipe.input.decoder, world.device, outside.threads)
    if world.is_first:
        outside.say(f"decoder {decoder.name}, {outside.threads} at a time a worker")
        largest = job.shards.sizes[-1]
        most_px = max(phase.image_px for phase in job.recipe.phases)
        if largest is not None and largest < most_px:
            outside.say(
                f"warning: images of {most_px} px are made of ones prepared at {largest} px; "
                "prepare a larger size for sharper ones"
            )
    images = TrainingImages(job.shards, job.plan, world.rank, world.size, decoder)
    return lambda step, seat: outside.batches(
        replace(images, rank=seat.rank, world_size=seat.size), step
    )


def validation_images(job: Job, after: Step, rows: range) -> ValidationImages:
    """Validation rows as the recipe wants them seen after a step."""
    validation = job.recipe.validation
    image_px = validation.image_px or after.image_px
    view = View(image_px, validation.crop_ratio, after.rect_val)
    return ValidationImages(job.shards, view, validation.batch, rows)


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
