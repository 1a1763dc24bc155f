"""The plan of a run: a pure function from the number of a step to all that the step needs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from raytrain.errors import RaytrainError
from raytrain.recipe.curve import ResolvedCurve
from raytrain.recipe.types import Phase, Recipe


@dataclass(frozen=True, slots=True)
class Step:
    """All that one optimizer step needs to know, the same for every number of workers."""

    index: int
    """Number of the step in the run, from 0."""
    epoch: int
    """Number of the epoch, from 0."""
    phase: int
    """Number of the phase, from 0."""
    first: int
    """Position of the step's first image in the epoch's order."""
    count: int
    """Images in the step over all workers: positions first .. first + count - 1."""
    epoch_progress: float
    """Epochs done before the step, with the fraction: where the curves are read."""
    image_px: int
    """Height and width of the images, in pixels."""
    crop_area: tuple[float, float]
    """Least and most of an image's area that a random crop keeps, shares in (0, 1]."""
    rect_val: bool
    """Whether validation images keep their aspect ratio after this step."""
    lr: float
    """Learning rate."""
    momentum: float
    """Momentum."""
    weight_decay: float
    """Weight decay."""
    ends_epoch: bool
    """Whether this is the last step of its epoch."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase placed in the run."""

    index: int
    """Number of the phase, from 0."""
    phase: Phase
    """What the recipe says of it."""
    first_step: int
    """The phase's first step, counted over the run."""
    num_steps: int
    """Steps in the phase."""
    steps_per_epoch: int
    """Steps in each of its epochs."""
    first_epoch: int
    """The phase's first epoch, counted over the run."""
    num_epochs: int
    """Epochs in the phase."""


@dataclass(frozen=True)
class Plan:
    """What each step of a run does, from the recipe and the number of training images alone.

    An epoch of N images in a phase with batch B has k = ceil(N / B) steps, and step i of it uses
    positions N*i//k to N*(i+1)//k - 1 of the epoch's order. So each image is used exactly once,
    no step is more than one image larger than another, and none exceeds B. Full batches and a
    rest would instead end most epochs with a tiny batch, whose noisy gradient and batch
    statistics come right before the validation.

    Raises RaytrainError where there are no images.
    """

    recipe: Recipe
    num_images: int

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise RaytrainError(
                "the training set has no images; prepare it from a folder with some"
            )

    @cached_property
    def phases(self) -> tuple[PhaseSpan, ...]:
        """The phases in turn, each with its first step and epoch."""
        spans: list[PhaseSpan] = []
        step = epoch = 0
        for index, phase in enumerate(self.recipe.phases):
            steps_per_epoch = -(-self.num_images // phase.batch)
            num_steps = steps_per_epoch * phase.epochs
            spans.append(
                PhaseSpan(index, phase, step, num_steps, steps_per_epoch, epoch, phase.epochs)
            )
            step += num_steps
            epoch += phase.epochs
        return tuple(spans)

    @property
    def num_steps(self) -> int:
        """Steps in the run."""
        return self.phases[-1].first_step + self.phases[-1].num_steps

    @property
    def num_epochs(self) -> int:
        """Epochs in the run."""
        return self.phases[-1].first_epoch + self.phases[-1].num_epochs

    @property
    def min_count(self) -> int:
        """Fewest images in any step, or pairs with mixup: the most workers that can share it."""
        fewest = min(self.num_images // span.steps_per_epoch for span in self.phases)
        return -(-fewest // self.recipe.augment.images_together)

    @cached_property
    def curves(self) -> dict[str, ResolvedCurve]:
        """The curves `lr`, `momentum` and `weight_decay`, placed in the run."""
        schedule = self.recipe.schedule
        return {
            "lr": schedule.lr.resolve(self.num_epochs),
            "momentum": schedule.momentum.resolve(self.num_epochs),
            "weight_decay": schedule.weight_decay.resolve(self.num_epochs),
        }

    def step(self, s: int) -> Step:
        """Return step `s`, 0 <= s < num_steps; IndexError for any other number."""
        span, epoch, i = self._locate(s)
        first = self.num_images * i // span.steps_per_epoch
        end = self.num_images * (i + 1) // span.steps_per_epoch
        progress = epoch + first / self.num_images
        base = self.recipe.schedule.lr_for_batch
        lr_scale = span.phase.batch / base if base else 1.0
        return Step(
            index=s,
            epoch=epoch,
            phase=span.index,
            first=first,
            count=end - first,
            epoch_progress=progress,
            image_px=span.phase.image_px,
            crop_area=span.phase.crop_area,
            rect_val=span.phase.rect_val,
            lr=self.curves["lr"].at(progress) * lr_scale,
            momentum=self.curves["momentum"].at(progress),
            weight_decay=self.curves["weight_decay"].at(progress),
            ends_epoch=i == span.steps_per_epoch - 1,
        )

    def share_of(self, step: Step, rank: int, world: int) -> tuple[int, int]:
        """Return (offset, size) of the images of a step that worker `rank` of `world` takes.

        As `share`, but images that are mixed with each other stay together.
        """
        together = self.recipe.augment.images_together
        offset, size = share(-(-step.count // together), rank, world)
        first, end = offset * together, min((offset + size) * together, step.count)
        return first, end - first

    def validates_after(self, s: int) -> bool:
        """Tell whether the model is validated after step `s`.

        That is after the last step of each `validation.every_epochs`-th epoch, and after the
        last step of the run.
        """
        span, epoch, i = self._locate(s)
        if s == self.num_steps - 1:
            return True
        due = (epoch + 1) % self.recipe.validation.every_epochs == 0
        return due and i == span.steps_per_epoch - 1

    def samples_before(self, s: int) -> int:
        """Return the images used by all steps before `s`, 0 <= s <= num_steps."""
        if s == self.num_steps:
            return self.num_images * self.num_epochs
        span, epoch, i = self._locate(s)
        return self.num_images * epoch + self.num_images * i // span.steps_per_epoch

    def _locate(self, s: int) -> tuple[PhaseSpan, int, int]:
        """Return the phase of step `s`, its epoch, and its number in that epoch."""
        if not 0 <= s < self.num_steps:
            raise IndexError(f"step {s} is outside the plan's 0 to {self.num_steps - 1}")
        span = self.phases[bisect_right(self.phases, s, key=lambda span: span.first_step) - 1]
        epochs, i = divmod(s - span.first_step, span.steps_per_epoch)
        return span, span.first_epoch + epochs, i


def share(count: int, rank: int, world: int) -> tuple[int, int]:
    """Return (offset, size) of the contiguous share of `count` images that worker `rank` takes.

    The shares of all `world` workers follow each other, cover all images, and differ in size by
    at most one. Raises ValueError unless count >= 0 and 0 <= rank < world.
    """
    if count < 0 or not 0 <= rank < world:
        raise ValueError(f"no share of {count} images for worker {rank} of {world}")
    offset = count * rank // world
    return offset, count * (rank + 1) // world - offset
