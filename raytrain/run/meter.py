"""What a worker counts at each step, and the rows of the log."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from raytrain.errors import RaytrainError
from raytrain.recipe.plan import Plan, Step
from raytrain.run.rows import StepRow
from raytrain.world import World


def tally(
    sums: tuple[Tensor, Tensor],
    waited: float,
    scale: Tensor,
    seconds: float,
    stop: bool,
    world: World,
) -> Tensor:
    """A worker's part of what is told of a step; the parts of all workers add up.

    Args:
        sums: (sum of the losses, number of right top-1 guesses) of the worker's images, as scalars
            on the device; nothing is waited for.
        waited: seconds waited for the batch.
        scale: fp16's loss scale in the step, a scalar on the device; 1 without.
        seconds: training clock as the step ends.
        stop: whether the worker was asked to stop.
        world: the worker.

    Returns:
        float64 (6,) on the device.
    """
    told = [waited, seconds if world.is_first else 0.0, float(stop)]
    on_host = torch.tensor(told, dtype=torch.float64)
    on_device = torch.stack([part.detach().double() for part in (*sums, scale)])
    return torch.cat([on_device, on_host.to(on_device.device, non_blocking=True)])


DIVERGED = "training has most likely diverged"  # in the message; a sweep looks for it there
_MOST_SKIPPED = 20  # steps in a row that fp16 may leave out
_LOWEST_SCALE = 2.0**-14  # of fp16's loss scale, which stays above 1 while training is healthy


class Meter:
    """The tallies of the last steps, and the rows made of them.

    Args:
        plan: the run.
        seconds: the training clock when the first step begins.
        retells: whether another worker may have to tell what the first one no longer could: then
            the rows of one call of ``rows`` come once more with the next.
    """

    def __init__(self, plan: Plan, seconds: float, retells: bool = False) -> None:
        self._plan = plan
        self._last_seconds = seconds
        self._has_begun = False
        self._counted: list[tuple[int, int, Tensor]] = []  # step, workers, tally
        self._retells = retells
        self._told: list[StepRow] = []
        self._scale = 0.0
        self._skipped = 0

    def begins(self, seconds: float) -> None:
        """The next step begins, by a clock that may be another than before: the first one counts.

        Args:
            seconds: the training clock now.
        """
        if not self._has_begun:
            self._last_seconds = seconds

    def add(self, step: Step, workers: int, tally: Tensor) -> None:
        """Take note of a step that was made.

        Args:
            step: the step.
            workers: how many made it.
            tally: as ``tally`` gives it; it is kept.
        """
        self._has_begun = True
        self._counted.append((step.index, workers, tally))

    def rows(self, add_up: Callable[[Tensor], Tensor]) -> tuple[list[StepRow], bool]:
        """One row for each step since the last call, the same on every worker.

        All workers must call it after the same step.

        Args:
            add_up: sums float64 (n, 6) over the workers.

        Returns:
            The rows, and whether any worker was asked to stop.

        Raises:
            RaytrainError: a loss isn't finite, or fp16's loss scale has collapsed.
        """
        counted, self._counted = self._counted, []
        sums = add_up(torch.stack([part for _, _, part in counted])).tolist()
        rows = self._make_rows(counted, sums)
        self._last_seconds = rows[-1].seconds
        for row in rows:
            self._check(row)
        told, self._told = [*self._told, *rows], rows if self._retells else []
        return told, sums[-1][5] > 0

    def state(self) -> dict[str, Any]:
        """All that another worker needs to go on counting."""
        return {
            "steps": [[step, workers] for step, workers, _ in self._counted],
            "tallies": [part for _, _, part in self._counted],
            "told": [asdict(row) for row in self._told],
            "numbers": [self._last_seconds, self._scale, self._skipped],
        }

    def load(self, state: dict[str, Any], device: str) -> None:
        """Go on counting from another worker's ``state``."""
        self._has_begun = True
        self._counted = [
            (step, workers, part.to(device))
            for (step, workers), part in zip(state["steps"], state["tallies"], strict=True)
        ]
        self._told = [StepRow(**row) for row in state["told"]]
        self._last_seconds, self._scale, self._skipped = state["numbers"]

    def _make_rows(
        self, counted: list[tuple[int, int, Tensor]], sums: list[list[float]]
    ) -> list[StepRow]:
        steps = [self._plan.step(index) for index, _, _ in counted]
        elapsed = max(sums[-1][4] - self._last_seconds, 1e-9)
        images_per_s = sum(step.count for step in steps) / elapsed
        return [
            StepRow(
                step=step.index,
                epoch=step.epoch,
                phase=step.phase,
                samples_seen=self._plan.samples_before(step.index + 1),
                seconds=seconds,
                lr=step.lr,
                momentum=step.momentum,
                weight_decay=step.weight_decay,
                batch=step.count,
                image_px=step.image_px,
                loss=loss_sum / step.count,
                top1=correct / step.count,
                images_per_s=images_per_s,
                data_wait_s=waited / workers,
                loss_scale=scale / workers,
                world_size=workers,
            )
            for step, (_, workers, _), (loss_sum, correct, scale, waited, seconds, _) in zip(
                steps, counted, sums, strict=True
            )
        ]

    def _check(self, row: StepRow) -> None:
        """Raise RaytrainError where a step shows that the run has diverged."""
        advice = f"{DIVERGED}: lower schedule.lr or warm it up longer"
        if self._plan.recipe.precision.dtype == "fp16":
            advice += ", or set precision.dtype=bf16 where the GPU has it"
        # a step that was left out shows by the scale of the next
        self._skipped = self._skipped + 1 if row.loss_scale < self._scale else 0
        self._scale = row.loss_scale
        if not math.isfinite(row.loss):
            problem = f"the loss is {row.loss} {_place(row)}"
        elif self._skipped >= _MOST_SKIPPED:
            problem = f"{self._skipped} steps in a row were left out {_place(row, 'before')}: "
            problem += f"their gradients overflow fp16, at last with loss scale {row.loss_scale:g}"
        elif row.loss_scale < _LOWEST_SCALE:
            problem = f"fp16's loss scale fell to {row.loss_scale:g} {_place(row)}: gradients "
            problem += "overflow fp16 again and again"
        else:
            return
        raise RaytrainError(f"{problem}; {advice}")


def _place(row: StepRow, word: str = "at") -> str:
    return (
        f"{word} step {row.step} (epoch {row.epoch}, phases[{row.phase}], lr {row.lr:.4g}, "
        f"momentum {row.momentum:.3g})"
    )
