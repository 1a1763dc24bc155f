"""The nouns of a run: what a step, a validation, an event and an end tell.

Every `seconds` is the training clock: seconds since the first step began, through all resumes.
Shares are 0..1. A number that was not finite (a loss that blew up) is `null` in the files and NaN
in memory, so that the files stay plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raytrain.recipe.types import ValidationClock

Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Shares = Mapping[str, float]
Status = Literal["target_reached", "target_missed", "completed", "stopped", "failed", "interrupted"]
"""`stopped`: by a sweep, which had seen enough; `interrupted`: by the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step."""

    step: int
    """0-based index of the step."""
    epoch: int
    """0-based epoch that the step belongs to."""
    phase: int
    """0-based phase of the recipe."""
    samples_seen: int
    """Images used by all steps up to and with this one."""
    seconds: Annotated[float, Field(gt=0)]
    """Training clock at the end of the step."""
    lr: float
    momentum: float
    weight_decay: float
    batch: int
    """Images in the step, over all workers."""
    image_px: int
    """Side of the square images, in pixels."""
    loss: Number
    """Mean training loss over the images of the step."""
    top1: Number
    """Training top-1 over the images of the step, as a share."""
    images_per_s: float
    """Images a second over all workers."""
    data_wait_s: float
    """Seconds that the step waited for its images, mean over the workers."""
    loss_scale: float
    """Factor on the loss for fp16 gradients; 1 without."""
    world_size: int
    """Workers that took part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """The model on all validation images."""

    step: int
    """Number of steps done: 100 after the step of index 99."""
    epoch: float
    """Epochs done."""
    seconds: float
    """Training clock by the run's rule (see RunFacts.validation_clock)."""
    top1: float
    top5: float
    loss: Number
    num_images: int
    ema_top1: float | None = None
    """Of the averaged weights; None without an average."""
    ema_top5: float | None = None

    def counted(self, key: str) -> float:
        """`top1` or `top5` of the weights that count: the averaged ones where there are any."""
        averaged: float | None = getattr(self, f"ema_{key}")
        value: float = getattr(self, key)
        return value if averaged is None else averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened: start, startup, exchange, resume, resize, fault, recovery,
    checkpoint, target, end."""

    kind: str
    step: int
    """Number of steps done."""
    seconds: float
    time: str
    """Wall clock, ISO 8601, UTC."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the line, such as `world_size` of a resize or `reason` of a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the workers run on, over all nodes."""

    nodes: int
    cpu: str
    """Model name of the CPU."""
    cpus: int
    gpu: str | None = None
    """Model name of the GPU; None without."""
    gpus: int = 0

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        gpus = f"{self.gpus} x {self.gpu}, " if self.gpu else ""
        return f"{nodes}: {gpus}{self.cpus} CPUs ({self.cpu})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """The ShardSet that a run trains on."""

    uri: str
    fingerprint: str
    num_classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run when it starts; kept in its `start` and `resume` events."""

    model: str
    data: DataSource
    total_steps: int
    hardware: Hardware
    versions: Mapping[str, str]
    """Version of raytrain, ray, torch, python and, on GPUs, cuda."""
    target: Shares = field(default_factory=dict)
    """Shares to reach, of `top1`, `top5` or both; empty without a target."""
    validation_clock: ValidationClock = "counted"
    """Whether the time that validation takes counts in the training clock."""
    git_commit: str | None = None
    price_per_hour: float | None = None
    """Price in USD of all the hardware for one hour; None where none was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended."""

    status: Status
    reason: str
    """One line for a person."""
    model: str
    target: Shares
    top1: float | None
    """Of the last validation; None without one."""
    top5: float | None
    best_top1: float | None
    best_top5: float | None
    seconds: float
    """Training clock at the end."""
    seconds_to_target: float | None
    """Clock of the first validation at the target: DAWNBench's rule."""
    startup_seconds: float | None
    """From the command to the first step, in the last attempt; None where it got no step."""
    images_per_s: float | None
    """Images used over the training clock, so with every pause that the clock counts."""
    steps: int
    epochs: float
    """Epochs done, as far as validations and steps tell."""
    world_sizes: Sequence[int]
    """Number of workers, in order of change."""
    restarts: int
    faults: int
    validation_clock: ValidationClock
    data: DataSource
    hardware: Hardware
    versions: Mapping[str, str]
    git_commit: str | None
    price_per_hour: float | None
    cost: float | None
    """USD: the price for the time of startup and training clock together."""


def meets(target: Shares, row: ValidationRow) -> bool:
    """Whether the weights that count are at the target: at every share that is asked for."""
    return bool(target) and all(row.counted(key) >= share for key, share in target.items())


def first_at_target(target: Shares, rows: Sequence[ValidationRow]) -> ValidationRow | None:
    """The validation whose clock is the time to the target; None where the target was missed."""
    return next((row for row in rows if meets(target, row)), None)
