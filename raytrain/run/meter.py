"""What a worker counts at each step, added up over the workers only when it is logged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain.errors import RaytrainError
from raytrain.parallel.share import sum_over_workers
from raytrain.recipe.plan import Plan, Step
from raytrain.run.rows import StepRow
from raytrain.world import World


@dataclass(frozen=True, slots=True)
class _Counted:
    step: Step
    loss_sum: Tensor
    correct: Tensor
    waited: float
    seconds: float
    loss_scale: Tensor


_MOST_SKIPPED = 20  # steps in a row that fp16 may leave out
_LOWEST_SCALE = 2.0**-14  # of fp16's loss scale, which stays above 1 while training is healthy


class Meter:
    """Per-step sums of one worker, kept on its device until ``rows`` is called.

    Args:
        plan: the run.
        world: the worker.
        seconds: the training clock when the first step begins.
    """

    def __init__(self, plan: Plan, world: World, seconds: float) -> None:
        self._plan = plan
        self._world = world
        self._last_seconds = seconds
        self._counted: list[_Counted] = []
        self._scale = 0.0
        self._skipped = 0

    def add(
        self, step: Step, sums: tuple[Tensor, Tensor], waited: float, seconds: float, scale: Tensor
    ) -> None:
        """Take note of one step of this worker.

        Args:
            step: the step.
            sums: (sum of the losses, number of right top-1 guesses) of the worker's images, as
                scalars on the device; nothing is waited for.
            waited: seconds waited for the batch.
            seconds: training clock after the step.
            scale: fp16's loss scale in the step, a scalar on the device; 1 without.
        """
        self._counted.append(_Counted(step, *sums, waited, seconds, scale))

    def rows(self, stop: bool) -> tuple[list[StepRow], bool]:
        """One row for each step since the last call, the same on every worker.

        All workers must call it after the same step: it is the one exchange of the meters.

        Args:
            stop: whether this worker was asked to stop.

        Returns:
            The rows, and whether any worker was asked to stop.

        Raises:
            RaytrainError: a loss isn't finite, or fp16's loss scale has collapsed.
        """
        counted, self._counted = self._counted, []
        device = counted[0].loss_sum.device
        sums = torch.zeros(len(counted) + 1, 4, dtype=torch.float64, device=device)
        sums[:-1, 0] = torch.stack([c.loss_sum.detach() for c in counted])
        sums[:-1, 1] = torch.stack([c.correct for c in counted])
        sums[:-1, 2] = torch.tensor([c.waited for c in counted], device=device)
        sums[:-1, 3] = torch.stack([c.loss_scale for c in counted])
        sums[-1, 0] = float(stop)
        *steps, last = sum_over_workers(sums, self._world).tolist()
        rows = self._make_rows(counted, steps)
        self._last_seconds = rows[-1].seconds
        for row in rows:
            self._check(row)
        return rows, last[0] > 0

    def _make_rows(self, counted: list[_Counted], sums: list[list[float]]) -> list[StepRow]:
        elapsed = max(counted[-1].seconds - self._last_seconds, 1e-9)
        images_per_s = sum(c.step.count for c in counted) / elapsed
        return [
            StepRow(
                step=c.step.index,
                epoch=c.step.epoch,
                phase=c.step.phase,
                samples_seen=self._plan.samples_before(c.step.index + 1),
                seconds=c.seconds,
                lr=c.step.lr,
                momentum=c.step.momentum,
                weight_decay=c.step.weight_decay,
                batch=c.step.count,
                image_px=c.step.image_px,
                loss=loss_sum / c.step.count,
                top1=correct / c.step.count,
                images_per_s=images_per_s,
                data_wait_s=waited / self._world.size,
                loss_scale=scale / self._world.size,
                world_size=self._world.size,
            )
            for c, (loss_sum, correct, waited, scale) in zip(counted, sums, strict=True)
        ]

    def _check(self, row: StepRow) -> None:
        """Raise RaytrainError where a step shows that the run has diverged."""
        advice = "training has most likely diverged: lower schedule.lr or warm it up longer"
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
